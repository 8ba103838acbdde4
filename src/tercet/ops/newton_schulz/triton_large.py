"""Newton–Schulz of blocks with many rows: three products a step, two of them of symmetric results.

    A = X Xᵀ;   B = bA + cA²;   X ← aX + B X

A and B are symmetric, so only tiles on and below the diagonal are computed and stored twice. ``A² = A Aᵀ``, so one
kernel makes both. The scaled summand is added where the product leaves registers: no copy of it is made beforehand, as
``baddbmm`` makes. Operands are bf16 and sums fp32, as in the plain loop.

Shapes: N blocks, R rows, C columns with R ≤ C; tiles of BLOCK rows and columns, DEPTH deep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.ops.gpu import fitted, operand_type

_GROUP = 8
"""Row tiles taken together, so that a large block's column tiles are met again in the L2 cache."""
_ROW = 1024
"""Values of a row that one program normalises."""
_SYMMETRIC = {"BLOCK": 128, "DEPTH": 64, "num_stages": 3, "num_warps": 4}
_PRODUCT = {"BLOCK": 128, "COLUMNS": 128, "DEPTH": 64, "num_stages": 3, "num_warps": 4}
_WIDE_PRODUCT = {"BLOCK": 128, "COLUMNS": 256, "DEPTH": 64, "num_stages": 3, "num_warps": 8}
_WIDE_FROM = 2048
"""Columns from which the wider tile is faster on an H200."""


@triton.jit
def _normalise_kernel(x, norm, out, row_stride, column_stride, block_stride, rows, columns, BLOCK: tl.constexpr):
    """``out = x / (norm + 1e-7)`` of one row of one block, divided in fp32 and rounded once."""
    n, row = (tl.program_id(0) // rows).to(tl.int64), (tl.program_id(0) % rows).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + n * block_stride + row * row_stride + column * column_stride, mask=inside, other=0.0)
    value = value.to(tl.float32) / (tl.load(norm + n) + 1e-7)
    tl.store(out + (n * rows + row) * columns + column, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _place(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return a program's row and column tile."""
    group = program // (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * column_tiles)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _load(x, n, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr):
    """Tile ``[ROWS, COLUMNS]`` of block *n*; zeros beyond its edges."""
    return x.load([n, row, column]).reshape(ROWS, COLUMNS).to(OPERAND)


@fitted
@triton.jit
def _symmetric_kernel(
    x,
    summand,
    out,
    tiles,
    columns,
    alpha,
    beta,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``alpha x xᵀ (+ beta summand)``."""
    n = tl.program_id(1)
    i, j = _place(tl.program_id(0), tiles, tiles, GROUP)
    if j > i:
        return
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, columns, DEPTH):
        left = _load(x, n, i * BLOCK, k, BLOCK, DEPTH, OPERAND)
        right = _load(x, n, j * BLOCK, k, BLOCK, DEPTH, OPERAND)
        total = tl.dot(left, right.T, total)
    total *= alpha
    if ADD:
        total += beta * _load(summand, n, i * BLOCK, j * BLOCK, BLOCK, BLOCK, tl.float32)
    tile = total.to(tl.bfloat16)
    out.store([n, i * BLOCK, j * BLOCK], tile.reshape(1, BLOCK, BLOCK))
    if i != j:
        out.store([n, j * BLOCK, i * BLOCK], tile.T.reshape(1, BLOCK, BLOCK))


@fitted
@triton.jit
def _product_kernel(
    b,
    x,
    summand,
    out,
    row_tiles,
    column_tiles,
    rows,
    beta,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``b x + beta summand``."""
    n = tl.program_id(1)
    i, j = _place(tl.program_id(0), row_tiles, column_tiles, GROUP)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for k in range(0, rows, DEPTH):
        left = _load(b, n, i * BLOCK, k, BLOCK, DEPTH, OPERAND)
        right = _load(x, n, k, j * COLUMNS, DEPTH, COLUMNS, OPERAND)
        total = tl.dot(left, right, total)
    total += beta * _load(summand, n, i * BLOCK, j * COLUMNS, BLOCK, COLUMNS, tl.float32)
    out.store([n, i * BLOCK, j * COLUMNS], total.to(tl.bfloat16).reshape(1, BLOCK, COLUMNS))


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [1, rows, columns])


def _symmetric(x: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Write ``alpha x xᵀ + beta x``; beta needs square blocks."""
    block, tile = _SYMMETRIC["BLOCK"], {"GROUP": _GROUP, "OPERAND": operand_type(torch.bfloat16), **_SYMMETRIC}
    count, rows, columns = x.shape
    tiles = triton.cdiv(rows, block)
    square, wide = _tiles(x, block, block), _tiles(x, block, _SYMMETRIC["DEPTH"])
    _symmetric_kernel[(tiles * tiles, count)](
        wide, square, _tiles(out, block, block), tiles, columns, alpha, beta, ADD=beta != 0.0, **tile
    )


def _product(b: Tensor, x: Tensor, out: Tensor, *, beta: float) -> None:
    """Write ``b x + beta x``."""
    count, rows, columns = x.shape
    chosen = _WIDE_PRODUCT if columns >= _WIDE_FROM else _PRODUCT
    tile = {"GROUP": _GROUP, "OPERAND": operand_type(torch.bfloat16), **chosen}
    block, wide, depth = chosen["BLOCK"], chosen["COLUMNS"], chosen["DEPTH"]
    row_tiles, column_tiles = triton.cdiv(rows, block), triton.cdiv(columns, wide)
    _product_kernel[(row_tiles * column_tiles, count)](
        _tiles(b, block, depth),
        _tiles(x, depth, wide),
        _tiles(x, block, wide),
        _tiles(out, block, wide),
        row_tiles,
        column_tiles,
        rows,
        beta,
        **tile,
    )


def fits(blocks: Tensor) -> bool:
    """Whether the copy engine can address *blocks*: rows that start at multiples of 16 bytes in bf16."""
    return blocks.shape[1] % 8 == 0 and blocks.shape[2] % 8 == 0


def iterate(blocks: Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> Tensor:
    """Run all steps on blocks ``[N, R, C]``, R ≤ C, of any float type and strides; the result is bf16."""
    norm = torch.linalg.vector_norm(blocks, dim=(1, 2), dtype=torch.float32)
    x = torch.empty(blocks.shape, dtype=torch.bfloat16, device=blocks.device)
    count, rows, columns = x.shape
    strides = blocks.stride(1), blocks.stride(2), blocks.stride(0)
    _normalise_kernel[(count * rows, triton.cdiv(columns, _ROW))](blocks, norm, x, *strides, rows, columns, BLOCK=_ROW)
    gram, polynomial, other = x.new_empty(count, rows, rows), x.new_empty(count, rows, rows), torch.empty_like(x)
    for a, b, c in coefficients:
        _symmetric(x, gram)
        _symmetric(gram, polynomial, alpha=c, beta=b)
        _product(polynomial, x, other, beta=a)
        x, other = other, x
    return x
