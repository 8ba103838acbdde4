"""The decay gate of KDA: bounded (report eq. 5) or softplus (Kimi-Linear §3)."""

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
