"""Host-side tables of the KDA kernels: which tokens a tile covers and which tiles a sequence owns.

Tiles of 16 tokens are numbered sequence by sequence and never cross one. The tables depend on the lengths alone, so
they are built once per length tuple and kept on the device.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tercet.ops.kda.triton_math import TILE

SLAB_MATRICES = 24576
"""State matrices (tiles × heads) that the backward pass keeps at a time: 1.6 GB of states and adjoints at 128 × 128."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tables of one batch.

    Attributes:
        tiles: ``[X, 3]`` int32: first token, tokens inside the sequence, sequence.
        sequences: ``[N, 4]`` int32: first tile, tile count, first token, length.
        counts: tiles of every sequence, on the host.
        ends: one past the last tile of every sequence.
        slots: ``[T]`` int64, place of every token in the flat ``[X · 16]`` order of tiles.
    """

    tiles: Tensor
    sequences: Tensor
    counts: tuple[int, ...]
    ends: tuple[int, ...]
    slots: Tensor

    @property
    def total(self) -> int:
        """Tiles in all."""
        return sum(self.counts)

    def sequences_of(self, low: int, high: int) -> tuple[int, int]:
        """Return the range of sequences that own tiles [low, high), which is not empty."""
        return bisect_right(self.ends, low), bisect_left(self.ends, high) + 1


@lru_cache(maxsize=64)
def plan_tiles(lengths: tuple[int, ...], device: torch.device) -> Tiles:
    """Cut sequences of the given *lengths* into tiles."""
    length = torch.tensor(lengths, dtype=torch.int64)
    count = (length + TILE - 1) // TILE
    start = length.cumsum(0) - length
    first = count.cumsum(0) - count
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    within = (torch.arange(int(count.sum())) - first[sequence]) * TILE
    inside = torch.minimum(length[sequence] - within, torch.tensor(TILE))
    tiles = torch.stack([start[sequence] + within, inside, sequence], dim=1)
    slots = torch.arange(int(length.sum())) + torch.repeat_interleave(first * TILE - start, length)
    sequences = torch.stack([first, count, start, length], dim=1)
    return Tiles(
        tiles.to(device=device, dtype=torch.int32),
        sequences.to(device=device, dtype=torch.int32),
        tuple(count.tolist()),
        tuple(count.cumsum(0).tolist()),
        slots.to(device),
    )


def slab_count(tiles: int, heads: int) -> int:
    """Return how many slabs the backward pass cuts *tiles* into."""
    return -(-tiles // max(1, min(4096, SLAB_MATRICES // heads)))


@lru_cache(maxsize=64)
def plan_slabs(plan: Tiles, heads: int) -> tuple[tuple[int, int], ...]:
    """Cut the tiles into ranges [low, high) of nearly equal size, in order."""
    count = slab_count(plan.total, heads)
    bounds = [n * plan.total // count for n in range(count + 1)]
    return tuple(itertools.pairwise(bounds))
