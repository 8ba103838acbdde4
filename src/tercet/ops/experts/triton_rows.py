"""The passes over rows between the grouped products: spread, pull back through the activation, combine.

Shapes: T tokens, k choices, R = T·k rows, I inner width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.glu.triton_ import silu_pulled, situ_pulled


@triton.jit
def spread_kernel(
    tokens, slot, out, count, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """``out[slot[t, j]] = tokens[t]``: a token is read once, however many experts it goes to."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (token < count)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(tokens + token.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    for j in range(CHOSEN):
        row = tl.load(slot + token * CHOSEN + j, mask=token < count, other=0).to(tl.int64)
        tl.store(out + row[:, None] * WIDTH + column[None, :], value, mask=mask)


@triton.jit
def pull_kernel(
    pulled,
    choice,
    weights,
    gate,
    up,
    weighted,
    d_gate,
    d_up,
    d_weights,
    beta,
    linear_beta,
    INNER: tl.constexpr,
    SITU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pull ``A = w2ᵀ dy`` of one row back through its weight and the activation (kernels.md §11).

    Leaves ``p·h`` for w2's gradient and ``A·h`` for p's. *pulled* may be *d_gate*: a value is read before it is
    written, by the same program.
    """
    row = tl.program_id(0).to(tl.int64)
    picked = tl.load(choice + row)
    p = tl.load(weights + picked).to(tl.float32)
    element = gate.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, INNER, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < INNER
        to = row * INNER + column
        a = tl.load(pulled + to, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + to, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + to, mask=inside, other=0.0).to(tl.float32)
        if SITU:
            h, by_gate, by_up = situ_pulled(g, u, beta, linear_beta, element == tl.bfloat16)
        else:
            h, by_gate, by_up = silu_pulled(g, u)
        total += a * h
        a *= p
        tl.store(weighted + to, (h * p).to(element), mask=inside)
        tl.store(d_gate + to, (a * by_gate).to(element), mask=inside)
        tl.store(d_up + to, (a * by_up).to(element), mask=inside)
    tl.store(d_weights + picked, tl.sum(total, 0).to(d_weights.dtype.element_ty))


@triton.jit
def combine_kernel(
    rows,
    slot,
    weights,
    out,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[t] = Σ_j p[t, j] rows[slot[t, j]]`` in fp32 and in the order of j; one cast."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(CHOSEN):
        row = tl.load(slot + token * CHOSEN + j).to(tl.int64)
        value = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOSEN + j).to(tl.float32)
        total += value
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
