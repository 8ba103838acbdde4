"""Host-side tables of the KDA kernels: which tokens a tile covers, and which tiles a program walks.

Tiles of 16 tokens are numbered sequence by sequence and never cross one. A *piece* is a range of tiles of one sequence
whose start state is known before it is walked: a whole sequence; or, where heads × sequences cannot fill the GPU, one
of several parts of it that run side by side (kernels.md §6); the backward pass also cuts at its slabs. The state at an
inner edge between pieces has a *slot*, slots of a sequence being consecutive.

All tables follow from the lengths, the heads and the size of the GPU, so they are built once per combination, on the
host, and nothing is read back from the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tercet.errors import ConfigError
from tercet.ops.choice import Choice
from tercet.ops.kda.triton_math import TILE
from tercet.ops.tables import kept

SLAB_MATRICES = 24576
"""State matrices (tiles × heads) that the backward pass keeps at a time: 1.6 GB of states and adjoints at 128 × 128."""
BLOCK_V = 64
"""Value channels a recurrence program owns: one warp group's rows of the state."""

WALK_STEP, FOLD_STEP, CHAIN_STEP = 0.75, 0.85, 4.0
"""Microseconds a program takes for one tile of the walk, one tile of the fold, and one piece of the chain."""
WALK_BUSY, FOLD_BUSY, PREPARE_BUSY = 0.42, 0.30, 1.45
"""Multiprocessor microseconds of one program's tile in a full GPU: what bounds the walks once there are enough."""
SPLIT_LAUNCHES = 12.0
"""Microseconds for the two extra launches of a split."""
PIECE_TILES = 16
"""No piece the planner makes is shorter."""
WORTH = 0.9
"""Split only if the modelled time falls below this part of the unsplit one."""

BEGINNING, ENDING, NOWHERE = -1, -1, -2
"""Instead of a slot: the sequence's own first or last state; no state at all (zero)."""

_forced = Choice(0)


@contextlib.contextmanager
def use_pieces(count: int) -> Iterator[None]:
    """Cut every sequence into *count* pieces (fewer where it has fewer tiles) instead of asking the planner; 0 asks it.

    For tests and measurements: the results differ by rounding alone.
    """
    if count < 0:
        raise ConfigError(
            f"a sequence is cut into {count} pieces; give a positive number, or 0 for the planner's choice"
        )
    with _forced.held(count):
        yield


def wanted_pieces() -> int:
    """Return the number that `use_pieces` asks for, or 0."""
    return _forced.value


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tables of one batch.

    Attributes:
        tiles: ``[X, 3]`` int32: first token, tokens inside the sequence, sequence.
        counts: tiles of every sequence, on the host.
        ends: one past the last tile of every sequence.
    """

    tiles: Tensor
    counts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def total(self) -> int:
        """Tiles in all."""
        return sum(self.counts)


@kept(64)
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
    return Tiles(
        tiles.to(device=device, dtype=torch.int32),
        tuple(count.tolist()),
        tuple(count.cumsum(0).tolist()),
    )


def slab_count(tiles: int, heads: int) -> int:
    """Return how many slabs the backward pass cuts *tiles* into."""
    return -(-tiles // max(1, min(4096, SLAB_MATRICES // heads)))


def plan_slabs(tiles: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Cut the tiles into ranges [low, high) of nearly equal size, in order."""
    count = slab_count(tiles, heads)
    bounds = [n * tiles // count for n in range(count + 1)]
    return tuple(itertools.pairwise(bounds))


@lru_cache(maxsize=256)
def plan_splits(counts: tuple[int, ...], heads: int, blocks: int, fold_blocks: int, processors: int) -> tuple[int, ...]:
    """Return into how many pieces every sequence of *counts* tiles is best cut, all 1 when a split gains under 10 %.

    The model: a kernel takes its longest program's steps one after another, or the whole work at the rate of a full
    GPU, whichever is longer. Walking unsplit is one such kernel. Split, there are three: the fold of every piece but
    the last (*fold_blocks* programs a head, *blocks* for the walk), the chain over pieces, and the walk from exact
    states. `prepare_tile` comes before either.
    """
    whole = (1,) * len(counts)
    longest, total = max(counts, default=0), sum(counts)
    if longest < 2 * PIECE_TILES:
        return whole
    prepare = total * heads * PREPARE_BUSY / processors
    full = total * heads * blocks * WALK_BUSY / processors
    best, chosen = WORTH * (prepare + max(longest * WALK_STEP, full)), whole
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        size = -(-longest // parts)
        if size < PIECE_TILES:
            break
        splits = tuple(max(1, (n + size // 2) // size) for n in counts)
        folded = sum(n * (p - 1) / p for n, p in zip(counts, splits))
        step = max(n / p for n, p in zip(counts, splits))
        fold = max(step * FOLD_STEP, folded * heads * fold_blocks * FOLD_BUSY / processors)
        walk = max(step * WALK_STEP, full)
        time = prepare + fold + walk + max(splits) * CHAIN_STEP + SPLIT_LAUNCHES
        if time < best:
            best, chosen = time, splits
    return chosen


@dataclass(frozen=True, eq=False)
class Slab:
    """Pieces of one range of tiles, as the backward pass takes them.

    Attributes:
        low: first tile.
        high: one past the last tile.
        pieces: rows of all pieces.
        folds: rows of the pieces whose adjoint is folded: those with another piece of their sequence before them here.
        chains: as in `Pieces`.
    """

    low: int
    high: int
    pieces: Tensor
    folds: Tensor
    chains: Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """What every program of the serial kernels walks.

    A row of a table is: first tile, tiles, first token, tokens, sequence, slot of the state before it, slot of the
    state after it; int32. A chain is the first slot of a sequence and how many slots follow each other there.

    Attributes:
        runs: ``[R, 7]``, the walk forwards: pieces of split sequences, whole sequences otherwise.
        folds: ``[F, 7]``, pieces of split sequences that another one follows.
        chains: ``[C, 2]``, one row a split sequence.
        exports: ``[X]`` slot after every tile that ends an inner piece of an unsplit sequence, else −1; None without.
        slots: inner edges in all.
        slabs: the same for the backward pass, in order.
    """

    runs: Tensor
    folds: Tensor
    chains: Tensor
    exports: Tensor | None
    slots: int
    slabs: tuple[Slab, ...]


Row = tuple[int, int, int, int, int, int, int]


def tile_counts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tiles of every sequence."""
    return tuple(-(-n // TILE) for n in lengths)


def _slabs(counts: tuple[int, ...], heads: int, trained: bool) -> tuple[tuple[int, int], ...]:
    return plan_slabs(sum(counts), heads) if trained else ((0, sum(counts)),)


def _edges(
    counts: tuple[int, ...], splits: tuple[int, ...], slabs: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, ...]]:
    """Yield for every sequence the tiles at which its pieces begin, and that behind its last."""
    first = 0
    for count, split in zip(counts, splits):
        parts = max(1, min(split, count))
        edges = {first + part * count // parts for part in range(parts)}
        edges |= {low for low, _ in slabs if first < low < first + count}
        yield (*sorted(edges), first + count)
        first += count


def count_slots(lengths: tuple[int, ...], splits: tuple[int, ...], heads: int, trained: bool) -> int:
    """Return the number of inner edges between pieces, without making any table."""
    counts = tile_counts(lengths)
    return sum(len(edges) - 2 for edges in _edges(counts, splits, _slabs(counts, heads, trained)))


@kept(64)
def plan_pieces(
    lengths: tuple[int, ...], splits: tuple[int, ...], heads: int, trained: bool, device: torch.device
) -> Pieces:
    """Cut every sequence into its number of *splits*, and at the slabs of the backward pass if *trained*."""
    counts = tile_counts(lengths)
    slabs = _slabs(counts, heads, trained)
    pieces: list[Row] = []
    runs: list[Row] = []
    chains: list[tuple[int, int]] = []
    exports: dict[int, int] = {}
    slot = first = token = 0
    for n, (length, count, edges) in enumerate(zip(lengths, counts, _edges(counts, splits, slabs))):
        mine = [
            (low, high - low, token + (low - first) * TILE, min(length - (low - first) * TILE, (high - low) * TILE), n)
            for low, high in itertools.pairwise(edges)
        ]
        last = len(mine) - 1
        rows = [
            (*row, BEGINNING if k == 0 else slot + k - 1, ENDING if k == last else slot + k)
            for k, row in enumerate(mine)
        ]
        pieces += rows
        if min(splits[n], count) > 1:
            runs += rows
            chains.append((slot, last))
        else:
            runs.append((first, count, token, length, n, BEGINNING, ENDING))
            exports |= {row[0] + row[1] - 1: row[6] for row in rows[:-1]}
        slot, first, token = slot + last, first + count, token + length
    folds = [row for row in runs if row[6] != ENDING]
    tables: list[list] = [runs, folds, chains]
    for low, high in slabs:
        inside = [row for row in pieces if low <= row[0] < high and row[1]]
        tables += [inside, *_adjoint_folds(inside)]
    run_table, fold_table, chain_table, *rest = _to_device(tables, device)
    table = torch.full((sum(counts),), -1, dtype=torch.int32)
    for tile, place in exports.items():
        table[tile] = place
    return Pieces(
        run_table,
        fold_table,
        chain_table,
        table.to(device) if exports else None,
        slot,
        tuple(Slab(low, high, *rest[3 * n : 3 * n + 3]) for n, (low, high) in enumerate(slabs)),
    )


def _adjoint_folds(rows: list[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Return the folds and chains of a slab's pieces: the last of a sequence starts from its adjoint, others from 0."""
    folds, chains = [], []
    for _, group in itertools.groupby(rows, key=lambda row: row[4]):
        mine = list(group)
        if len(mine) > 1:
            folds += [(*row[:6], NOWHERE) for row in mine[1:-1]] + [mine[-1]]
            chains.append((mine[1][5], len(mine) - 1))
    return folds, chains


def _to_device(tables: list[list], device: torch.device) -> list[Tensor]:
    """Move small integer tables in one copy; empty ones become ``[0, 7]``."""
    flat = torch.tensor([n for rows in tables for row in rows for n in row], dtype=torch.int32).to(device)
    made, start = [], 0
    for rows in tables:
        width = len(rows[0]) if rows else 7
        made.append(flat[start : start + width * len(rows)].view(len(rows), width))
        start += width * len(rows)
    return made


@kept(64)
def plan_slices(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the rows of pieces that are whole sequences, folded from nothing into slot n both ways."""
    rows, first, token = [], 0, 0
    for n, length in enumerate(lengths):
        count = -(-length // TILE)
        rows.append((first, count, token, length, n, n, NOWHERE))
        first, token = first + count, token + length
    return _to_device([rows], device)[0]
