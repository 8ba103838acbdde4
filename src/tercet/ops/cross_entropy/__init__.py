"""Next-token cross-entropy straight from hidden rows and the output matrix, without the whole logit matrix."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.cross_entropy import reference, torch_
from tercet.ops.registry import Operator

IGNORE = -100
"""Target of a position that carries no loss."""

_linear_cross_entropy = Operator("linear_cross_entropy", reference.linear_cross_entropy, torch_.linear_cross_entropy)


def linear_cross_entropy(
    x: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, tokens],
    loss_weight: Float[Tensor, tokens],
) -> tuple[Float[Tensor, ""], Float[Tensor, tokens]]:
    """Return ``Σ_t loss_weight[t] · CE_t`` and the detached per-token CE, for logits ``x weightᵀ`` in fp32.

    Args:
        x: rows before the head.
        weight: the head.
        targets: next token of every row; `IGNORE` rows have CE 0 and no gradient.
        loss_weight: fp32 factor of every row (divide by the step's total weight beforehand).

    Raises:
        ShapeError: shapes disagree, or a target outside the vocabulary.
    """
    tokens = x.shape[:1]
    if (
        x.ndim != 2
        or weight.ndim != 2
        or x.shape[1] != weight.shape[1]
        or targets.shape != tokens
        or loss_weight.shape != tokens
    ):
        raise ShapeError(
            f"linear_cross_entropy takes x [T, D], weight [V, D], targets [T], loss_weight [T]; got {tuple(x.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}, {tuple(loss_weight.shape)}"
        )
    if (
        x.device.type == "cpu"
        and targets.numel()
        and (int(targets.max()) >= len(weight) or int(targets.min()) < IGNORE)
    ):
        raise ShapeError(f"targets reach {int(targets.max())}, outside the vocabulary of {len(weight)}")
    return _linear_cross_entropy(x, weight, targets, loss_weight)
