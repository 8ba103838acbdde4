"""Gates: KDA's decay, bounded (report eq. 5) or softplus (Kimi-Linear §3), and the sigmoid on MLA's output (eq. 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


def _reference(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    compute = torch.promote_types(z.dtype, torch.float32)
    slope = A_log.to(compute).exp()[:, None]
    biased = z.to(compute) + dt_bias.to(compute)
    if lower_bound is None:
        return -slope * F.softplus(biased, threshold=20.0)
    return lower_bound * torch.sigmoid(slope * biased)


_gate = Operator("kda_gate", _reference)


def kda_gate(
    z: Float[Tensor, "*lead heads key"],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads key"],
    *,
    lower_bound: float | None = -5.0,
) -> Float[Tensor, "*lead heads key"]:
    """Return the log decay ``g``, natural logarithm, at least fp32.

    Bounded: ``g = lower_bound · σ(e^A · (z + bias))``, in (lower_bound, 0). With ``lower_bound=None``:
    ``g = −e^A · softplus(z + bias)``, unbounded. The two are different functions; neither is a clamp of the other.

    Args:
        z: gate logits.
        A_log: one scalar per head (never per channel).
        dt_bias: added before the slope ``e^A`` multiplies.
        lower_bound: floor of the bounded gate, nats per token.

    Raises:
        ShapeError: A_log is not one value a head, or dt_bias not one value a channel.
    """
    if z.ndim < 2 or A_log.shape != z.shape[-2:-1] or dt_bias.shape != z.shape[-2:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (z, A_log, dt_bias))
        raise ShapeError(f"kda_gate takes z [..., heads, key], A_log [heads], dt_bias [heads, key]; got {shapes}")
    return _gate(z, A_log, dt_bias, lower_bound=lower_bound)


def sigmoid_gate_reference(o: Tensor, gate: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `sigmoid_gate`; the formula, differentiable by autograd."""
    return (o * torch.sigmoid(gate.view_as(o).to(o.dtype))).to(dtype)


_sigmoid_gate = Operator("sigmoid_gate", sigmoid_gate_reference, triton_module="tercet.ops.gate.triton_")


def sigmoid_gate(
    o: Float[Tensor, "batch tokens heads value"],
    gate: Float[Tensor, "batch tokens heads_value"],
    *,
    dtype: torch.dtype,
) -> Float[Tensor, "batch tokens heads value"]:
    """Return ``o · σ(gate)`` without a norm, computed in o's type (fp32 in training) and rounded once to *dtype*.

    Args:
        o: output of attention, not rounded yet.
        gate: gate logits, all heads of a token side by side.
        dtype: type of the result.

    Raises:
        ShapeError: gate does not hold one value for each of o's.
    """
    if o.ndim != 4 or gate.shape != (*o.shape[:2], o.shape[2] * o.shape[3]):
        raise ShapeError(
            f"sigmoid_gate takes o [B, T, H, V] and gate [B, T, H·V], got {tuple(o.shape)} and {tuple(gate.shape)}"
        )
    return _sigmoid_gate(o, gate, dtype=dtype)
