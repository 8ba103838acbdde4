"""Several linear maps of the same rows: q, k, v, gates and latents all read one normed input.

On a GPU the input's gradient is one buffer that every map's product adds to, instead of one tensor a map and a chain of
additions. Elsewhere the maps are independent.
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
