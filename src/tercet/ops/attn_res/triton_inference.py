"""The two-phase form of Attention Residuals on the GPU, for inference (report §5.4.2, kernels.md §7).

Phase 1 answers all J queries of a block. `_score_kernel` forms the scores of a tile of tokens and one source as a
matrix product (fp32 accuracy from three tf32 products); `_value_kernel` turns a token's scores ``[J, n]`` into weights
and multiplies them with its sources ``[n, D]``. Phase 2, `_merge_kernel`, adds the one source that changes, in one
pass. No gradients: training mixes directly.

Shapes: n sources, T tokens, D width, J queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.attn_res.reference import Partial
from tercet.ops.attn_res.triton_ import MAX_SOURCES, MAX_WIDTH
from tercet.ops.attn_res.triton_backward import source
from tercet.ops.gpu import dense, fitted, float_refusal
from tercet.ops.triton_math import FP32

MAX_QUERIES = 64
_DEPTH, _COLUMNS, _VALUE_WARPS = 128, 256, 4
_MANY = 2048
"""Tokens from which a program scores 64 of them, not 16."""


@fitted
@triton.jit
def _score_kernel(
    sources,
    queries,
    scores,
    tokens,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Score a tile of tokens of one source for all queries: ``scores[t, i, j]``."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    i = tl.program_id(1)
    query = tl.arange(0, QUERIES)
    v = source(sources, i, N)
    product = tl.zeros([BT, QUERIES], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for first in range(0, D, BK):
        k = first + tl.arange(0, BK)
        at = token.to(tl.int64)[:, None] * D + k[None, :]
        rows = tl.load(v + at, mask=(token < tokens)[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        w = tl.load(queries + query[None, :] * D + k[:, None], mask=(query < J)[None, :] & (k < D)[:, None], other=0.0)
        product = tl.dot(rows, w, product, input_precision=FP32)
        square += tl.sum(rows * rows, 1)
    score = product * tl.rsqrt(square / D + eps)[:, None]
    to = (token.to(tl.int64)[:, None] * SLOTS + i) * QUERIES + query[None, :]
    tl.store(scores + to, score, mask=(token < tokens)[:, None])


@fitted
@triton.jit
def _value_kernel(
    sources,
    scores,
    maximum,
    total,
    value,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BN: tl.constexpr,
):
    """Weigh one token's sources for all queries: ``value[j, t] = Σ_i exp(score − maximum) v_i[t]``."""
    token = tl.program_id(0).to(tl.int64)
    query, slot = tl.arange(0, QUERIES), tl.arange(0, SLOTS)
    at = (token * SLOTS + slot[None, :]) * QUERIES + query[:, None]
    score = tl.load(scores + at, mask=(slot < N)[None, :], other=float("-inf"))
    largest = tl.max(score, 1)
    p = tl.exp(score - largest[:, None])
    if tl.program_id(1) == 0:
        tl.store(maximum + query * tokens + token, largest, mask=query < J)
        tl.store(total + query * tokens + token, tl.sum(p, 1), mask=query < J)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.zeros([SLOTS, BN], tl.float32)
    for i in tl.static_range(N):
        row = tl.load(sources[i] + token * D + column, mask=column < D, other=0.0).to(tl.float32)
        rows = tl.where((slot == i)[:, None], row[None, :], rows)
    mixed = tl.dot(p, rows, input_precision=FP32)
    to = (query[:, None].to(tl.int64) * tokens + token) * D + column[None, :]
    tl.store(value + to, mixed, mask=(query < J)[:, None] & (column < D)[None, :])


@triton.jit
def _merge_kernel(source, query, maximum, total, value, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(source + token * D + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(query + column, mask=inside, other=0.0)
    score = tl.sum(x * w, 0) * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    before = tl.load(maximum + token)
    largest = tl.maximum(before, score)
    old, new = tl.exp(before - largest), tl.exp(score - largest)
    mixed = old * tl.load(value + token * D + column, mask=inside, other=0.0) + new * x
    mixed = mixed / (old * tl.load(total + token) + new)
    tl.store(out + token * D + column, mixed.to(out.dtype.element_ty), mask=inside)


def _bank(*sources: Tensor, folded_queries: Tensor, eps: float) -> Partial:
    """See `tercet.ops.attn_res.attn_res_bank`."""
    rows = [dense(v) for v in sources]
    first, count = rows[0], len(rows)
    (queries, dim), lead = folded_queries.shape, first.shape[:-1]
    tokens = first.numel() // dim
    partial = Partial(*(first.new_empty((queries, *shape), dtype=torch.float32) for shape in (lead, lead, first.shape)))
    if not tokens:
        return partial
    slots, padded = max(16, triton.next_power_of_2(count)), max(16, triton.next_power_of_2(queries))
    scores = first.new_empty((tokens, slots, padded), dtype=torch.float32)
    shape = {"N": count, "D": dim, "J": queries, "SLOTS": slots, "QUERIES": padded}
    tile = 64 if tokens >= _MANY else 16
    _score_kernel[(triton.cdiv(tokens, tile), count)](
        tuple(rows), dense(folded_queries.float()), scores, tokens, eps, BT=tile, BK=_DEPTH, **shape
    )
    _value_kernel[(tokens, triton.cdiv(dim, _COLUMNS))](
        tuple(rows), scores, *partial, tokens, BN=_COLUMNS, num_warps=_VALUE_WARPS, **shape
    )
    return partial


def _merge(source: Tensor, *, partial: Partial, j: int, folded_query: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.attn_res.attn_res_merge`."""
    x, dim = dense(source), source.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(dim)
        parts = partial.maximum[j], partial.total[j], partial.value[j]
        _merge_kernel[(x.numel() // dim,)](
            x,
            dense(folded_query.float()),
            *map(dense, parts),
            out,
            eps,
            D=dim,
            BLOCK=block,
            num_warps=max(1, block // 1024),
        )
    return out


def call(*rows: Tensor, **parameters: Any) -> Tensor | Partial:
    """See `tercet.ops.attn_res.attn_res_bank` and, with a partial result, `tercet.ops.attn_res.attn_res_merge`."""
    return _merge(*rows, **parameters) if "partial" in parameters else _bank(*rows, **parameters)


def declines(*rows: Tensor, **parameters: object) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    partial, queries = parameters.get("partial"), parameters.get("folded_queries")
    if torch.is_grad_enabled() and any(x.requires_grad for x in rows):
        return "the two-phase form has no gradients on the GPU"
    if len({v.dtype for v in rows}) != 1 or len(rows) > MAX_SOURCES or rows[0].shape[-1] > MAX_WIDTH:
        return f"{len(rows)} sources of width {rows[0].shape[-1]} and types {sorted({str(v.dtype) for v in rows})}"
    if isinstance(queries, Tensor) and len(queries) > MAX_QUERIES:
        return f"{len(queries)} queries, more than {MAX_QUERIES}"
    if isinstance(partial, Partial) and partial.value.dtype != torch.float32:
        return f"the partial result is {partial.value.dtype}, not fp32"
    return float_refusal(rows[0])
