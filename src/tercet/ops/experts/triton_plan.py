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

from tercet.ops.gpu import blocks, power_of_two

_CHOICES = 64
_BINS = 32
_BLOCKS = 2048
"""Blocks whose counts are summed at once."""


class Plan(NamedTuple):
    """Rows sorted by expert, and cut into tiles that never cross an expert."""

    choice: Tensor
    """[R] flat choice (token · k + position) of every row."""
    slot: Tensor
    """[T, k] row of every choice."""
    ends: Tensor
    """[E] end of every expert's rows."""
    tiles: Tensor
    """[1 + 3 · bound] number of tiles, then of each its expert, its first row and the end of its expert's rows."""


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


@triton.jit
def _tile_kernel(totals, ends, tiles, count, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e finds where expert e's rows end, and writes its tiles."""
    mine = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    rows = tl.load(totals + index, mask=index < count, other=0)
    needed = (rows + SIZE - 1) // SIZE
    begin = tl.sum(tl.where(index < mine, rows, 0), 0)
    end = begin + tl.load(totals + mine)
    from_tile = tl.sum(tl.where(index < mine, needed, 0), 0)
    to_tile = from_tile + (end - begin + SIZE - 1) // SIZE
    for start in range(from_tile, to_tile, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        to = tiles + 1 + 3 * tile
        inside = tile < to_tile
        tl.store(to, tl.zeros([BLOCK], tl.int32) + mine, mask=inside)
        tl.store(to + 1, begin + (tile - from_tile) * SIZE, mask=inside)
        tl.store(to + 2, tl.zeros([BLOCK], tl.int32) + end, mask=inside)
    tl.store(ends + mine, end)
    if mine == count - 1:
        tl.store(tiles, to_tile)


def tile_bound(rows: int, count: int, height: int) -> int:
    """Return how many tiles of *height* there can be."""
    return rows // height + min(count, rows)


def plan_rows(experts: Tensor, count: int, height: int) -> Plan:
    """Sort the choices ``[T, k]`` of *count* experts by expert, and cut every expert's rows into tiles of *height*."""
    flat = experts.contiguous()
    rows = flat.numel()
    spans = max(1, blocks(rows, _CHOICES))
    counts = torch.empty(count, spans, dtype=torch.int32, device=experts.device)
    totals, ends = counts.new_empty(count), counts.new_empty(count)
    choice, slot = counts.new_empty(rows), counts.new_empty(experts.shape)
    tiles = counts.new_empty(1 + 3 * tile_bound(rows, count, height))
    _count_kernel[(spans,)](flat, counts, rows, count, spans, CHOICES=_CHOICES, BINS=_BINS)
    _scan_kernel[(count,)](counts, totals, spans, BLOCK=min(_BLOCKS, power_of_two(spans)))
    _tile_kernel[(count,)](totals, ends, tiles, count, SIZE=height, EXPERTS=power_of_two(count), BLOCK=64)
    _place_kernel[(spans,)](flat, counts, ends, choice, slot, rows, spans, CHOICES=_CHOICES)
    return Plan(choice, slot, ends, tiles)
