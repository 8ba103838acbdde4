"""Next-token cross-entropy straight from hidden rows and the output matrix, without the whole logit matrix."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ConfigError, ShapeError
from tercet.ops.cross_entropy import reference, torch_
from tercet.ops.registry import Operator, checks_values

IGNORE = -100
"""Target of a position that carries no loss."""

_linear_cross_entropy = Operator(
    "linear_cross_entropy",
    reference.linear_cross_entropy,
    torch_.linear_cross_entropy,
    "tercet.ops.cross_entropy.triton_",
)
_token_logprobs = Operator(
    "token_logprobs",
    reference.token_logprobs,
    torch_.token_logprobs,
    "tercet.ops.cross_entropy.triton_logprobs",
)


def linear_cross_entropy(
    x: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "tokens"],
    loss_weight: Float[Tensor, "tokens"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "tokens"]]:
    """Return ``Σ_t loss_weight[t] · CE_t`` and the detached per-token CE, for logits ``x weightᵀ`` in fp32.

    Args:
        x: rows before the head.
        weight: the head.
        targets: next token of every row; `IGNORE` rows have CE 0 and no gradient.
        loss_weight: fp32 factor of every row (divide by the step's total weight beforehand).

    Raises:
        ShapeError: shapes disagree, or a target outside the vocabulary.
    """
    _check(x, weight, targets)
    if loss_weight.shape != targets.shape:
        raise ShapeError(f"loss_weight must be [T] like targets {tuple(targets.shape)}, got {tuple(loss_weight.shape)}")
    return _linear_cross_entropy(x, weight, targets, loss_weight)


def token_logprobs(
    x: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "tokens"],
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return each token's log-probability (nats, fp32) and the entropy of its distribution; both differentiable.

    Args:
        x: rows before the head.
        weight: the head.
        targets: token whose log-probability is asked for; `IGNORE` rows give 0 and no gradient.
        temperature: logits are divided by it.

    Raises:
        ShapeError: shapes disagree, or a target outside the vocabulary.
        ConfigError: temperature is not positive.
    """
    _check(x, weight, targets)
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; log-probabilities need it above 0")
    return _token_logprobs(x, weight, targets, temperature=temperature)


def _check(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise ShapeError(
            f"the head takes x [T, D], weight [V, D] and targets [T]; got {tuple(x.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    if checks_values(x) and targets.numel() and (int(targets.max()) >= len(weight) or int(targets.min()) < IGNORE):
        raise ShapeError(f"targets reach {int(targets.max())}, outside the vocabulary of {len(weight)}")
