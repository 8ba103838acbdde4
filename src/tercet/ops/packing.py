"""Packed sequences: several documents on one token axis, described by ``cu_seqlens``.

Operators take ``[B, T, …]`` tensors. Without ``cu_seqlens`` each of the B rows is one sequence; with it B must be 1
and sequence n occupies tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``. Sequences may be empty. Both forms are treated as
one flat token axis of N sequences by everything below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.tables import kept


def sequence_lengths(batch: int, tokens: int, cu_seqlens: Int[Tensor, "bounds"] | None) -> tuple[int, ...]:
    """Return the length of every sequence of a ``[batch, tokens, …]`` tensor.

    Raises:
        ShapeError: ``cu_seqlens`` with batch > 1, or bounds that do not start at 0, rise, and end at *tokens*.
    """
    if cu_seqlens is None:
        return (tokens,) * batch
    if batch != 1:
        raise ShapeError(f"cu_seqlens describes one packed row, but the batch is {batch}; flatten it to [1, B·T, …]")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        seen = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        raise ShapeError(f"cu_seqlens must be a 1-D integer tensor of at least 2 bounds, got {seen}")
    bounds = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 0:
        raise ShapeError(f"cu_seqlens must rise from 0 to the {tokens} tokens given, got {bounds}")
    return lengths


def positions(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Int[Tensor, "tokens"]:
    """Return the index of each token within its own sequence."""
    return torch.cat([torch.arange(n, device=device) for n in lengths]) if lengths else torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Tiling:
    """A flat token axis cut into tiles of `size` tokens that never cross a sequence.

    Tiles are ordered by step: all first tiles of all sequences, then all second tiles, … Sequences are ordered by
    falling tile count, so the tiles of step j belong to the first ``counts[j]`` sequences of `order`.
    """

    size: int
    gather: Tensor
    """[tiles · size] token of every slot; slots past a sequence's end hold the token count (one past the last)."""
    scatter: Tensor
    """[tokens] slot of every token."""
    counts: tuple[int, ...]
    """Tiles in every step, not increasing."""
    order: Tensor
    """[sequences] original index of the r-th sequence in tile order."""
    dense: bool
    """No slot is padding."""

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return sum(self.counts)


@kept(64)
def tiling(lengths: tuple[int, ...], size: int, device: torch.device) -> Tiling:
    """Plan tiles of *size* tokens for sequences of the given *lengths*."""
    tokens = sum(lengths)
    starts = torch.tensor((0, *lengths)).cumsum(0)
    need = [-(-n // size) for n in lengths]
    ranked = sorted(range(len(lengths)), key=lambda n: -need[n])
    order = torch.tensor(ranked, dtype=torch.long)
    counts = tuple(sum(n > step for n in need) for step in range(max(need, default=0)))
    gather = torch.full((sum(counts), size), tokens, dtype=torch.long)
    offsets = torch.arange(size)
    row = 0
    for step, active in enumerate(counts):
        sequence = order[:active]
        token = starts[sequence][:, None] + step * size + offsets
        inside = token < starts[sequence + 1][:, None]
        gather[row : row + active] = torch.where(inside, token, tokens)
        row += active
    flat = gather.flatten()
    scatter = torch.empty(tokens + 1, dtype=torch.long)  # the last takes the slots past ends
    scatter[flat] = torch.arange(flat.numel())
    dense = all(n % size == 0 for n in lengths)
    return Tiling(size, flat.to(device), scatter[:tokens].to(device), counts, order.to(device), dense)


def to_tiles(x: Tensor, plan: Tiling) -> Tensor:
    """Gather ``[tokens, …]`` into ``[tiles, size, …]``; padding slots are zero."""
    if plan.dense:
        tiles = x.index_select(0, plan.gather)
    else:
        tiles = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, plan.gather)
    return tiles.view(plan.tiles, plan.size, *x.shape[1:])


def from_tiles(tiles: Tensor, plan: Tiling) -> Tensor:
    """Scatter ``[tiles, size, …]`` back to ``[tokens, …]``."""
    return tiles.reshape(plan.tiles * plan.size, *tiles.shape[2:]).index_select(0, plan.scatter)
