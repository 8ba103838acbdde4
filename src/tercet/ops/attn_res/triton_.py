"""Attention Residuals on the GPU: one pass over the sources forward, one backward.

A program owns whole tokens, so a token's n sources are read once: their norm and score come from the same registers
that feed an online softmax, in fp32, with one cast at the end. Loads run ahead of the reductions through shared
memory; a loop that stays a loop is what lets the compiler do that (`_source`).

The backward pass needs ``δ·out`` before any source's gradient. It takes it from the saved, rounded ``out`` (which the
next norm keeps anyway): one more row to read instead of all sources twice, for a relative error of 1e-3 in the scores'
gradient when activations are bf16, none in fp32.

With `attn_res_norm` the norm in front of the next sub-layer happens in the same registers: forward it spares a pass
over the mixture, backward three. There ``δ·out`` needs no sum at all: a norm's gradient is orthogonal to its input but
for ε, so ``δ·out = c ε r²`` with the norm's own ``c = Σ dy w unit``.

Bytes a token: forward ``n + 1`` rows (with the norm ``n + 2``), backward ``2n + 2`` rows. Deterministic for one device:
every program reduces its own tokens in order and the weight gradients' partial sums are added in a fixed order.

Shapes: n sources, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import dense, fitted, float_refusal, multiprocessors, operator

MAX_SOURCES = 32
MAX_WIDTH = 16384
_STAGES = 3
"""Sources in flight forward; measured best on an H200, as are the two below."""
_BACKWARD, _BACKWARD_NORMED = (8, 6), (16, 3)
"""Warps on a multiprocessor in the backward pass, in one program or several, and sources in flight."""


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


@fitted
@triton.jit
def _forward_kernel(
    sources,
    weight,
    query,
    next_weight,
    out,
    normed,
    p_out,
    r_out,
    next_r_out,
    tokens,
    count,
    eps,
    next_eps,
    NORMED: tl.constexpr,
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
    mixed = (total / mass).to(out.dtype.element_ty)
    tl.store(out + at, mixed, mask=inside)
    if NORMED:
        wide = mixed.to(tl.float32)
        next_r = tl.rsqrt(tl.sum(wide * wide, 0) / D + next_eps)
        unit = (wide * next_r).to(mixed.dtype).to(tl.float32)
        w = tl.load(next_weight + column, mask=inside, other=0.0).to(mixed.dtype).to(tl.float32)
        tl.store(normed + at, (unit * w).to(mixed.dtype), mask=inside)
        tl.store(next_r_out + token, next_r)
    tl.store(p_out + slot * tokens + token, p / mass, mask=slot < N)
    tl.store(r_out + slot * tokens + token, norms, mask=slot < N)


@fitted
@triton.jit
def _backward_kernel(
    sources,
    grads,
    weight,
    query,
    next_weight,
    out,
    grad,
    p_in,
    r_in,
    next_r_in,
    partial,
    next_partial,
    tokens,
    count,
    next_eps,
    NORMED: tl.constexpr,
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
    d_next = tl.zeros([BLOCK], tl.float32)
    token = program.to(tl.int64)
    while token < tokens:
        at = token * D + column
        delta = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            next_r = tl.load(next_r_in + token)
            unit = mixed * next_r
            d_next += delta * unit
            delta *= tl.load(next_weight + column, mask=inside, other=0.0).to(tl.float32)
            along = tl.sum(delta * unit, 0)
            delta = (delta - unit * (along / D)) * next_r
            centre = along * next_eps * next_r * next_r
        else:
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
    if NORMED:
        tl.store(next_partial + program.to(tl.int64) * D + column, d_next, mask=inside)


def _warps(block: int) -> int:
    return min(8, max(1, block // 1024))


@operator(
    "tercet::attn_res",
    schema="(Tensor[] sources, Tensor norm_weight, Tensor query, Tensor? next_weight, float eps, float next_eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    sources: list[Tensor],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    eps: float,
    next_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return mixture, p and r, and with *next_weight* the mixture's norm and its r (empty without)."""
    sources = [dense(v) for v in sources]
    first, count, normed = sources[0], len(sources), next_weight is not None
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    out = torch.empty_like(first)
    p = first.new_empty((count, *first.shape[:-1]), dtype=torch.float32)
    r = torch.empty_like(p)
    y, next_r = torch.empty_like(out if normed else out[:0]), torch.empty_like(p[0] if normed else p[:0])
    block = triton.next_power_of_2(dim)
    if tokens:
        _forward_kernel[(tokens,)](
            tuple(sources),
            dense(norm_weight),
            dense(query),
            query if next_weight is None else dense(next_weight),
            out,
            y,
            p,
            r,
            next_r,
            tokens,
            count,
            eps,
            next_eps,
            NORMED=normed,
            N=count,
            SLOTS=triton.next_power_of_2(count),
            D=dim,
            BLOCK=block,
            STAGES=_STAGES,
            num_warps=_warps(block),
        )
    return out, p, r, y, next_r


@_forward.register_fake
def _(
    sources: list[Tensor], norm_weight: Tensor, query: Tensor, next_weight: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    first, normed = sources[0], next_weight is not None
    p = first.new_empty((len(sources), *first.shape[:-1]), dtype=torch.float32)
    y = first.new_empty(first.shape if normed else (0, *first.shape[1:]))
    next_r = p.new_empty(p.shape[1:] if normed else (0, *p.shape[1:]))
    return first.new_empty(first.shape), p, torch.empty_like(p), y, next_r


@operator(
    "tercet::attn_res_backward",
    schema="(Tensor[] sources, Tensor norm_weight, Tensor query, Tensor? next_weight, Tensor out, Tensor grad,"
    " Tensor p, Tensor r, Tensor next_r, float next_eps) -> (Tensor[], Tensor, Tensor)",
)
def _backward(
    sources: list[Tensor],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    out: Tensor,
    grad: Tensor,
    p: Tensor,
    r: Tensor,
    next_r: Tensor,
    next_eps: float,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of the sources, of ``norm_weight ⊙ query`` and of *next_weight* (empty without)."""
    sources = [dense(v) for v in sources]
    first, count, normed = sources[0], len(sources), next_weight is not None
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    grads = [torch.empty_like(v) for v in sources]
    block = triton.next_power_of_2(dim)
    warps = _warps(block)
    resident, stages = _BACKWARD_NORMED if normed and block > 1024 else _BACKWARD
    programs = min(max(tokens, 1), max(1, resident // warps) * multiprocessors(first.device))
    partial = first.new_empty((programs, dim), dtype=torch.float32)
    next_partial = torch.empty_like(partial if normed else partial[:0])
    _backward_kernel[(programs,)](
        tuple(sources),
        tuple(grads),
        dense(norm_weight),
        dense(query),
        query if next_weight is None else dense(next_weight),
        out,
        dense(grad),
        p,
        r,
        next_r,
        partial,
        next_partial,
        tokens,
        count,
        next_eps,
        NORMED=normed,
        N=count,
        D=dim,
        BLOCK=block,
        STAGES=stages,
        num_warps=warps,
    )
    return grads, partial.sum(0), next_partial.sum(0) if normed else next_partial


@_backward.register_fake
def _(
    sources: list[Tensor], norm_weight: Tensor, query: Tensor, next_weight: Tensor | None, *_: Any
) -> tuple[list[Tensor], Tensor, Tensor]:
    d_folded = query.new_empty(query.shape, dtype=torch.float32)
    d_next = torch.empty_like(d_folded) if next_weight is not None else d_folded.new_empty(0, *query.shape)
    return [v.new_empty(v.shape) for v in sources], d_folded, d_next


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, norm_weight, query, next_weight, _, ctx.next_eps = inputs
    out, p, r, y, next_r = output
    ctx.normed = next_weight is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(p, r, next_r, out if ctx.normed else y)
    ctx.save_for_backward(norm_weight, query, next_weight, out, p, r, next_r, *sources)


def _differentiate(ctx: Any, d_out: Tensor, d_p: None, d_r: None, d_y: Tensor, *_: Any) -> tuple[Any, ...]:
    norm_weight, query, next_weight, out, p, r, next_r, *sources = ctx.saved_tensors
    grads, d_folded, d_next = _backward(
        sources, norm_weight, query, next_weight, out, d_y if ctx.normed else d_out, p, r, next_r, ctx.next_eps
    )
    d_next_weight = d_next.to(next_weight.dtype) if ctx.normed else None
    d_weight, d_query = (d_folded * query).to(norm_weight.dtype), (d_folded * norm_weight).to(query.dtype)
    return grads, d_weight, d_query, d_next_weight, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(
    *sources: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    eps: float,
    next_weight: Tensor | None = None,
    next_eps: float = 0.0,
) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if len({v.dtype for v in sources}) != 1:
        return f"sources of several types: {sorted({str(v.dtype) for v in sources})}"
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)} sources, more than {MAX_SOURCES}"
    if sources[0].shape[-1] > MAX_WIDTH:
        return f"width {sources[0].shape[-1]} exceeds {MAX_WIDTH}"
    return float_refusal(sources[0], norm_weight, query, *([] if next_weight is None else [next_weight]))


def call(
    *sources: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    eps: float,
    next_weight: Tensor | None = None,
    next_eps: float = 0.0,
) -> Tensor:
    """See `tercet.ops.attn_res.attn_res` and, with *next_weight*, `tercet.ops.attn_res.attn_res_norm`."""
    out, _, _, normed, _ = _forward(list(sources), norm_weight, query, next_weight, eps, next_eps)
    return out if next_weight is None else normed
