"""Short causal depthwise convolution with SiLU, in front of KDA's q, k and v (report eq. 2)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.conv import reference, torch_
from tercet.ops.packing import sequence_lengths
from tercet.ops.registry import Operator

_short_conv = Operator("short_conv", reference.short_conv, torch_.short_conv, "tercet.ops.conv.triton_")


def short_conv(
    x: Float[Tensor, "batch tokens channels"],
    weight: Float[Tensor, "channels 1 taps"],
    *,
    state: Float[Tensor, "sequences taps-1 channels"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
    tail: bool = True,
) -> tuple[Float[Tensor, "batch tokens channels"], Float[Tensor, "sequences taps-1 channels"] | None]:
    """Return ``SiLU(Σ_j w[j] · x[t − taps + 1 + j])``; the last tap is the current token.

    Args:
        x: input rows, before the convolution.
        weight: one filter per channel, in the published ``[channels, 1, taps]`` form.
        state: the ``taps − 1`` rows before each sequence, oldest first; zeros when absent.
        cu_seqlens: bounds of packed sequences; no tap reaches across them.
        tail: also return the state after the last token; training has no use for it.

    Returns:
        the activated rows in x's dtype, and the newest ``taps − 1`` input rows of each sequence (a shorter sequence
        keeps older rows of *state*, shifted), or None without *tail*.

    Raises:
        ShapeError: shapes disagree.
    """
    if x.ndim != 3 or weight.ndim != 3 or weight.shape[:2] != (x.shape[2], 1):
        raise ShapeError(
            f"short_conv takes x [B, T, C] and weight [C, 1, taps], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    lengths = sequence_lengths(x.shape[0], x.shape[1], cu_seqlens)
    expected = (len(lengths), weight.shape[2] - 1, x.shape[2])
    if state is not None and tuple(state.shape) != expected:
        raise ShapeError(
            f"the convolution state must be [sequences, taps-1, channels] = {expected}, got {tuple(state.shape)}"
        )
    return _short_conv(x, weight, state=state, lengths=lengths, tail=tail)
