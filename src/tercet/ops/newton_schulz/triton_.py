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

Blocks with more than `MAX_ROWS` rows on their short side go through batched cuBLAS products, where nothing is gained.

Shapes: N blocks, R rows (padded to a power of two), C columns, S column slices.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import dense, float_refusal, multiprocessors, operand_type
from tercet.ops.newton_schulz import reference

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
def _product(left, right, R: tl.constexpr, DEPTH: tl.constexpr):
    """Return ``left @ right`` of two R × R fp32 matrices in memory, to fp32 accuracy."""
    row = tl.arange(0, R)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([R, R], tl.float32)
    for first in tl.range(0, R, DEPTH, num_stages=1):
        a = tl.load(left + row[:, None] * R + first + depth[None, :])
        b = tl.load(right + (first + depth[:, None]) * R + row[None, :])
        total = tl.dot(a, b, total, input_precision="tf32x3")
    return total


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
    A = scratch + n * 4 * R * R
    P, Q, half = A + R * R, A + 2 * R * R, A + 3 * R * R
    gram = tl.zeros([R, R], tl.float32)
    for s in range(slices):
        gram += tl.load(partial + (n * slices + s) * R * R + at)
    scale = tl.full([], 1.0, tl.float32)
    if NORMALISE:
        scale = 1.0 / (tl.sqrt(tl.sum(tl.sum(gram * unit, 1), 0)) + 1e-7)
        gram = tl.where(scale > 0, gram * scale * scale, 0.0)
    tl.store(A + at, gram)
    tl.store(Q + at, unit)
    for step in range(steps):
        tl.debug_barrier()
        a = tl.load(coefficients + 3 * step)
        b = tl.load(coefficients + 3 * step + 1)
        c = tl.load(coefficients + 3 * step + 2)
        p = _product(A, A, R, DEPTH) * c
        p += unit * a + tl.load(A + at) * b
        tl.store(P + at, p)
        tl.debug_barrier()
        tl.store(half + at, _product(P, A, R, DEPTH))
        q = _product(P, Q, R, DEPTH)
        tl.debug_barrier()
        tl.store(Q + at, q)
        tl.store(A + at, _product(P, half, R, DEPTH))
    tl.debug_barrier()
    q = tl.load(Q + at) * scale
    rounded = q.to(tl.bfloat16)
    tl.store(high + n * R * R + at, rounded)
    tl.store(low + n * R * R + at, (q - rounded.to(tl.float32)).to(tl.bfloat16))


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
    out_block_stride,
    out_row_stride,
    out_column_stride,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    row = tl.arange(0, R)
    at = n * R * R + row[:, None] * R + row[None, :]
    tile = _load_tile(x + n * block_stride, row_stride, column_stride, first, rows, columns, R, BLOCK, OPERAND)
    total = tl.dot(tl.load(low + at).to(OPERAND), tile)
    total = tl.dot(tl.load(high + at).to(OPERAND), tile, total)
    column = first + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    to = n * out_block_stride + row[:, None] * out_row_stride + column[None, :] * out_column_stride
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=32)
def _on_device(coefficients: tuple[tuple[float, float, float], ...], device: torch.device) -> Tensor:
    return torch.tensor(coefficients, dtype=torch.float32, device=device)


def _segment(x: Tensor, coefficients: tuple[tuple[float, float, float], ...], *, normalise: bool) -> Tensor:
    """Run the given steps on wide blocks ``[N, R, C]`` of any strides; the result is bf16."""
    count, rows, columns = x.shape
    padded = max(16, triton.next_power_of_2(rows))
    slices = min(triton.cdiv(columns, 4 * _COLUMNS), max(1, triton.cdiv(3 * multiprocessors(x.device), count)))
    slice_columns = triton.cdiv(triton.cdiv(columns, slices), _COLUMNS) * _COLUMNS
    slices = triton.cdiv(columns, slice_columns)
    warps = 8 if padded == 128 else 4
    partial = torch.empty(count, slices, padded, padded, dtype=torch.float32, device=x.device)
    scratch = torch.empty(count, 4, padded, padded, dtype=torch.float32, device=x.device)
    parts = torch.empty(2, count, padded, padded, dtype=torch.bfloat16, device=x.device)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    operand = operand_type(torch.bfloat16)
    tiling = {"R": padded, "OPERAND": operand, "num_warps": warps}
    _gram_kernel[(count, slices)](x, partial, *x.stride(), rows, columns, slice_columns, BLOCK=64, STAGES=3, **tiling)
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
        num_warps=warps,
    )
    _apply_kernel[(count, triton.cdiv(columns, _COLUMNS))](
        x, out, parts[0], parts[1], *x.stride(), rows, columns, *out.stride(), BLOCK=_COLUMNS, **tiling
    )
    return out


@torch.library.custom_op(
    "tercet::newton_schulz", mutates_args=(), schema="(Tensor blocks, float[] coefficients) -> Tensor"
)
def _newton_schulz(blocks: Tensor, coefficients: list[float]) -> Tensor:
    steps = tuple(zip(coefficients[::3], coefficients[1::3], coefficients[2::3]))
    x = dense(blocks)
    wide = x if x.shape[1] <= x.shape[2] else x.transpose(1, 2)
    for first in range(0, len(steps), RESTART):
        wide = _segment(wide, steps[first : first + RESTART], normalise=first == 0)
    return (wide if x.shape[1] <= x.shape[2] else wide.transpose(1, 2)).contiguous()


@_newton_schulz.register_fake
def _(blocks: Tensor, coefficients: list[float]) -> Tensor:
    return blocks.new_empty(blocks.shape, dtype=torch.bfloat16)


def declines(blocks: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if dtype != torch.bfloat16:
        return f"the kernels multiply in bf16, and {str(dtype).removeprefix('torch.')} products were asked for"
    return float_refusal(blocks)


def call(blocks: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype) -> Tensor:
    """See `tercet.ops.newton_schulz.newton_schulz`."""
    if min(blocks.shape[1:]) > MAX_ROWS:
        return reference.newton_schulz(blocks, coefficients=coefficients, dtype=dtype)
    return _newton_schulz(blocks, [value for step in coefficients for value in step])
