"""Newton–Schulz of many short, wide blocks in Gram form (kernels.md §13).

Every polynomial of ``A = X Xᵀ`` commutes with A, so the iteration runs on the small Gram matrix alone,

    P = aI + bA + cA²;   Q ← P Q;   A ← P A P,

and X is read twice in all: once for A, once for ``Q X``. Three kernels: Gram matrix in column slices, iteration with
one program a block, application.

What keeps it exact: A, P and Q are products of three tf32 terms with fp32 sums (about fp32), and Q enters the last
product as the sum of two bf16 parts, because it spans a factor of a⁵ = 480 between large and small singular values.
Against fp64 the result is then as good as its bf16 rounding (2e-3), also where the plain bf16 loop is off by half
(one singular value 1e4 above the rest). Rounding noise in A grows by a² a step, so after `RESTART` steps X itself is
updated and its Gram matrix formed anew.

Blocks with more than `MAX_ROWS` rows on their short side are iterated by products of their own (`triton_large`).

Shapes: N blocks, R rows (padded to a power of two), C columns, S column slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import chip, dense, fitted, float_refusal, operand_type, operator
from tercet.ops.newton_schulz import triton_large
from tercet.ops.tables import kept
from tercet.ops.triton_math import TF32

MAX_ROWS = 128
RESTART = 5
_COLUMNS = 128
_DEPTH = 32


@triton.jit
def _load_tile(
    x, row_stride, column_stride, first, rows, columns, R: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr
):
    row = tl.arange(0, R)
    column = first + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    return tile.to(tl.bfloat16).to(OPERAND)


@fitted
@triton.jit
def _gram_kernel(
    x,
    partial,
    block_stride,
    row_stride,
    column_stride,
    rows,
    columns,
    slice_columns,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    n, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += n * block_stride
    total = tl.zeros([R, R], tl.float32)
    last = tl.minimum((s + 1) * slice_columns, columns)
    for first in tl.range(s * slice_columns, last, BLOCK, num_stages=STAGES):
        tile = _load_tile(x, row_stride, column_stride, first, rows, last, R, BLOCK, OPERAND)
        total = tl.dot(tile, tl.trans(tile), total)
    row = tl.arange(0, R)
    at = (n * tl.num_programs(1) + s) * R * R + row[:, None] * R + row[None, :]
    tl.store(partial + at, total)


@triton.jit
def _store_split(to, value, at, R: tl.constexpr):
    """Store *value* as two matrices: what tf32 keeps of it, and the rest."""
    high = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    tl.store(to + at, high)
    tl.store(to + R * R + at, value - high)


@triton.jit
def _product(left, right, R: tl.constexpr, DEPTH: tl.constexpr):
    """Return ``left @ right`` of two R × R matrices in memory, each split into two tf32 parts; right is symmetric."""
    row = tl.arange(0, R)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([R, R], tl.float32)
    for first in tl.range(0, R, DEPTH, num_stages=2):
        at = row[:, None] * R + first + depth[None, :]
        a_high, a_low = tl.load(left + at), tl.load(left + R * R + at)
        b_high, b_low = tl.load(right + at), tl.load(right + R * R + at)
        total = tl.dot(a_low, tl.trans(b_high), total, input_precision=TF32)
        total = tl.dot(a_high, tl.trans(b_low), total, input_precision=TF32)
        total = tl.dot(a_high, tl.trans(b_high), total, input_precision=TF32)
    return total


@fitted
@triton.jit
def _iterate_kernel(
    partial,
    slices,
    scratch,
    coefficients,
    steps,
    high,
    low,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, R)
    at = row[:, None] * R + row[None, :]
    unit = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    A = scratch + n * 8 * R * R
    P, Q, half = A + 2 * R * R, A + 4 * R * R, A + 6 * R * R
    gram = tl.zeros([R, R], tl.float32)
    for s in range(slices):
        gram += tl.load(partial + (n * slices + s) * R * R + at)
    scale = tl.full([], 1.0, tl.float32)
    if NORMALISE:
        scale = 1.0 / (tl.sqrt(tl.sum(tl.sum(gram * unit, 1), 0)) + 1e-7)
        gram = tl.where(scale > 0, gram * scale * scale, 0.0)
    _store_split(A, gram, at, R)
    for step in range(steps):
        tl.debug_barrier()
        a = tl.load(coefficients + 3 * step)
        b = tl.load(coefficients + 3 * step + 1)
        c = tl.load(coefficients + 3 * step + 2)
        p = _product(A, A, R, DEPTH) * c
        p += unit * a + (tl.load(A + at) + tl.load(A + R * R + at)) * b
        if step == 0:
            _store_split(Q, p, at, R)
        if step + 1 < steps or step > 0:
            _store_split(P, p, at, R)
        tl.debug_barrier()
        if step > 0:
            q = _product(P, Q, R, DEPTH)
            tl.debug_barrier()
            _store_split(Q, q, at, R)
        if step + 1 < steps:
            _store_split(half, _product(P, A, R, DEPTH), at, R)
            tl.debug_barrier()
            _store_split(A, _product(P, half, R, DEPTH), at, R)
    tl.debug_barrier()
    q = (tl.load(Q + at) + tl.load(Q + R * R + at)) * scale
    rounded = q.to(tl.bfloat16)
    tl.store(high + n * R * R + at, rounded)
    tl.store(low + n * R * R + at, (q - rounded.to(tl.float32)).to(tl.bfloat16))


@fitted
@triton.jit
def _apply_kernel(
    x,
    out,
    high,
    low,
    block_stride,
    row_stride,
    column_stride,
    rows,
    columns,
    slice_columns,
    out_block_stride,
    out_row_stride,
    out_column_stride,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    n, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += n * block_stride
    out += n * out_block_stride
    row = tl.arange(0, R)
    at = n * R * R + row[:, None] * R + row[None, :]
    q_high, q_low = tl.load(high + at).to(OPERAND), tl.load(low + at).to(OPERAND)
    last = tl.minimum((s + 1) * slice_columns, columns)
    for first in tl.range(s * slice_columns, last, BLOCK, num_stages=STAGES):
        tile = _load_tile(x, row_stride, column_stride, first, rows, last, R, BLOCK, OPERAND)
        total = tl.dot(q_high, tile, tl.dot(q_low, tile))
        column = first + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < last)[None, :]
        to = row[:, None] * out_row_stride + column[None, :] * out_column_stride
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@kept(32)
def _on_device(coefficients: tuple[tuple[float, float, float], ...], device: torch.device) -> Tensor:
    return torch.tensor(coefficients, dtype=torch.float32, device=device)


def _slices(count: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Return how many column slices fill the device about three times over, and the columns of each."""
    most = triton.cdiv(columns, 4 * _COLUMNS)
    slices = min(most, max(1, triton.cdiv(3 * chip(device).multiprocessors, count)))
    width = triton.cdiv(triton.cdiv(columns, slices), _COLUMNS) * _COLUMNS
    return triton.cdiv(columns, width), width


def _segment(x: Tensor, coefficients: tuple[tuple[float, float, float], ...], *, normalise: bool) -> Tensor:
    """Run the given steps on wide blocks ``[N, R, C]`` of any strides; the result is bf16."""
    count, rows, columns = x.shape
    padded = max(16, triton.next_power_of_2(rows))
    slices, width = _slices(count, columns, x.device)
    partial = torch.empty(count, slices, padded, padded, dtype=torch.float32, device=x.device)
    scratch = torch.empty(count, 8, padded, padded, dtype=torch.float32, device=x.device)
    parts = torch.empty(2, count, padded, padded, dtype=torch.bfloat16, device=x.device)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    operand = operand_type(torch.bfloat16)
    _gram_kernel[(count, slices)](
        x,
        partial,
        *x.stride(),
        rows,
        columns,
        width,
        R=padded,
        BLOCK=64,
        OPERAND=operand,
        STAGES=4 if x.dtype == torch.bfloat16 else 3,
        num_warps=4,
    )
    _iterate_kernel[(count,)](
        partial,
        slices,
        scratch,
        _on_device(coefficients, x.device),
        len(coefficients),
        parts[0],
        parts[1],
        R=padded,
        DEPTH=min(_DEPTH, padded),
        NORMALISE=normalise,
        num_warps=8 if padded == 128 else 4,
    )
    _apply_kernel[(count, slices)](
        x,
        out,
        parts[0],
        parts[1],
        *x.stride(),
        rows,
        columns,
        width,
        *out.stride(),
        R=padded,
        BLOCK=_COLUMNS,
        OPERAND=operand,
        STAGES=3,
        num_warps=8,
    )
    return out


@operator("tercet::newton_schulz", schema="(Tensor blocks, float[] coefficients) -> Tensor")
def _newton_schulz(blocks: Tensor, coefficients: list[float]) -> Tensor:
    steps = tuple(zip(coefficients[::3], coefficients[1::3], coefficients[2::3]))
    x = dense(blocks)
    tall = x.shape[1] > x.shape[2]
    wide = x.transpose(1, 2) if tall else x
    if wide.shape[1] > MAX_ROWS:
        wide = triton_large.iterate(wide, steps)
    else:
        for first in range(0, len(steps), RESTART):
            wide = _segment(wide, steps[first : first + RESTART], normalise=first == 0)
    return (wide.transpose(1, 2) if tall else wide).contiguous()


@_newton_schulz.register_fake
def _(blocks: Tensor, coefficients: list[float]) -> Tensor:
    return blocks.new_empty(blocks.shape, dtype=torch.bfloat16)


def declines(blocks: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if dtype != torch.bfloat16:
        return f"the kernels multiply in bf16, and {str(dtype).removeprefix('torch.')} products were asked for"
    if min(blocks.shape[1:]) > MAX_ROWS and not triton_large.fits(blocks):
        return f"large blocks need sides that are multiples of 8, not {blocks.shape[1]} × {blocks.shape[2]}"
    return float_refusal(blocks)


def call(blocks: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype) -> Tensor:
    """See `tercet.ops.newton_schulz.newton_schulz`."""
    return _newton_schulz(blocks, [value for step in coefficients for value in step])
