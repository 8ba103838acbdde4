"""The triton tier of `tercet.ops.kda.fused_kda_adjoint`: the backward fold of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.kda import triton_
from tercet.ops.kda.triton_fold import fold_adjoint
from tercet.ops.kda.triton_plan import plan_slices, plan_tiles
from tercet.ops.packing import sequence_lengths


def declines(d_o: Tensor, q: Tensor, k: Tensor, *rows: Tensor, **settings: Tensor | float | None) -> str | None:
    """Return why these inputs cannot run here, or None."""
    return triton_.declines(q, k, d_o, *rows, state=None, **settings)  # type: ignore[arg-type]


@torch.no_grad()
def call(
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
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    rows = triton_.unit_stride(*(x.flatten(0, 1) for x in (q, k, d_o, z, b)))
    tiles = plan_tiles(lengths, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    work = triton_.prepare(rows, A_log, dt_bias, tiles, rows[2], scale, lower_bound, save=True)
    adjoint = q.new_empty(len(lengths), *d_o.shape[2:], q.shape[3], dtype=torch.float32)
    fold_adjoint(rows[2], work, plan_slices(lengths, q.device), None, adjoint, None)
    return adjoint
