"""Which rows belong to which expert, found on the GPU without telling the CPU.

A counting sort: choices are counted per block and expert, the counts are summed over blocks, and every choice takes
its expert's start plus the equal choices before it. Stable, so the order of rows — and every sum over them — is the
same in every run. Work for matrix products comes as a table of tiles; its length is a bound that the CPU knows, and
tiles past the last used one carry the expert −1.

Shapes: T tokens, k choices, R = T·k rows, E experts, B blocks of choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHOICES = 128
_BINS = 32


class Plan(NamedTuple):
    """Rows sorted by expert."""

    choice: Tensor
    """[R] flat choice (token · k + position) of every row."""
    slot: Tensor
    """[T, k] row of every choice."""
    ends: Tensor
    """[E] end of every expert's rows."""


class TileTable(NamedTuple):
    """Tiles of rows that never cross an expert."""

    expert: Tensor
    """[tiles] expert of the tile, or -1."""
    first: Tensor
    """[tiles] first row of the tile."""


@triton.jit
def _count_kernel(experts, counts, rows, count, CHOICES: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    at = block * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts + at, mask=at < rows, other=-1).to(tl.int32)
    for first in range(0, count, BINS):
        bins = first + tl.arange(0, BINS)
        hits = tl.sum((chosen[:, None] == bins[None, :]).to(tl.int32), 0)
        tl.store(counts + block.to(tl.int64) * count + bins, hits, mask=bins < count)


@triton.jit
def _place_kernel(experts, starts, choice, slot, rows, count, CHOICES: tl.constexpr):
    block = tl.program_id(0)
    within = tl.arange(0, CHOICES)
    at = block * CHOICES + within
    inside = at < rows
    chosen = tl.load(experts + at, mask=inside, other=0).to(tl.int32)
    label = tl.where(inside, chosen, -1)
    earlier = (label[:, None] == label[None, :]) & (within[None, :] < within[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    row = tl.load(starts + block.to(tl.int64) * count + chosen, mask=inside, other=0) + rank
    tl.store(slot + at, row, mask=inside)
    tl.store(choice + row, at, mask=inside)


def plan_rows(experts: Tensor, count: int) -> Plan:
    """Sort the choices ``[T, k]`` of *count* experts by expert."""
    flat = experts.contiguous()
    rows = flat.numel()
    blocks = max(1, triton.cdiv(rows, _CHOICES))
    counts = torch.empty(blocks, count, dtype=torch.int32, device=experts.device)
    _count_kernel[(blocks,)](flat, counts, rows, count, CHOICES=_CHOICES, BINS=_BINS)
    through = counts.cumsum(0, dtype=torch.int32)
    ends = through[-1].cumsum(0, dtype=torch.int32)
    starts = through - counts + (ends - through[-1])
    choice = counts.new_empty(rows)
    slot = counts.new_empty(experts.shape)
    _place_kernel[(blocks,)](flat, starts, choice, slot, rows, count, CHOICES=_CHOICES)
    return Plan(choice, slot, ends)


@triton.jit
def _tile_kernel(ends, expert, first, count, tiles, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e writes the tiles of expert e; the last program marks the tiles that no expert has."""
    mine = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    real = index < count
    end = tl.load(ends + index, mask=real, other=0)
    begin = tl.load(ends + index - 1, mask=real & (index > 0), other=0)
    needed = tl.where(real, (end - begin + SIZE - 1) // SIZE, 0)
    from_tile = tl.sum(tl.where(index < mine, needed, 0), 0)
    to_tile = tl.where(mine < count, from_tile + tl.sum(tl.where(index == mine, needed, 0), 0), tiles)
    row = tl.sum(tl.where(index == mine, begin, 0), 0)
    label = tl.where(mine < count, mine, -1)
    for start in range(from_tile, to_tile, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(expert + tile, tl.zeros([BLOCK], tl.int32) + label, mask=tile < to_tile)
        tl.store(first + tile, row + (tile - from_tile) * SIZE, mask=tile < to_tile)


def tile_rows(ends: Tensor, rows: int, size: int) -> TileTable:
    """Cut every expert's rows into tiles of *size*."""
    count = len(ends)
    tiles = rows // size + min(count, rows)
    table = TileTable(ends.new_empty(tiles), ends.new_empty(tiles))
    _tile_kernel[(count + 1,)](ends, *table, count, tiles, SIZE=size, EXPERTS=triton.next_power_of_2(count), BLOCK=64)
    return table
