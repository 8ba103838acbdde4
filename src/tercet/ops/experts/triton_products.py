"""Grouped matrix products over rows sorted by expert, with their element-wise neighbours fused in.

All kernels walk `TileTable` tiles (rows of one expert) times column tiles. `GROUP` row tiles are taken together before
the column tile advances, so the row tiles of an expert meet its weights in the L2 cache. Rows are gathered while they
are loaded: no permuted copy of the tokens exists. Sums are fp32; a result that is summed over experts afterwards stays
fp32 until then.

Shapes: R rows, E experts, L latent width, I inner width; tiles of BM rows, BN columns, BK depth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.glu.triton_ import sigmoid, silu_pulled, situ, situ_pulled


@triton.jit
def _locate(tile_expert, tile_first, ends, tiles, columns, BM: tl.constexpr, GROUP: tl.constexpr):
    """Return the expert (-1: none), its rows clamped to its last, which of them exist, and the column tile."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    size = tl.minimum(tiles - group * GROUP, GROUP)
    tile = group * GROUP + (program % (GROUP * columns)) % size
    column = (program % (GROUP * columns)) // size
    expert = tl.load(tile_expert + tile)
    row = tl.load(tile_first + tile) + tl.arange(0, BM)
    end = tl.load(ends + tl.maximum(expert, 0))
    return expert.to(tl.int64), tl.minimum(row, end - 1).to(tl.int64), row < end, column


@triton.jit
def _bounded(index, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Clamp an index into a dim that BLOCK does not divide; otherwise leave its contiguity visible to the compiler."""
    return index if LIMIT % BLOCK == 0 else tl.minimum(index, LIMIT - 1)


@triton.jit
def _multiply(total, a, a_row, w, w_row, w_column, depth, BK: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr):
    """Add ``a[rows] @ w`` over *depth*; w's address is ``w + w_row * k + w_column``, a's ``a + a_row + k``."""
    k = tl.arange(0, BK)
    for first in range(0, depth, BK):
        at = first + k
        if EVEN:
            left = tl.load(a + a_row[:, None] + at[None, :])
            right = tl.load(w + w_row * at[:, None] + w_column[None, :])
        else:
            inside = at < depth
            left = tl.load(a + a_row[:, None] + at[None, :], mask=inside[None, :], other=0.0)
            right = tl.load(w + w_row * at[:, None] + w_column[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(left.to(OPERAND), right.to(OPERAND), total, input_precision="tf32x3")
    return total


@triton.jit
def gate_up_kernel(
    z,
    choice,
    w1,
    w3,
    gate,
    up,
    hidden,
    tile_expert,
    tile_first,
    ends,
    tiles,
    chosen,
    beta,
    linear_beta,
    L: tl.constexpr,
    INNER: tl.constexpr,
    SITU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Gather tokens, multiply by both input projections of their expert, activate."""
    expert, row, exists, n = _locate(tile_expert, tile_first, ends, tiles, tl.cdiv(INNER, BN), BM, GROUP)
    if expert < 0:
        return
    token = (tl.load(choice + row) // chosen).to(tl.int64) * L
    column = n * BN + tl.arange(0, BN)
    weight = expert * INNER * L + _bounded(column, INNER, BN) * L
    k = tl.arange(0, BK)
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for first in range(0, L, BK):
        at = first + k
        inside = at < L
        if L % BK == 0:
            left = tl.load(z + token[:, None] + at[None, :])
            right_g = tl.load(w1 + weight[None, :] + at[:, None])
            right_u = tl.load(w3 + weight[None, :] + at[:, None])
        else:
            left = tl.load(z + token[:, None] + at[None, :], mask=inside[None, :], other=0.0)
            right_g = tl.load(w1 + weight[None, :] + at[:, None], mask=inside[:, None], other=0.0)
            right_u = tl.load(w3 + weight[None, :] + at[:, None], mask=inside[:, None], other=0.0)
        left = left.to(OPERAND)
        g = tl.dot(left, right_g.to(OPERAND), g, input_precision="tf32x3")
        u = tl.dot(left, right_u.to(OPERAND), u, input_precision="tf32x3")
    to = row[:, None] * INNER + column[None, :]
    mask = exists[:, None] & (column < INNER)[None, :]
    element = gate.dtype.element_ty
    g, u = g.to(element), u.to(element)
    tl.store(gate + to, g, mask=mask)
    tl.store(up + to, u, mask=mask)
    g, u = g.to(tl.float32), u.to(tl.float32)
    h = situ(g, u, beta, linear_beta) if SITU else g * sigmoid(g) * u
    tl.store(hidden + to, h.to(element), mask=mask)


@triton.jit
def rows_kernel(
    a,
    w,
    a2,
    w2,
    out,
    tile_expert,
    tile_first,
    ends,
    tiles,
    w_depth_stride,
    w_column_stride,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Multiply every row by its expert's weight (and, with TWO, add a second such product); fp32 out."""
    expert, row, exists, n = _locate(tile_expert, tile_first, ends, tiles, tl.cdiv(COLUMNS, BN), BM, GROUP)
    if expert < 0:
        return
    column = n * BN + tl.arange(0, BN)
    base = expert * DEPTH * COLUMNS
    w_column = _bounded(column, COLUMNS, BN) * w_column_stride
    total = tl.zeros([BM, BN], tl.float32)
    even: tl.constexpr = DEPTH % BK == 0
    total = _multiply(total, a, row * DEPTH, w + base, w_depth_stride, w_column, DEPTH, BK, even, OPERAND)
    if TWO:
        total = _multiply(total, a2, row * DEPTH, w2 + base, w_depth_stride, w_column, DEPTH, BK, even, OPERAND)
    mask = exists[:, None] & (column < COLUMNS)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], total, mask=mask)


@triton.jit
def hidden_gradient_kernel(
    d_out,
    choice,
    weights,
    w2,
    gate,
    up,
    weighted,
    d_gate,
    d_up,
    pulls,
    tile_expert,
    tile_first,
    ends,
    tiles,
    rows,
    chosen,
    beta,
    linear_beta,
    L: tl.constexpr,
    INNER: tl.constexpr,
    SITU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Pull the output gradient back through w2 and the activation; leave ``p·h`` for w2's gradient, ``A·h`` for p's."""
    expert, row, exists, n = _locate(tile_expert, tile_first, ends, tiles, tl.cdiv(INNER, BN), BM, GROUP)
    if expert < 0:
        return
    picked = tl.load(choice + row)
    p = tl.load(weights + picked).to(tl.float32)
    column = n * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    token = (picked // chosen).to(tl.int64) * L
    base = w2 + expert * INNER * L
    total = _multiply(total, d_out, token, base, INNER, _bounded(column, INNER, BN), L, BK, L % BK == 0, OPERAND)
    to = row[:, None] * INNER + column[None, :]
    mask = exists[:, None] & (column < INNER)[None, :]
    g = tl.load(gate + to, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + to, mask=mask, other=0.0).to(tl.float32)
    if SITU:
        h, by_gate, by_up = situ_pulled(g, u, beta, linear_beta)
    else:
        h, by_gate, by_up = silu_pulled(g, u)
    tl.store(pulls + n.to(tl.int64) * rows + row, tl.sum(total * h, 1), mask=exists)
    pulled = total * p[:, None]
    element = gate.dtype.element_ty
    tl.store(weighted + to, (h * p[:, None]).to(element), mask=mask)
    tl.store(d_gate + to, (pulled * by_gate).to(element), mask=mask)
    tl.store(d_up + to, (pulled * by_up).to(element), mask=mask)


@triton.jit
def weight_gradient_kernel(
    left,
    right,
    out,
    ends,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``out[e] = leftᵀ right`` over an expert's rows; an expert without rows gets zeros."""
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * columns
    expert = tl.program_id(0) // tiles
    within = tl.program_id(0) % tiles
    m = (within // columns) * BM + tl.arange(0, BM)
    n = (within % columns) * BN + tl.arange(0, BN)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(begin, end, BK):
        row = first + tl.arange(0, BK)
        inside = (row < end)[:, None]
        at = row.to(tl.int64)[:, None]
        a = tl.load(left + at * M + _bounded(m, M, BM)[None, :], mask=inside, other=0.0)
        b = tl.load(right + at * N + _bounded(n, N, BN)[None, :], mask=inside, other=0.0)
        total = tl.dot(tl.trans(a.to(OPERAND)), b.to(OPERAND), total, input_precision="tf32x3")
    to = expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


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
