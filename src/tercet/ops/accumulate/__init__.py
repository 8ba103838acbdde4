"""Sums of gradients, steps of weights: a narrow tensor added to a wide one in place."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


def _reference(total: Tensor, part: Tensor, *, scale: float) -> None:
    total.add_(part, alpha=scale)


_accumulate = Operator("accumulate", _reference, triton_module="tercet.ops.accumulate.triton_")


def accumulate(total: Float[Tensor, "*shape"], part: Float[Tensor, "*shape"], *, scale: float = 1.0) -> None:
    """Add ``scale · part`` to *total* in place, in total's precision.

    Raises:
        ShapeError: shapes differ.
    """
    if total.shape != part.shape:
        raise ShapeError(f"a sum {tuple(total.shape)} cannot take a part {tuple(part.shape)}")
    _accumulate(total, part, scale=scale)
