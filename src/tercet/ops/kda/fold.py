"""What a slice of tokens does to any state, and to any adjoint, computed with KDA itself (report §5.1.2, eq. 17).

Rows of the stored state ``[V, K]`` never meet: each value channel is a recurrence of its own. So the slice is run once
on V + K value channels, the first V with the values and a zero state, the others with zero values and the unit states.
What comes out below is the map's matrix. The adjoint of the outputs is the gradient of a zero start state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.packing import sequence_lengths


@torch.no_grad()
def fused_kda_fold(
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.kda.fused_kda_fold`."""
    from tercet.ops.kda import fused_kda

    H, V, K = *v.shape[2:], k.shape[3]
    sequences = len(sequence_lengths(k.shape[0], k.shape[1], cu_seqlens))
    compute = torch.promote_types(k.dtype, torch.float32)
    values = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=3)
    units = torch.eye(K, dtype=compute, device=k.device).expand(sequences, H, K, K)
    start = torch.cat([units.new_zeros(sequences, H, V, K), units], dim=2)
    settings = {"lower_bound": lower_bound, "state": start, "cu_seqlens": cu_seqlens}
    _, final = fused_kda(k, k, values, z, b, A_log, dt_bias, **settings)  # type: ignore[arg-type]
    return final[:, :, V:].contiguous(), final[:, :, :V].contiguous()


def fused_kda_adjoint(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """See `tercet.ops.kda.fused_kda_adjoint`."""
    from tercet.ops.kda import fused_kda

    sequences = len(sequence_lengths(q.shape[0], q.shape[1], cu_seqlens))
    compute = torch.promote_types(q.dtype, torch.float32)
    inputs = [x.detach() for x in (q, k, torch.zeros_like(d_o), z, b, A_log, dt_bias)]
    with torch.enable_grad():
        start = torch.zeros(sequences, *d_o.shape[2:], q.shape[3], dtype=compute, device=q.device, requires_grad=True)
        settings = {"scale": scale, "lower_bound": lower_bound, "state": start, "cu_seqlens": cu_seqlens}
        o, _ = fused_kda(*inputs, **settings)  # type: ignore[arg-type]
    return torch.autograd.grad(o, start, d_o.detach().to(o.dtype))[0]
