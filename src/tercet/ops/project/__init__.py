"""Several linear maps of the same rows, and one sum of the maps of several.

q, k, v, gates and latents all read one normed input. On a GPU the input's gradient is one buffer that every map's
product adds to, instead of one tensor a map and a chain of additions. Routed and shared experts end in one sum, to
which there each product adds in the same way. Elsewhere the maps are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


def _reference(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def _merge_reference(*tensors: Tensor) -> Tensor:
    count = len(tensors) // 2
    first, *others = (F.linear(x, w) for x, w in zip(tensors[:count], tensors[count:]))
    return sum(others, start=first)


_merge = Operator("merge", _merge_reference, triton_module="tercet.ops.project.merge_gpu")
_project = Operator("project", _reference, triton_module="tercet.ops.project.gpu")


def project(
    x: Float[Tensor, "*lead inputs"], weights: Sequence[Float[Tensor, "outputs inputs"]]
) -> tuple[Float[Tensor, "*lead outputs"], ...]:
    """Return ``x @ wᵀ`` for every weight.

    Raises:
        ShapeError: a weight does not take rows of x's width.
    """
    for w in weights:
        if w.ndim != 2 or w.shape[1] != x.shape[-1]:
            raise ShapeError(f"rows {x.shape[-1]} wide cannot be projected by a weight {tuple(w.shape)}")
    return _project(x, *weights)


def merge(
    rows: Sequence[Float[Tensor, "*lead _"]], weights: Sequence[Float[Tensor, "outputs _"]]
) -> Float[Tensor, "*lead outputs"]:
    """Return ``Σ x @ wᵀ`` over pairs of rows x and weights w; every pair has a width of its own.

    Raises:
        ShapeError: a weight does not take its rows, or results disagree in shape.
    """
    shapes = [(*x.shape[:-1], len(w)) for x, w in zip(rows, weights)]
    fit = all(w.ndim == 2 and w.shape[1] == x.shape[-1] for x, w in zip(rows, weights))
    if not fit or not rows or len(rows) != len(weights) or len(set(shapes)) > 1:
        pairs = f"rows {[tuple(x.shape) for x in rows]} and weights {[tuple(w.shape) for w in weights]}"
        raise ShapeError(f"merge sums x @ wᵀ of equal shapes; {pairs} do not fit")
    return _merge(*rows, *weights)
