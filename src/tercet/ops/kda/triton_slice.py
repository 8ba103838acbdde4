"""The triton tier of `tercet.ops.kda.fused_kda_fold`: every sequence is one piece that is folded and never walked."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.kda import triton_
from tercet.ops.kda.triton_fold import fold
from tercet.ops.kda.triton_plan import plan_slices, plan_tiles
from tercet.ops.packing import sequence_lengths


def declines(k: Tensor, v: Tensor, *rows: Tensor, **settings: Tensor | float | None) -> str | None:
    """Return why these inputs cannot run here, or None."""
    return triton_.declines(k, k, v, *rows, scale=None, state=None, **settings)  # type: ignore[arg-type]


@torch.no_grad()
def call(
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
    lengths = sequence_lengths(k.shape[0], k.shape[1], cu_seqlens)
    rows = triton_.unit_stride(*(x.flatten(0, 1) for x in (k, k, v, z, b)))
    work = triton_.prepare(rows, A_log, dt_bias, plan_tiles(lengths, k.device), rows[2], 1.0, lower_bound, save=False)
    H, V, K, N = *v.shape[2:], k.shape[3], len(lengths)
    state = v.new_empty(N, H, V, K, dtype=torch.float32)
    transition = v.new_empty(N, H, K, K, dtype=torch.float32)
    fold(rows[2], work, plan_slices(lengths, k.device), None, state, transition)
    return transition, state
