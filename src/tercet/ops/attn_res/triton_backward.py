"""Backward kernels of Attention Residuals (formulas in kernels.md §7).

``δ·out`` is needed before any source's gradient. It comes from the saved, rounded ``out`` (which the next norm keeps
anyway): one more row to read instead of all sources twice, for a relative error of 1e-3 in the scores' gradient when
activations are bf16, none in fp32. With a norm behind the mixture ``δ·out`` needs no sum at all: a norm's gradient is
orthogonal to its input but for ε, so ``δ·out = c ε r²`` with the norm's own ``c = Σ dy w unit``.

Programs stay and take every so many-th token. A narrow row belongs to one warp, eight of which work side by side
(`_narrow_kernel`). A wide row leaves room for one program, so what it waits for counts (`_wide_kernel`): all rows of
all its tokens are one loop, loads run ahead from one token into the next, and rows come in pairs, first δ and ``out``,
then two sources at a time, for half as many reductions.

A gradient that a later reader hands in is added in fp32 before the only rounding. The weights' gradients are partial
sums of the programs, added in a fixed order.

Shapes: n sources, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import dense, fitted, multiprocessors, operator
from tercet.ops.triton_sums import added, launch

WARP_ROW = 1024
"""Widest row that one warp owns: 32 values a thread."""
_RESIDENT = 8
"""Warps on a multiprocessor; measured best on an H200, as are the two below."""
_NARROW, _WIDE = (6, 4), (3, 3)
"""Sources, or pairs of rows, in flight, and when gradients are handed in."""


@triton.jit
def sum_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _sum_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def source(sources, i, N: tl.constexpr):
    """Return a pointer to source i, for an i that is not a compile-time constant.

    A loop over i stays a loop: unrolled, the compiler moves all loads to the front and spills.
    """
    pointer = sources[0]
    for j in tl.static_range(1, N):
        pointer = tl.where(i == j, sources[j], pointer)
    return tl.multiple_of(pointer, 16)


@triton.jit
def folded_query(weight, query, column, inside):
    folded = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return folded * tl.load(query + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _behind_norm(delta, mixed, next_r, next_weight, next_eps, column, inside, D: tl.constexpr):
    """Return the gradient of the mixture from that of its norm, ``δ·out``, and the terms of the norm weight's."""
    unit = mixed * next_r
    d_next = delta * unit
    delta *= tl.load(next_weight + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(delta * unit, 0)
    return (delta - unit * (along / D)) * next_r, along * next_eps * next_r * next_r, d_next


@triton.jit
def _numbers(p_in, r_in, at, there):
    """Load p and r of one source of a token."""
    return tl.load(p_in + at, mask=there, other=0.0), tl.load(r_in + at, mask=there, other=0.0)


@triton.jit
def _given(handed, j, at, inside, present, N: tl.constexpr, HANDED: tl.constexpr):
    """Load the gradient that a later reader handed in; zero without."""
    if HANDED:
        return tl.load(source(handed, j, N + 2) + at, mask=inside & ((present >> j & 1) == 1), other=0.0)
    else:
        return tl.zeros([], tl.float32)


@triton.jit
def _pull(v, given, dot, product, numbers, centre, delta, folded, D: tl.constexpr):
    """Return a source's gradient, what was handed in included, and its factor in that of the folded query."""
    p, r = numbers
    pull = p * (dot - centre) * r
    return p * delta + pull * folded - (pull * product * r * r / D) * v + given.to(tl.float32), pull


@fitted
@triton.jit
def _narrow_kernel(
    rows,
    handed,
    grads,
    weight,
    query,
    next_weight,
    p_in,
    r_in,
    next_r_in,
    partial,
    tokens,
    present,
    count,
    next_eps,
    NORMED: tl.constexpr,
    HANDED: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    folded = folded_query(weight, query, column, inside)
    d_folded, d_next = tl.zeros_like(folded), tl.zeros_like(folded)
    token = program
    while token < tokens:
        at = token * D + column
        delta = tl.load(rows[0] + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(rows[1] + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            next_r = tl.load(next_r_in + token)
            delta, centre, term = _behind_norm(delta, mixed, next_r, next_weight, next_eps, column, inside, D)
            d_next += term
        else:
            centre = tl.sum(delta * mixed, 0)
        for j in tl.range(2, count, num_stages=STAGES):
            v = tl.load(source(rows, j, N + 2) + at, mask=inside, other=0.0).to(tl.float32)
            given = _given(handed, j, at, inside, present, N, HANDED)
            numbers = _numbers(p_in, r_in, token * N + j - 2, True)
            dot, product = tl.reduce((v * delta, v * folded), 0, sum_two)
            d_v, pull = _pull(v, given, dot, product, numbers, centre, delta, folded, D)
            d_folded += pull * v
            tl.store(source(grads, j, N + 2) + at, d_v.to(grads[0].dtype.element_ty), mask=inside)
        token += tl.num_programs(0)
    to = partial + program * (2 if NORMED else 1) * D + column
    tl.store(to, d_folded, mask=inside)
    if NORMED:
        tl.store(to + D, d_next, mask=inside)


@fitted
@triton.jit
def _wide_kernel(
    rows,
    handed,
    grads,
    weight,
    query,
    next_weight,
    p_in,
    r_in,
    next_r_in,
    partial,
    tokens,
    present,
    count,
    next_eps,
    NORMED: tl.constexpr,
    HANDED: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    folded = folded_query(weight, query, column, inside)
    d_folded, d_next, delta = tl.zeros_like(folded), tl.zeros_like(folded), tl.zeros_like(folded)
    centre, numbers_a, numbers_b = 0.0, _numbers(p_in, r_in, 0, False), _numbers(p_in, r_in, 0, False)
    next_r = tl.load(next_r_in + program) if NORMED else 0.0
    PAIRS: tl.constexpr = (N + 3) // 2
    for step in tl.range(0, tl.cdiv(tokens - program, programs) * PAIRS, num_stages=STAGES):
        j = step % PAIRS * 2
        token = (program + step // PAIRS * programs).to(tl.int64)
        at = token * D + column
        second = inside & (j + 1 < count)
        a = tl.load(source(rows, j, N + 2) + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source(rows, j + 1, N + 2) + at, mask=second, other=0.0).to(tl.float32)
        given_a = _given(handed, j, at, inside, present, N, HANDED)
        given_b = _given(handed, j + 1, at, second, present, N, HANDED)
        numbers = token * N + j  # those of the next pair, asked for a step ahead
        coming_a, coming_b = _numbers(p_in, r_in, numbers, j < N), _numbers(p_in, r_in, numbers + 1, j + 1 < N)
        if j == 0:
            if NORMED:
                delta, centre, term = _behind_norm(a, b, next_r, next_weight, next_eps, column, inside, D)
                d_next += term
                next_r = tl.load(next_r_in + token + programs, mask=token + programs < tokens, other=0.0)
            else:
                delta, centre = a, tl.sum(a * b, 0)
        else:
            dot_a, product_a, dot_b, product_b = tl.reduce((a * delta, a * folded, b * delta, b * folded), 0, _sum_four)
            d_a, pull = _pull(a, given_a, dot_a, product_a, numbers_a, centre, delta, folded, D)
            d_folded += pull * a
            tl.store(source(grads, j, N + 2) + at, d_a.to(grads[0].dtype.element_ty), mask=inside)
            d_b, pull = _pull(b, given_b, dot_b, product_b, numbers_b, centre, delta, folded, D)
            d_folded += pull * b
            tl.store(source(grads, j + 1, N + 2) + at, d_b.to(grads[0].dtype.element_ty), mask=second)
        numbers_a, numbers_b = coming_a, coming_b
    to = partial + program.to(tl.int64) * (2 if NORMED else 1) * D + column
    tl.store(to, d_folded, mask=inside)
    if NORMED:
        tl.store(to + D, d_next, mask=inside)


@triton.jit
def _parameters_kernel(
    partial,
    weight,
    query,
    d_weight,
    d_query,
    d_next,
    count,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
):
    """Sum the programs' rows; the second half of the grid takes the next norm's weight."""
    column, which = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    inside = column < D
    d = added(partial, column, which, count, 2 if NORMED else 1, D, ROWS, BC)
    if which == 0:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_weight + column, (d * q).to(d_weight.dtype.element_ty), mask=inside)
        tl.store(d_query + column, (d * w).to(d_query.dtype.element_ty), mask=inside)
    else:
        tl.store(d_next + column, d.to(d_next.dtype.element_ty), mask=inside)


@operator(
    "tercet::attn_res_backward",
    schema="(Tensor[] sources, Tensor?[] handed, Tensor norm_weight, Tensor query, Tensor? next_weight, Tensor out,"
    " Tensor grad, Tensor p, Tensor r, Tensor next_r, float next_eps) -> (Tensor[], Tensor, Tensor, Tensor)",
)
def attn_res_backward(
    sources: list[Tensor],
    handed: list[Tensor | None],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    out: Tensor,
    grad: Tensor,
    p: Tensor,
    r: Tensor,
    next_r: Tensor,
    next_eps: float,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return the gradients of the sources, *handed* ones added, of both parameters and of *next_weight* (or empty)."""
    sources = [dense(v) for v in sources]
    first, count, normed = sources[0], len(sources), next_weight is not None
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    given = [v if d is None else dense(d) for v, d in zip(sources, handed)]
    grads = [torch.empty_like(v) for v in sources]
    norm_weight, query = dense(norm_weight), dense(query)
    block = triton.next_power_of_2(dim)
    kernel, stages = (_narrow_kernel, _NARROW) if block <= WARP_ROW else (_wide_kernel, _WIDE)
    warps, any_handed = max(1, block // 1024), any(d is not None for d in handed)
    programs = min(tokens, max(1, _RESIDENT // warps) * multiprocessors(first.device))
    partial = first.new_empty((programs, 2 if normed else 1, dim), dtype=torch.float32)
    if tokens:
        kernel[(programs,)](
            (dense(grad), out, *sources),
            (out, out, *given),
            (out, out, *grads),
            norm_weight,
            query,
            query if next_weight is None else dense(next_weight),
            p,
            r,
            next_r,
            partial,
            tokens,
            sum(4 << i for i, d in enumerate(handed) if d is not None),
            count + 2,
            next_eps,
            NORMED=normed,
            HANDED=any_handed,
            N=count,
            D=dim,
            BLOCK=block,
            STAGES=stages[any_handed],
            num_warps=warps,
        )
    d_weight, d_query = torch.empty_like(norm_weight), torch.empty_like(query)
    d_next = query.new_empty(0) if next_weight is None else torch.empty_like(dense(next_weight))
    columns, tile = launch(dim)
    _parameters_kernel[(columns, 2 if normed else 1)](
        partial, norm_weight, query, d_weight, d_query, d_next, programs, NORMED=normed, D=dim, **tile
    )
    return grads, d_weight, d_query, d_next


@attn_res_backward.register_fake
def _(
    sources: list[Tensor],
    handed: list[Tensor | None],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    *_: Any,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    d_next = query.new_empty(0) if next_weight is None else next_weight.new_empty(next_weight.shape)
    grads = [v.new_empty(v.shape) for v in sources]
    return grads, norm_weight.new_empty(norm_weight.shape), query.new_empty(query.shape), d_next
