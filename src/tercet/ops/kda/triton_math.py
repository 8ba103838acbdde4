"""Small device functions shared by the KDA kernels: splits and sums in 16-bit parts, powers of two, an inverse."""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import INTERPRETED
from tercet.ops.triton_math import exp2, reciprocal

LOG2E = 1.4426950408889634
TILE = 16
"""Tokens a tile: with every gate ≥ −5 both ``Γ`` and ``1/Γ`` stay inside the exponent range of bf16 (e^±80)."""

if INTERPRETED:

    @triton.jit
    def narrow(x):
        """Round to the nearest bf16, kept in fp32: the interpreter's own cast truncates and its `tl.dot` lacks bf16."""
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)

else:

    @triton.jit
    def narrow(x):
        """Round to bf16 as an operand of `tl.dot`."""
        return x.to(tl.bfloat16)


@triton.jit
def rounded(x):
    """Round to the nearest bf16 but stay in fp32: a pair of conversions takes several times as long."""
    return ((x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x, LOG2E: tl.constexpr):
    """σ(x) in fp32; exact 0 and 1 in the limits."""
    return reciprocal(1.0 + exp2(-LOG2E * x))


@triton.jit
def exponent(magnitude):
    """Exponent field of *magnitude* ≥ 0, kept within 2^±63, so that both it and its reciprocal are normal numbers."""
    field = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(field, 64 << 23), 190 << 23)


@triton.jit
def power(field):
    """2^e for an exponent field."""
    return field.to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(field):
    """2^−e for an exponent field."""
    return ((254 << 23) - field).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Split fp32 into two fp16 whose sum carries 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(a_high, a_low, b_high, b_low):
    """Fp32-accurate product of split matrices; the two halves of ≤ 1e-7 in a_low b_low are left out."""
    return tl.dot(a_high, b_low, tl.dot(a_low, b_high, tl.dot(a_high, b_high)))


@triton.jit
def _join_blocks(X, L_high, L_low, row, col, SIZE: tl.constexpr):
    """From inverses of diagonal blocks of SIZE to those of 2·SIZE: the new corner is −X₂ L₂₁ X₁, a part of −X L X."""
    corner = (row // (2 * SIZE) == col // (2 * SIZE)) & (row // SIZE > col // SIZE)
    X_high, X_low = halves(X)
    inner_high, inner_low = halves(_product(X_high, X_low, L_high, L_low))
    return X - tl.where(corner, _product(inner_high, inner_low, X_high, X_low), 0.0)


@triton.jit
def unit_lower_inverse(L, row, col):
    """``(I + L)⁻¹`` of a strictly lower 16×16 matrix by block forward substitution, accurate to 1e-6.

    For unit keys every intermediate is a block of the inverse or of a product of two (entries at most 1 and 16), so
    nothing can overflow or cancel. The shorter doubling product ``(I−L)(I+L²)(I+L⁴)(I+L⁸)`` has neither property:
    with identical keys |L⁸| passes 3000.
    """
    L_high, L_low = halves(L)
    X = tl.where(row == col, 1.0, 0.0) - tl.where((row // 2 == col // 2) & (row > col), L, 0.0)
    X = _join_blocks(X, L_high, L_low, row, col, 2)
    X = _join_blocks(X, L_high, L_low, row, col, 4)
    X = _join_blocks(X, L_high, L_low, row, col, 8)
    return X


@triton.jit
def sums_where(mask, high, low):
    """Sums over the rows that *mask* ``[16, 16]`` selects for each row, of a block in fp16 `halves`."""
    ones = tl.where(mask, 1.0, 0.0).to(tl.float16)
    return tl.dot(ones, low, tl.dot(ones, high))


@triton.jit
def sums_down(x, row, col):
    """Prefix sums over the 16 rows of a block with |x| below 6e4, as a product with a triangle of ones (22 bits)."""
    high, low = halves(x)
    return sums_where(row >= col, high, low)


@triton.jit
def wide_sums_where(mask, x):
    """Do as `sums_where` for a block of any range (16 bits, in two bf16 halves)."""
    high = rounded(x)
    ones = narrow(tl.where(mask, 1.0, 0.0))
    return tl.dot(ones, narrow(x - high), tl.dot(ones, narrow(high)))


@triton.jit
def sums_up(x, row, col):
    """Suffix sums over the 16 rows of a block of any range."""
    return wide_sums_where(row <= col, x)
