"""Attention Residuals on the GPU: one pass over the sources forward, one backward.

A program owns whole tokens, so a token's n sources are read once: their norm and score come from the same registers
that feed an online softmax, in fp32, with one cast at the end. Loads run ahead of the reductions through shared
memory; a loop that stays a loop is what lets the compiler do that (`_source`).

The backward pass needs ``δ·out`` before any source's gradient. It takes it from the saved, rounded ``out`` (which the
next norm keeps anyway): one more row to read instead of all sources twice, for a relative error of 1e-3 in the scores'
gradient when activations are bf16, none in fp32.

Bytes a token: forward ``n + 1`` rows, backward ``2n + 2`` rows. Deterministic for one device: every program reduces
its own tokens in order and the weight gradient's partial sums are added in a fixed order.

Shapes: n sources, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import dense, float_refusal, multiprocessors, operator

MAX_SOURCES = 32
MAX_WIDTH = 16384
_STAGES, _BACKWARD_STAGES = 3, 6
"""Sources in flight; measured best on an H200."""
_PROGRAMS = 1
"""Programs of the backward pass for each multiprocessor; each adds its tokens' weight gradients in registers."""


@triton.jit
def _sum_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _source(sources, i, N: tl.constexpr):
    """Return a pointer to source i, for an i that is not a compile-time constant.

    A loop over i stays a loop: unrolled, the compiler moves all loads to the front and spills.
    """
    pointer = sources[0]
    for j in tl.static_range(1, N):
        pointer = tl.where(i == j, sources[j], pointer)
    return tl.multiple_of(pointer, 16)


@triton.jit
def _forward_kernel(
    sources,
    weight,
    query,
    out,
    p_out,
    r_out,
    tokens,
    count,
    eps,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    slot = tl.arange(0, SLOTS)
    folded = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    folded *= tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
    at = token * D + column
    total = tl.zeros([BLOCK], tl.float32)
    scores = tl.full([SLOTS], float("-inf"), tl.float32)
    norms = tl.zeros([SLOTS], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        v = tl.load(_source(sources, i, N) + at, mask=inside, other=0.0).to(tl.float32)
        square, product = tl.reduce((v * v, v * folded), 0, _sum_pairs)
        r = tl.rsqrt(square / D + eps)
        score = r * product
        scores = tl.where(slot == i, score, scores)
        norms = tl.where(slot == i, r, norms)
        raised = tl.maximum(largest, score)
        total = total * tl.exp(largest - raised) + v * tl.exp(score - raised)
        largest = raised
    p = tl.exp(scores - largest)
    mass = tl.sum(p, 0)
    tl.store(out + at, (total / mass).to(out.dtype.element_ty), mask=inside)
    tl.store(p_out + slot * tokens + token, p / mass, mask=slot < N)
    tl.store(r_out + slot * tokens + token, norms, mask=slot < N)


@triton.jit
def _backward_kernel(
    sources,
    grads,
    weight,
    query,
    out,
    d_out,
    p_in,
    r_in,
    partial,
    tokens,
    count,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    folded = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    folded *= tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
    d_folded = tl.zeros([BLOCK], tl.float32)
    token = program.to(tl.int64)
    while token < tokens:
        at = token * D + column
        delta = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        centre = tl.sum(delta * mixed, 0)
        for i in tl.range(0, count, num_stages=STAGES):
            v = tl.load(_source(sources, i, N) + at, mask=inside, other=0.0).to(tl.float32)
            p = tl.load(p_in + i * tokens + token)
            r = tl.load(r_in + i * tokens + token)
            dot, product = tl.reduce((v * delta, v * folded), 0, _sum_pairs)
            pull = p * (dot - centre) * r
            d_folded += pull * v
            d_v = p * delta + pull * folded - (pull * product * r * r / D) * v
            tl.store(_source(grads, i, N) + at, d_v.to(grads[0].dtype.element_ty), mask=inside)
        token += tl.num_programs(0)
    tl.store(partial + program.to(tl.int64) * D + column, d_folded, mask=inside)


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))


@operator(
    "tercet::attn_res",
    schema="(Tensor[] sources, Tensor norm_weight, Tensor query, float eps) -> (Tensor, Tensor, Tensor)",
)
def _forward(sources: list[Tensor], norm_weight: Tensor, query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    sources = [dense(v) for v in sources]
    first, count = sources[0], len(sources)
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    out = torch.empty_like(first)
    p = first.new_empty((count, *first.shape[:-1]), dtype=torch.float32)
    r = torch.empty_like(p)
    block = triton.next_power_of_2(dim)
    if tokens:
        _forward_kernel[(tokens,)](
            tuple(sources),
            dense(norm_weight),
            dense(query),
            out,
            p,
            r,
            tokens,
            count,
            eps,
            N=count,
            SLOTS=triton.next_power_of_2(count),
            D=dim,
            BLOCK=block,
            STAGES=_STAGES,
            num_warps=_warps(block),
        )
    return out, p, r


@_forward.register_fake
def _(sources: list[Tensor], norm_weight: Tensor, query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    first = sources[0]
    p = first.new_empty((len(sources), *first.shape[:-1]), dtype=torch.float32)
    return first.new_empty(first.shape), p, torch.empty_like(p)


@operator(
    "tercet::attn_res_backward",
    schema="(Tensor[] sources, Tensor norm_weight, Tensor query, Tensor out, Tensor d_out, Tensor p, Tensor r)"
    " -> (Tensor[], Tensor)",
)
def _backward(
    sources: list[Tensor], norm_weight: Tensor, query: Tensor, out: Tensor, d_out: Tensor, p: Tensor, r: Tensor
) -> tuple[list[Tensor], Tensor]:
    sources = [dense(v) for v in sources]
    first, count = sources[0], len(sources)
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    grads = [torch.empty_like(v) for v in sources]
    block = triton.next_power_of_2(dim)
    programs = min(max(tokens, 1), _PROGRAMS * multiprocessors(first.device))
    partial = first.new_empty((programs, dim), dtype=torch.float32)
    _backward_kernel[(programs,)](
        tuple(sources),
        tuple(grads),
        dense(norm_weight),
        dense(query),
        out,
        dense(d_out),
        p,
        r,
        partial,
        tokens,
        count,
        N=count,
        D=dim,
        BLOCK=block,
        STAGES=_BACKWARD_STAGES,
        num_warps=_warps(block),
    )
    return grads, partial.sum(0)


@_backward.register_fake
def _(
    sources: list[Tensor], norm_weight: Tensor, query: Tensor, out: Tensor, d_out: Tensor, p: Tensor, r: Tensor
) -> tuple[list[Tensor], Tensor]:
    return [v.new_empty(v.shape) for v in sources], query.new_empty(query.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, norm_weight, query, _ = inputs
    out, p, r = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(p, r)
    ctx.save_for_backward(norm_weight, query, out, p, r, *sources)


def _differentiate(ctx: Any, d_out: Tensor, *_: Any) -> tuple[list[Tensor], Tensor, Tensor, None]:
    norm_weight, query, out, p, r, *sources = ctx.saved_tensors
    grads, d_folded = _backward(sources, norm_weight, query, out, d_out, p, r)
    return grads, (d_folded * query).to(norm_weight.dtype), (d_folded * norm_weight).to(query.dtype), None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(*sources: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if len({v.dtype for v in sources}) != 1:
        return f"sources of several types: {sorted({str(v.dtype) for v in sources})}"
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)} sources, more than {MAX_SOURCES}"
    if sources[0].shape[-1] > MAX_WIDTH:
        return f"width {sources[0].shape[-1]} exceeds {MAX_WIDTH}"
    return float_refusal(sources[0], norm_weight, query)


def call(*sources: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.attn_res.attn_res`."""
    return _forward(list(sources), norm_weight, query, eps)[0]
