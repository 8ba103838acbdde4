"""The router (report §2.3.3, eq. 13): logits in fp32, sigmoid scores, a choice that a selection bias steers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


class Routing(NamedTuple):
    """Where every token goes."""

    weights: Float[Tensor, "tokens chosen"]
    """Combination weights from the raw scores; carries the router's gradient."""
    experts: Int[Tensor, "tokens chosen"]
    scores: Float[Tensor, "tokens experts"]
    """Raw sigmoid scores, in (0, 1)."""
    cutoff: Float[Tensor, "tokens"]
    """The (k+1)-th largest *biased* score: what an expert must exceed to be chosen."""


def _reference(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    forced: Tensor | None,
) -> Routing:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    with torch.no_grad():
        best, experts = (scores + bias.to(scores.dtype)).topk(top_k + 1, dim=-1)
    experts = experts[:, :top_k] if forced is None else forced
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(weights * scaling_factor, experts, scores, best[:, top_k])


_route = Operator("route", _reference, triton_module="tercet.ops.router.triton_")


def route(
    logits: Float[Tensor, "tokens experts"],
    bias: Float[Tensor, "experts"],
    *,
    top_k: int,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    forced: Int[Tensor, "tokens chosen"] | None = None,
) -> Routing:
    """Choose the *top_k* experts by ``σ(logit) + bias``; weight them by ``σ(logit)`` alone.

    Args:
        logits: router outputs; scores are computed in fp32.
        bias: fp32 selection bias; enters the choice only, and receives no gradient.
        top_k: experts per token, less than the number of experts.
        renormalize: divide the weights by their sum.
        scaling_factor: factor on the weights after that.
        forced: use this choice instead (parity tests: near ties flip between implementations).

    Raises:
        ShapeError: shapes disagree or top_k leaves no (k+1)-th expert.
    """
    if logits.ndim != 2 or bias.shape != logits.shape[1:]:
        raise ShapeError(f"route takes logits [T, E] and bias [E], got {tuple(logits.shape)} and {tuple(bias.shape)}")
    if not 0 < top_k < logits.shape[1]:
        raise ShapeError(f"top_k is {top_k}; it must lie in [1, {logits.shape[1]}) for {logits.shape[1]} experts")
    if bias.dtype not in (torch.float32, torch.float64):
        raise ShapeError(f"the router's selection bias must stay fp32 (near ties flip in {bias.dtype})")
    if forced is not None and tuple(forced.shape) != (logits.shape[0], top_k):
        raise ShapeError(f"forced must be [T, top_k] = {(logits.shape[0], top_k)}, got {tuple(forced.shape)}")
    return _route(logits, bias, top_k=top_k, renormalize=renormalize, scaling_factor=scaling_factor, forced=forced)


def _logits_reference(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


_logits = Operator("router_logits", _logits_reference, triton_module="tercet.ops.router.triton_logits")


def router_logits(
    x: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "experts hidden"]
) -> Float[Tensor, "tokens experts"]:
    """Return ``x @ weightᵀ`` with at least fp32 accuracy: near ties flip with less.

    Args:
        x: rows in any type; their gradient comes back in that type.
        weight: the router's weight, usually fp32.

    Raises:
        ShapeError: x is not rows of the weight's width.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ShapeError(f"router_logits takes x [T, H] and weight [E, H], got {shapes}")
    return _logits(x, weight)
