"""Backward kernels of Attention Residuals (formulas in kernels.md §7).

``δ·out`` is needed before any source's gradient. It comes from the saved, rounded ``out`` (which the next norm keeps
anyway): one more row to read instead of all sources twice, for a relative error of 1e-3 in the scores' gradient when
activations are bf16, none in fp32. With a norm behind the mixture ``δ·out`` needs no sum at all: a norm's gradient is
orthogonal to its input but for ε, so ``δ·out = c ε r²`` with the norm's own ``c = Σ dy w unit``.

Programs stay and take every so many-th token. A narrow row belongs to one warp, eight of which work side by side
(`_narrow_kernel`). A wide row leaves room for one program, so what it waits for counts (`_wide_kernel`): all rows of
all its tokens are one loop, loads run ahead from one token into the next, and rows come in pairs: δ and ``out``, then
two sources for half as many reductions, or a source with the gradient handed in for it.

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

from tercet.ops.gpu import chip, dense, fitted, operator, power_of_two
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
def _two_numbers(numbers, at, there, N: tl.constexpr):
    """Load p and r of one source of a token."""
    return tl.load(numbers + at, mask=there, other=0.0), tl.load(numbers + at + N, mask=there, other=0.0)


@triton.jit
def _pull(v, given, dot, product, two, centre, delta, folded, D: tl.constexpr):
    """Return a source's gradient, what was handed in included, and its factor in that of the folded query."""
    p, r = two
    pull = p * (dot - centre) * r
    return p * delta + pull * folded - (pull * product * r * r / D) * v + given.to(tl.float32), pull


@fitted
@triton.jit
def _narrow_kernel(
    first,
    second,
    grads,
    weight,
    query,
    next_weight,
    numbers,
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
    """*first* is δ and the sources, *second* the mixture and what was handed in; see `_wide_kernel`."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    folded = folded_query(weight, query, column, inside)
    d_folded, d_next = tl.zeros_like(folded), tl.zeros_like(folded)
    size = tl.cast(tokens, tl.int64) * D
    token = program
    while token < tokens:
        at, place = token * D + column, token * (2 * N + 1)
        delta = tl.load(first[0] + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(second[0] + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            next_r = tl.load(numbers + place + 2 * N)
            delta, centre, term = _behind_norm(delta, mixed, next_r, next_weight, next_eps, column, inside, D)
            d_next += term
        else:
            centre = tl.sum(delta * mixed, 0)
        for k in tl.range(1, count, num_stages=STAGES):
            v = tl.load(source(first, k, N + 1) + at, mask=inside, other=0.0).to(tl.float32)
            given = tl.zeros([], tl.float32)
            if HANDED:
                there = inside & ((present >> k & 1) == 1)
                given = tl.load(source(second, k, N + 1) + at, mask=there, other=0.0)
            two = _two_numbers(numbers, place + k - 1, True, N)
            dot, product = tl.reduce((v * delta, v * folded), 0, sum_two)
            d_v, pull = _pull(v, given, dot, product, two, centre, delta, folded, D)
            d_folded += pull * v
            to = grads + (k - 1) * size + at
            tl.store(to, d_v.to(grads.dtype.element_ty), mask=inside)
        token += tl.num_programs(0)
    to = partial + program * (2 if NORMED else 1) * D + column
    tl.store(to, d_folded, mask=inside)
    if NORMED:
        tl.store(to + D, d_next, mask=inside)


@triton.jit
def _second(first, second, k, present, inside, N: tl.constexpr, HANDED: tl.constexpr):
    """Return where the second row of a wide step is, and its mask."""
    if HANDED:
        return source(second, k, N + 1), inside & ((present >> k & 1) == 1)
    else:
        row = tl.where(k == 0, second[0], source(first, 2 * k, N + 1))
        return tl.multiple_of(row, 16), inside & (2 * k <= N)


@fitted
@triton.jit
def _wide_kernel(
    first,
    second,
    grads,
    weight,
    query,
    next_weight,
    numbers,
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
    """*first* is δ and the sources, *second* the mixture and what was handed in, of which *present* has the bits.

    A step takes δ and the mixture; after them a source and what was handed in for it, or else two sources.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    folded = folded_query(weight, query, column, inside)
    d_folded, d_next, delta = tl.zeros_like(folded), tl.zeros_like(folded), tl.zeros_like(folded)
    size = tl.cast(tokens, tl.int64) * D
    centre, two_a, two_b = 0.0, _two_numbers(numbers, 0, False, N), _two_numbers(numbers, 0, False, N)
    next_r = tl.load(numbers + program.to(tl.int64) * (2 * N + 1) + 2 * N)
    STEPS: tl.constexpr = N + 1 if HANDED else (N + 3) // 2
    EACH: tl.constexpr = 1 if HANDED else 2
    for step in tl.range(0, tl.cdiv(tokens - program, programs) * STEPS, num_stages=STAGES):
        k = step % STEPS
        i = (k - 1) * EACH
        token = (program + step // STEPS * programs).to(tl.int64)
        at, place = token * D + column, token * (2 * N + 1)
        a = tl.load(source(first, i + 1, N + 1) + at, mask=inside, other=0.0).to(tl.float32)
        row, there = _second(first, second, k, present, inside, N, HANDED)
        b = tl.load(row + at, mask=there, other=0.0)
        # numbers of the next step, asked for now
        coming_a = _two_numbers(numbers, place + i + EACH, i + EACH < N, N)
        coming_b = _two_numbers(numbers, place + i + 3, (i + 3 < N) & (not HANDED), N)
        to = grads + i * size + at
        if k == 0:
            mixed = b.to(tl.float32)
            if NORMED:
                delta, centre, term = _behind_norm(a, mixed, next_r, next_weight, next_eps, column, inside, D)
                d_next += term
                later = token + programs
                next_r = tl.load(numbers + later * (2 * N + 1) + 2 * N, mask=later < tokens, other=0.0)
            else:
                delta, centre = a, tl.sum(a * mixed, 0)
        elif HANDED:
            dot, product = tl.reduce((a * delta, a * folded), 0, sum_two)
            d_a, pull = _pull(a, b, dot, product, two_a, centre, delta, folded, D)
            d_folded += pull * a
            tl.store(to, d_a.to(grads.dtype.element_ty), mask=inside)
        else:
            v, none = b.to(tl.float32), tl.zeros([], tl.float32)
            dot_a, product_a, dot_b, product_b = tl.reduce((a * delta, a * folded, v * delta, v * folded), 0, _sum_four)
            d_a, pull = _pull(a, none, dot_a, product_a, two_a, centre, delta, folded, D)
            d_folded += pull * a
            tl.store(to, d_a.to(grads.dtype.element_ty), mask=inside)
            d_v, pull = _pull(v, none, dot_b, product_b, two_b, centre, delta, folded, D)
            d_folded += pull * v
            tl.store(to + size, d_v.to(grads.dtype.element_ty), mask=there)
        two_a, two_b = coming_a, coming_b
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
    " Tensor grad, Tensor numbers, float next_eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attn_res_backward(
    sources: list[Tensor],
    handed: list[Tensor | None],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    out: Tensor,
    grad: Tensor,
    numbers: Tensor,
    next_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the sources ``[n, …]`` with *handed* added, of both parameters and of *next_weight*.

    One tensor for all sources: they are used up together, by the reader before, and it costs the CPU less.
    """
    count, normed = len(sources), next_weight is not None
    dim, tokens = out.shape[-1], out.numel() // out.shape[-1]
    present = sum([2 << i for i, d in enumerate(handed) if d is not None])
    first = (dense(grad), *[dense(v) for v in sources])
    second = (out, *[out if d is None else dense(d) for d in handed]) if present else (out,)
    norm_weight, query = dense(norm_weight), dense(query)
    behind = query if next_weight is None else dense(next_weight)
    grads = out.new_empty((count, *out.shape))
    block = power_of_two(dim)
    warps = max(1, block // 1024)
    kernel, stages = (_narrow_kernel, _NARROW) if block <= WARP_ROW else (_wide_kernel, _WIDE)
    programs = min(tokens, max(1, _RESIDENT // warps) * chip(out.device).multiprocessors)
    partial = out.new_empty((programs, 2 if normed else 1, dim), dtype=torch.float32)
    if tokens:
        kernel[(programs,)](
            first,
            second,
            grads,
            norm_weight,
            query,
            behind,
            numbers,
            partial,
            tokens,
            present + 1,
            count + 1,
            next_eps,
            NORMED=normed,
            HANDED=present > 0,
            N=count,
            D=dim,
            BLOCK=block,
            STAGES=stages[present > 0],
            num_warps=warps,
        )
    d_weight, d_query = torch.empty_like(norm_weight), torch.empty_like(query)
    d_next = torch.empty_like(behind) if normed else query.new_empty(0)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_next = query.new_empty(0) if next_weight is None else next_weight.new_empty(next_weight.shape)
    grads = sources[0].new_empty((len(sources), *sources[0].shape))
    return grads, norm_weight.new_empty(norm_weight.shape), query.new_empty(query.shape), d_next
