"""Routing on the GPU: scores, choice, weights and cutoff of a token in one pass, for any number of experts and choices.

A program holds whole rows of scores in registers and takes the largest biased score top_k + 1 times; ties go to the
lower expert. NaN counts as the largest, so a broken row still names distinct experts and harms no other row.

Shapes: T tokens, E experts (padded to a power of two), K choices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.glu.triton_ import sigmoid
from tercet.ops.gpu import blocks, dense, float_refusal, operator, power_of_two
from tercet.ops.router import Routing

MAX_EXPERTS = 4096
_TILE = 4096
"""Scores a program holds."""


@triton.jit
def _forward_kernel(
    logits,
    bias,
    weights,
    experts,
    scores,
    cutoff,
    tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    mask = (row < tokens)[:, None] & (expert < E)[None, :]
    at = row[:, None] * E + expert[None, :]
    s = sigmoid(tl.load(logits + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(scores + at, s, mask=mask)
    biased = s + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
    biased = tl.where(biased == biased, biased, float("inf"))
    biased = tl.where((expert < E)[None, :], biased, float("-inf"))
    raw = tl.zeros([ROWS, CHOICES], tl.float32)
    for i in range(K):
        best = tl.argmax(biased, 1)
        taken = expert[None, :] == best[:, None]
        raw = tl.where(choice[None, :] == i, tl.sum(tl.where(taken, s, 0.0), 1)[:, None], raw)
        tl.store(experts + row * K + i, best.to(tl.int64), mask=row < tokens)
        biased = tl.where(taken, float("-inf"), biased)
    tl.store(cutoff + row, tl.max(biased, 1), mask=row < tokens)
    if RENORMALIZE:
        raw = raw / (tl.sum(raw, 1)[:, None] + 1e-20)
    to = row[:, None] * K + choice[None, :]
    tl.store(weights + to, raw * scale, mask=(row < tokens)[:, None] & (choice < K)[None, :])


@triton.jit
def _backward_kernel(
    d_weights,
    d_scores,
    experts,
    scores,
    d_logits,
    tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FROM_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    mask = (row < tokens)[:, None] & (expert < E)[None, :]
    at = row[:, None] * E + expert[None, :]
    s = tl.load(scores + at, mask=mask, other=0.0)
    picked = (row < tokens)[:, None] & (choice < K)[None, :]
    own = row[:, None] * K + choice[None, :]
    d = tl.load(d_weights + own, mask=picked, other=0.0).to(tl.float32) * scale
    chosen = tl.load(experts + own, mask=picked, other=0)
    if RENORMALIZE:
        raw = tl.load(scores + row[:, None] * E + chosen, mask=picked, other=0.0)
        total = tl.sum(raw, 1)[:, None] + 1e-20
        d = (d - tl.sum(d * raw, 1)[:, None] / total) / total
    pull = tl.zeros([ROWS, EXPERTS], tl.float32)
    if FROM_SCORES:
        pull += tl.load(d_scores + at, mask=mask, other=0.0).to(tl.float32)
    for i in range(K):
        mine = choice[None, :] == i
        index = tl.sum(tl.where(mine, chosen, 0), 1)
        value = tl.sum(tl.where(mine, d, 0.0), 1)
        pull += tl.where(expert[None, :] == index[:, None], value[:, None], 0.0)
    tl.store(d_logits + at, (pull * s * (1.0 - s)).to(d_logits.dtype.element_ty), mask=mask)


def _shape(experts: int, top_k: int) -> dict[str, int]:
    padded = power_of_two(experts)
    rows = max(1, min(16, _TILE // padded))
    return {"E": experts, "K": top_k, "ROWS": rows, "EXPERTS": padded, "CHOICES": power_of_two(top_k)}


@operator(
    "tercet::route",
    schema="(Tensor logits, Tensor bias, int top_k, bool renormalize, float scaling_factor)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, (tokens, count) = dense(logits), logits.shape
    scores = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    weights, cutoff = scores.new_empty(tokens, top_k), scores.new_empty(tokens)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    tile = _shape(count, top_k)
    if tokens:
        _forward_kernel[(blocks(tokens, tile["ROWS"]),)](
            logits,
            dense(bias),
            weights,
            experts,
            scores,
            cutoff,
            tokens,
            scaling_factor,
            RENORMALIZE=renormalize,
            **tile,
        )
    return weights, experts, scores, cutoff


@_forward.register_fake
def _(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = logits.new_empty(logits.shape, dtype=torch.float32)
    experts = logits.new_empty((logits.shape[0], top_k), dtype=torch.int64)
    return scores.new_empty(experts.shape), experts, scores, scores.new_empty(logits.shape[:1])


@operator(
    "tercet::route_backward",
    schema="(Tensor d_weights, Tensor? d_scores, Tensor logits, Tensor experts, Tensor scores, bool renormalize,"
    " float scaling_factor) -> Tensor",
)
def _backward(
    d_weights: Tensor,
    d_scores: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    scores: Tensor,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    (tokens, count), top_k = scores.shape, experts.shape[1]
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    tile = _shape(count, top_k)
    if tokens:
        _backward_kernel[(blocks(tokens, tile["ROWS"]),)](
            dense(d_weights),
            scores if d_scores is None else dense(d_scores),
            experts,
            scores,
            d_logits,
            tokens,
            scaling_factor,
            RENORMALIZE=renormalize,
            FROM_SCORES=d_scores is not None,
            **tile,
        )
    return d_logits


@_backward.register_fake
def _(d_weights: Tensor, d_scores: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, *ctx.settings = inputs
    _, experts, scores, cutoff = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(experts, cutoff)
    ctx.save_for_backward(logits, experts, scores)


def _differentiate(ctx: Any, d_weights: Tensor | None, _: Any, d_scores: Tensor | None, __: Any) -> tuple[Any, ...]:
    logits, experts, scores = ctx.saved_tensors
    if d_weights is None:
        d_weights = scores.new_zeros(experts.shape)
    return _backward(d_weights, d_scores, logits, experts, scores, *ctx.settings), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(logits: Tensor, bias: Tensor, *, forced: Tensor | None, **_: Any) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if forced is not None:
        return "the choice is forced"
    if logits.shape[1] > MAX_EXPERTS:
        return f"{logits.shape[1]} experts, more than {MAX_EXPERTS}"
    return float_refusal(logits, bias)


def call(
    logits: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scaling_factor: float, forced: Tensor | None
) -> Routing:
    """See `tercet.ops.router.route`."""
    return Routing(*_forward(logits, bias, top_k, renormalize, scaling_factor))
