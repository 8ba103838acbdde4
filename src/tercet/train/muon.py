"""Muon for matrices, with the blocks of a shape orthogonalised together (training.md §1.2, §1.3).

    M ← μM + G                        heavy ball
    U ← G + μM                        Nesterov; without it U = M
    O ← 0.2 · √max(rows, cols) · NS(U)        of the block
    W ← W − η (O + λW)                decay by the plain rate, never by the shape factor

A model of many small blocks (heads, experts) would spend its time on launching products. Blocks of one shape, tall ones
turned on their side, are therefore gathered from the whole model into stacks, large enough to keep the device busy and
small enough that the copies stay bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.config import MuonConfig
from tercet.ops import accumulate, newton_schulz
from tercet.train.groups import View

MAX_STACK_ELEMENTS = 1 << 26
"""Largest stack orthogonalised at once on an accelerator (256 MiB in fp32); a single larger block goes alone."""

CPU_STACK_ELEMENTS = 1 << 18
"""The same on a CPU: 1 MiB in fp32, so that the five steps of a stack run from the cache."""


@dataclass(frozen=True)
class Piece:
    """Blocks ``[start, stop)`` of one view of one parameter, all in the same stack."""

    parameter: int
    view: View
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many blocks the piece brings."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Return these blocks of *tensor* as a view ``[count, joined, rows of a strip, cols]``."""
        return self.view.of(tensor)[self.start : self.stop]


@dataclass(frozen=True)
class Stack:
    """Pieces that are orthogonalised in one call, as ``[count, rows, cols]`` with rows ≤ cols."""

    rows: int
    cols: int
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """How many blocks the stack holds."""
        return sum(piece.count for piece in self.pieces)


def plan_stacks(
    shapes: Sequence[tuple[int, ...]], views: Sequence[tuple[View, ...]], *, limit: int = MAX_STACK_ELEMENTS
) -> list[Stack]:
    """Sort the blocks of all parameters into stacks of one shape, at most *limit* elements each."""
    by_shape: dict[tuple[int, int], list[Piece]] = {}
    for n, (shape, parameter_views) in enumerate(zip(shapes, views)):
        for view in parameter_views:
            rows, cols = sorted((view.rows, shape[-1]))
            by_shape.setdefault((rows, cols), []).append(Piece(n, view, 0, view.blocks))
    stacks = []
    for (rows, cols), pieces in by_shape.items():
        room = max(1, limit // (rows * cols))
        stacks += [Stack(rows, cols, part) for part in _portions(pieces, room)]
    return stacks


def _portions(pieces: list[Piece], room: int) -> list[tuple[Piece, ...]]:
    """Cut *pieces* into portions of at most *room* blocks."""
    portions, current, free = [], [], room
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            taken = min(free, piece.stop - start)
            current.append(Piece(piece.parameter, piece.view, start, start + taken))
            start, free = start + taken, free - taken
            if not free:
                portions.append(tuple(current))
                current, free = [], room
    if current:
        portions.append(tuple(current))
    return portions


@torch.no_grad()
def muon_step(
    stacks: Sequence[Stack],
    weights: list[Float[Tensor, "*shape"]],
    gradients: list[Float[Tensor, "*shape"]],
    momenta: list[Float[Tensor, "*shape"]],
    *,
    lr: float,
    weight_decay: float,
    config: MuonConfig,
) -> float:
    """Advance *momenta* and *weights* in place by one step.

    Args:
        stacks: the plan of `plan_stacks` over these parameters.
        weights: fp32 (or fp64) parameters.
        gradients: same shapes and dtypes, already clipped.
        momenta: same shapes and dtypes.
        lr: η.
        weight_decay: λ.
        config: momentum, Nesterov, coefficients and update size.

    Returns:
        RMS over all elements of the update O (without η and decay).
    """
    for momentum, gradient in zip(momenta, gradients):
        torch.add(gradient, momentum, alpha=config.momentum, out=momentum)
    torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    squares, elements = weights[0].new_zeros(()), 0
    for stack in stacks:
        blocks = weights[0].new_empty(stack.count, stack.rows, stack.cols)
        position = 0
        for piece in stack.pieces:
            target = _as_piece(blocks[position : position + piece.count], piece)
            momentum = piece.of(momenta[piece.parameter])
            if config.nesterov:
                torch.add(piece.of(gradients[piece.parameter]), momentum, alpha=config.momentum, out=target)
            else:
                target.copy_(momentum)
            position += piece.count
        updates = newton_schulz(blocks, method=config.ns)
        size = config.update_rms * stack.cols**0.5
        position = 0
        targets, steps = [], []
        for piece in stack.pieces:
            targets.append(piece.of(weights[piece.parameter]))
            steps.append(_as_piece(updates[position : position + piece.count], piece))
            position += piece.count
        accumulate(targets, steps, scale=-lr * size)
        squares += (size * torch.linalg.vector_norm(updates, dtype=squares.dtype)) ** 2
        elements += updates.numel()
    return float((squares / elements).sqrt())


def _as_piece(blocks_NRC: Tensor, piece: Piece) -> Tensor:
    """View stacked blocks in the layout of `Piece.of`, turning tall ones back."""
    if piece.view.rows > blocks_NRC.shape[1]:
        blocks_NRC = blocks_NRC.transpose(1, 2)
    return blocks_NRC.unflatten(1, (piece.view.joined, piece.view.last - piece.view.first))
