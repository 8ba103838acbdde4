"""Prefill that also returns the state at requested tokens: the recurrence writes them as it passes."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.kda import triton_
from tercet.ops.kda.triton_math import TILE
from tercet.ops.kda.triton_plan import plan_tiles, wanted_pieces
from tercet.ops.packing import sequence_lengths


def declines(*rows: Tensor, exports: tuple[tuple[int, int], ...], **settings: Tensor | float | None) -> str | None:
    """Return why these inputs cannot run here, or None."""
    if odd := [place for place in exports if place[1] % TILE]:
        return f"states exist only every {TILE} tokens, not at {odd[0]}"
    return triton_.declines(*rows, **settings)  # type: ignore[arg-type]


@torch.no_grad()
def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    exports: tuple[tuple[int, int], ...],
    scale: float | None,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `tercet.ops.kda.fused_kda_export`."""
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    plan = plan_tiles(lengths, q.device)
    rows = triton_.unit_stride(*(x.flatten(0, 1) for x in (q, k, v, z, b)))
    places = sorted(set(exports))
    table = torch.full((plan.total,), -1, dtype=torch.int32)
    for slot, (sequence, offset) in enumerate(places):
        table[plan.ends[sequence] - plan.counts[sequence] + offset // TILE - 1] = slot
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    work = triton_.prepare(rows, A_log, dt_bias, plan, rows[2], scale, lower_bound, save=False)
    exported = v.new_empty(len(places), *v.shape[2:], q.shape[3], dtype=torch.float32)
    pieces = triton_.cut(lengths, wanted_pieces(), rows[2], q.shape[3], False)
    exports_to = table.to(q.device), exported
    o, final, _ = triton_.walk(rows[2], work, pieces, state, len(lengths), exports_to)
    order = torch.tensor([places.index(place) for place in exports], dtype=torch.long, device=q.device)
    return o.view(v.shape), final, exported.index_select(0, order)
