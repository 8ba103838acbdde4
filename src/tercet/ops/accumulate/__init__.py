"""Sums of gradients, steps of weights: narrow tensors added to wide ones in place."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


def _reference(total: Tensor, *others: Tensor, scale: float) -> None:
    tensors = total, *others
    for sums, part in zip(tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]):
        sums.add_(part, alpha=scale)


_accumulate = Operator("accumulate", _reference, triton_module="tercet.ops.accumulate.triton_")


def accumulate(
    totals: Sequence[Float[Tensor, "..."]], parts: Sequence[Float[Tensor, "..."]], *, scale: float = 1.0
) -> None:
    """Add ``scale · part`` to every total in place, in the total's precision.

    Raises:
        ShapeError: not one part of the same shape for every total.
    """
    if len(totals) != len(parts):
        raise ShapeError(f"{len(totals)} sums cannot take {len(parts)} parts")
    for total, part in zip(totals, parts):
        if total.shape != part.shape:
            raise ShapeError(f"a sum {tuple(total.shape)} cannot take a part {tuple(part.shape)}")
    if totals:
        _accumulate(*totals, *parts, scale=scale)
