"""Which rows belong to which expert, found on the GPU without telling the CPU.

A counting sort: choices are counted per expert and block, the counts of an expert are summed over blocks, and every
choice takes its expert's start plus the equal choices before it. Stable, so the order of rows — and every sum over
them — is the same in every run. Work for matrix products comes as a table of tiles, whose length is known to the GPU
alone; the CPU knows a bound.

Shapes: T tokens, k choices, R = T·k rows, E experts, B blocks of choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHOICES = 64
_BINS = 32
_BLOCKS = 2048
"""Blocks whose counts are summed at once."""


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
    """[bound] expert of the tile."""
    first: Tensor
    """[bound] first row of the tile."""
    used: Tensor
    """[1] tiles there are; the tables hold nothing after them."""


@triton.jit
def _count_kernel(experts, counts, rows, count, blocks, CHOICES: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    at = block * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts + at, mask=at < rows, other=-1).to(tl.int32)
    for first in range(0, count, BINS):
        bins = first + tl.arange(0, BINS)
        hits = tl.sum((chosen[:, None] == bins[None, :]).to(tl.int32), 0)
        tl.store(counts + bins.to(tl.int64) * blocks + block, hits, mask=bins < count)


@triton.jit
def _scan_kernel(counts, totals, blocks, BLOCK: tl.constexpr):
    """Replace the counts of one expert by the choices before each block, and leave their total."""
    expert = tl.program_id(0)
    own = counts + expert.to(tl.int64) * blocks
    before = tl.zeros([], tl.int32)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        hits = tl.load(own + at, mask=at < blocks, other=0)
        tl.store(own + at, before + tl.cumsum(hits, 0) - hits, mask=at < blocks)
        before += tl.sum(hits, 0)
    tl.store(totals + expert, before)


@triton.jit
def _place_kernel(experts, before, ends, choice, slot, rows, blocks, CHOICES: tl.constexpr):
    block = tl.program_id(0)
    within = tl.arange(0, CHOICES)
    at = block * CHOICES + within
    inside = at < rows
    chosen = tl.load(experts + at, mask=inside, other=0).to(tl.int32)
    begin = tl.load(ends + chosen - 1, mask=inside & (chosen > 0), other=0)
    label = tl.where(inside, chosen, -1)
    earlier = (label[:, None] == label[None, :]) & (within[None, :] < within[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    row = begin + tl.load(before + chosen.to(tl.int64) * blocks + block, mask=inside, other=0) + rank
    tl.store(slot + at, row, mask=inside)
    tl.store(choice + row, at, mask=inside)


def plan_rows(experts: Tensor, count: int) -> Plan:
    """Sort the choices ``[T, k]`` of *count* experts by expert."""
    flat = experts.contiguous()
    rows = flat.numel()
    blocks = max(1, triton.cdiv(rows, _CHOICES))
    counts = torch.empty(count, blocks, dtype=torch.int32, device=experts.device)
    totals = counts.new_empty(count)
    _count_kernel[(blocks,)](flat, counts, rows, count, blocks, CHOICES=_CHOICES, BINS=_BINS)
    _scan_kernel[(count,)](counts, totals, blocks, BLOCK=min(_BLOCKS, triton.next_power_of_2(blocks)))
    ends = totals.cumsum(0, dtype=torch.int32)
    choice = counts.new_empty(rows)
    slot = counts.new_empty(experts.shape)
    _place_kernel[(blocks,)](flat, counts, ends, choice, slot, rows, blocks, CHOICES=_CHOICES)
    return Plan(choice, slot, ends)


@triton.jit
def _tile_kernel(ends, expert, first, used, count, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e writes the tiles of expert e."""
    mine = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    real = index < count
    end = tl.load(ends + index, mask=real, other=0)
    begin = tl.load(ends + index - 1, mask=real & (index > 0), other=0)
    needed = tl.where(real, (end - begin + SIZE - 1) // SIZE, 0)
    from_tile = tl.sum(tl.where(index < mine, needed, 0), 0)
    to_tile = from_tile + tl.sum(tl.where(index == mine, needed, 0), 0)
    row = tl.sum(tl.where(index == mine, begin, 0), 0)
    for start in range(from_tile, to_tile, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(expert + tile, tl.zeros([BLOCK], tl.int32) + mine, mask=tile < to_tile)
        tl.store(first + tile, row + (tile - from_tile) * SIZE, mask=tile < to_tile)
    if mine == count - 1:
        tl.store(used, to_tile)


def tile_rows(ends: Tensor, rows: int, size: int) -> TileTable:
    """Cut every expert's rows into tiles of *size*."""
    count = len(ends)
    bound = rows // size + min(count, rows)
    table = TileTable(ends.new_empty(bound), ends.new_empty(bound), ends.new_empty(1))
    _tile_kernel[(count,)](ends, *table, count, SIZE=size, EXPERTS=triton.next_power_of_2(count), BLOCK=64)
    return table
