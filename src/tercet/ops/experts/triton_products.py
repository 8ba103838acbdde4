"""Grouped matrix products over rows sorted by expert.

A program owns a tile of rows of one expert (`Plan.tiles`) times a tile of columns. `GROUP` row tiles are taken together
before the column tile advances, so the row tiles of an expert meet its weights in the L2 cache. Sums are fp32. With
HALVE, a tile of which at most half the rows exist runs at half height: with few rows an expert, last tiles are many.

Operands arrive in one of two ways. BULK: as tensor descriptors, which the copy engine reads without spending registers
on addresses; tiles must then divide widths, so that none crosses an expert. Otherwise: as pointers, with masks. Rows of
a tile past the end of its expert are computed from rows that exist, or zeros, and not stored.

Shapes: R rows, E experts, L latent width, I inner width; tiles of BM rows, BN columns, BK depth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.glu.triton_ import sigmoid, situ
from tercet.ops.gpu import fitted
from tercet.ops.triton_math import FP32


@triton.jit
def _locate(program, count, columns, tiles, GROUP: tl.constexpr):
    """Return a program's expert, first row, the end of the expert's rows, and its column tile."""
    group = program // (GROUP * columns)
    size = tl.minimum(count - group * GROUP, GROUP)
    tile = tiles + 1 + 3 * (group * GROUP + (program % (GROUP * columns)) % size)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), (program % (GROUP * columns)) // size


@triton.jit
def _bounded(index, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Clamp an index into a dim that BLOCK does not divide; otherwise leave its contiguity visible to the compiler."""
    return index if LIMIT % BLOCK == 0 else tl.minimum(index, LIMIT - 1)


@triton.jit
def _left(a, first, row, k, DEPTH: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr):
    """Rows ``[BM, BK]`` of ``a [R, DEPTH]`` from depth *k*; *row* is clamped to rows that exist."""
    if BULK:
        left = a.load([first, k])
    else:
        at = k + tl.arange(0, BK)
        place = a + row[:, None] * DEPTH + at[None, :]
        left = tl.load(place) if DEPTH % BK == 0 else tl.load(place, mask=(at < DEPTH)[None, :], other=0.0)
    return left


@triton.jit
def _right(
    w,
    expert,
    n,
    k,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BULK: tl.constexpr,
):
    """Weights ``[BK, BN]`` of an expert: from ``w [E, COLUMNS, DEPTH]`` or, TRANSPOSED, ``w [E, DEPTH, COLUMNS]``."""
    if BULK:
        if TRANSPOSED:
            right = w.load([expert * DEPTH + k, n * BN])
        else:
            right = w.load([expert * COLUMNS + n * BN, k]).T
    else:
        at = k + tl.arange(0, BK)
        column = _bounded(n * BN + tl.arange(0, BN), COLUMNS, BN)
        place = w + expert.to(tl.int64) * (DEPTH * COLUMNS)
        if TRANSPOSED:
            place += at[:, None] * COLUMNS + column[None, :]
        else:
            place += column[None, :] * DEPTH + at[:, None]
        right = tl.load(place) if DEPTH % BK == 0 else tl.load(place, mask=(at < DEPTH)[:, None], other=0.0)
    return right


@triton.jit
def _add_product(
    total,
    a,
    w,
    expert,
    first,
    inside,
    n,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BULK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add a tile of rows times weights; *inside* are the rows, clamped to those that exist."""
    for k in range(0, DEPTH, BK):
        left = _left(a, first, inside, k, DEPTH, BK, BULK).to(OPERAND)
        right = _right(w, expert, n, k, DEPTH, COLUMNS, TRANSPOSED, BN, BK, BULK).to(OPERAND)
        total = tl.dot(left, right, total, input_precision=FP32)
    return total


@triton.jit
def _rows_tile(
    a,
    w,
    a2,
    w2,
    out,
    expert,
    first,
    end,
    n,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TWO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BULK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    row = first + tl.arange(0, BM)
    at = tl.minimum(row, end - 1).to(tl.int64)
    total = tl.zeros([BM, BN], tl.float32)
    total = _add_product(total, a, w, expert, first, at, n, DEPTH, COLUMNS, TRANSPOSED, BN, BK, BULK, OPERAND)
    if TWO:
        total = _add_product(total, a2, w2, expert, first, at, n, DEPTH, COLUMNS, TRANSPOSED, BN, BK, BULK, OPERAND)
    column = n * BN + tl.arange(0, BN)
    mask = (row < end)[:, None] & (column < COLUMNS)[None, :]
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@fitted
@triton.jit
def rows_kernel(
    a,
    a2,
    w,
    w2,
    a_half,
    a2_half,
    out,
    tiles,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TWO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVE: tl.constexpr,
    BULK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Multiply every row by its expert's weight and, with TWO, add a second such product."""
    columns: tl.constexpr = (COLUMNS + BN - 1) // BN
    half: tl.constexpr = BM // 2
    count = tl.load(tiles)
    program = tl.program_id(0)
    if program >= count * columns:
        return
    e, first, end, n = _locate(program, count, columns, tiles, GROUP)
    if HALVE:
        if end - first > half:
            _rows_tile(a, w, a2, w2, out, e, first, end, n, DEPTH, COLUMNS, TRANSPOSED, TWO, BM, BN, BK, BULK, OPERAND)
        else:
            _rows_tile(
                a_half,
                w,
                a2_half,
                w2,
                out,
                e,
                first,
                end,
                n,
                DEPTH,
                COLUMNS,
                TRANSPOSED,
                TWO,
                half,
                BN,
                BK,
                BULK,
                OPERAND,
            )
    else:
        _rows_tile(a, w, a2, w2, out, e, first, end, n, DEPTH, COLUMNS, TRANSPOSED, TWO, BM, BN, BK, BULK, OPERAND)


@triton.jit
def _gate_up_tile(
    rows,
    w1,
    w3,
    gate,
    up,
    hidden,
    expert,
    first,
    end,
    n,
    beta,
    linear_beta,
    L: tl.constexpr,
    INNER: tl.constexpr,
    SITU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BULK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    row = first + tl.arange(0, BM)
    inside = tl.minimum(row, end - 1).to(tl.int64)
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for k in range(0, L, BK):
        left = _left(rows, first, inside, k, L, BK, BULK).to(OPERAND)
        right_g = _right(w1, expert, n, k, L, INNER, False, BN, BK, BULK).to(OPERAND)
        right_u = _right(w3, expert, n, k, L, INNER, False, BN, BK, BULK).to(OPERAND)
        g = tl.dot(left, right_g, g, input_precision=FP32)
        u = tl.dot(left, right_u, u, input_precision=FP32)
    column = n * BN + tl.arange(0, BN)
    to = row.to(tl.int64)[:, None] * INNER + column[None, :]
    mask = (row < end)[:, None] & (column < INNER)[None, :]
    element = gate.dtype.element_ty
    saved_g, saved_u = g.to(element), u.to(element)
    tl.store(gate + to, saved_g, mask=mask)
    tl.store(up + to, saved_u, mask=mask)
    g, u = saved_g.to(tl.float32), saved_u.to(tl.float32)
    h = situ(g, u, beta, linear_beta, element == tl.bfloat16) if SITU else g * sigmoid(g) * u
    tl.store(hidden + to, h.to(element), mask=mask)


@fitted
@triton.jit
def gate_up_kernel(
    rows,
    w1,
    w3,
    rows_half,
    gate,
    up,
    hidden,
    tiles,
    beta,
    linear_beta,
    L: tl.constexpr,
    INNER: tl.constexpr,
    SITU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVE: tl.constexpr,
    BULK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Multiply rows by both input projections of their expert and activate."""
    columns: tl.constexpr = (INNER + BN - 1) // BN
    half: tl.constexpr = BM // 2
    count = tl.load(tiles)
    program = tl.program_id(0)
    if program >= count * columns:
        return
    e, first, end, n = _locate(program, count, columns, tiles, GROUP)
    if HALVE:
        if end - first > half:
            _gate_up_tile(
                rows,
                w1,
                w3,
                gate,
                up,
                hidden,
                e,
                first,
                end,
                n,
                beta,
                linear_beta,
                L,
                INNER,
                SITU,
                BM,
                BN,
                BK,
                BULK,
                OPERAND,
            )
        else:
            _gate_up_tile(
                rows_half,
                w1,
                w3,
                gate,
                up,
                hidden,
                e,
                first,
                end,
                n,
                beta,
                linear_beta,
                L,
                INNER,
                SITU,
                half,
                BN,
                BK,
                BULK,
                OPERAND,
            )
    else:
        _gate_up_tile(
            rows,
            w1,
            w3,
            gate,
            up,
            hidden,
            e,
            first,
            end,
            n,
            beta,
            linear_beta,
            L,
            INNER,
            SITU,
            BM,
            BN,
            BK,
            BULK,
            OPERAND,
        )


@fitted
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
        total = tl.dot(tl.trans(a.to(OPERAND)), b.to(OPERAND), total, input_precision=FP32)
    to = expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
