"""Decays inside a tile: the two gates, and the products over pairs of tokens for a gate without a floor.

The bounded gate lets ``Γ`` and ``1/Γ`` be formed directly (`triton_prepare`). Softplus has no floor, so a pair's decay
``exp(G_r − G_i)`` is formed from the gates between the two alone: the tile is halved, pairs across the cut factor
through it — the decay from the cut down to r times the decay from i up to the cut, both at most 1 — and the halves are
halved again. Sums of gates come from products with 0/1 matrices, so no large sum is ever subtracted from another: exact
where one token forgets everything and its neighbours nothing. Four levels cover 16 tokens. The gate's own gradient is
built the same way, from terms that each contain the gate's decay, so that it vanishes where the decay does.

Shapes: C = 16 tokens, K key width; *row* ``[C, 1]`` and *col* ``[1, C]`` are token numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.kda.triton_math import narrow, sums_where, wide_sums_where
from tercet.ops.triton_math import exp2


@triton.jit
def softplus_gate(biased_CK, slope, LOG2E: tl.constexpr):
    """Return ``g log2 e = −slope softplus(z + bias) log2 e``, but −160 where it is less: the decay is zero either way.

    ``log2(1 + x)`` keeps its digits for small x (x / ((1 + x) − 1) undoes the rounding of the sum): a gate near zero is
    all that a memory of many thousand tokens has. NaN passes.
    """
    x = exp2(-LOG2E * tl.abs(biased_CK))
    rounded = 1.0 + x
    some = rounded > 1.0
    tail = tl.where(some, tl.log2(rounded) * (x / tl.where(some, rounded - 1.0, 1.0)), LOG2E * x)
    g_CK = -slope * (tl.maximum(biased_CK, 0.0) * LOG2E + tail)
    return tl.where(g_CK < -160.0, -160.0, g_CK)


@triton.jit
def level_pairs(row, col, HALF: tl.constexpr):
    """Pairs (row, col) that meet across the cut of a block of 2·HALF, row in its second half."""
    return (row // (2 * HALF) == col // (2 * HALF)) & (row // HALF > col // HALF)


@triton.jit
def level_sides(row, col, HALF: tl.constexpr):
    """For each row the cols between it and its block's cut: up to itself after the cut, beyond itself before it."""
    second = row // HALF % 2
    return (row // HALF == col // HALF) & (((second == 1) & (col <= row)) | ((second == 0) & (col > row)))


@triton.jit
def _level_forward(L, A, q_CK, k_CK, high, low, row, col, HALF: tl.constexpr):
    decay_CK = exp2(sums_where(level_sides(row, col, HALF), high, low))
    k16 = (k_CK * decay_CK).to(tl.float16)
    right = tl.trans(k16)
    here = level_pairs(row, col, HALF)
    L += tl.where(here, tl.dot(k16, right), 0.0)
    A += tl.where(here, tl.dot((q_CK * decay_CK).to(tl.float16), right), 0.0)
    return L, A


@triton.jit
def pair_products(q_CK, k_CK, high, low, row, col):
    """Return ``Σ_c k_r k_i exp(G_r − G_i)`` below the diagonal and the same of q and k on and below it.

    *high* and *low* are the fp16 halves of the gates. All operands are at most 1, as are all sums for unit keys.
    """
    L = tl.zeros([16, 16], tl.float32)
    A = tl.where(row == col, tl.sum(q_CK * k_CK, 1)[:, None], 0.0)
    L, A = _level_forward(L, A, q_CK, k_CK, high, low, row, col, 1)
    L, A = _level_forward(L, A, q_CK, k_CK, high, low, row, col, 2)
    L, A = _level_forward(L, A, q_CK, k_CK, high, low, row, col, 4)
    return _level_forward(L, A, q_CK, k_CK, high, low, row, col, 8)


@triton.jit
def _level_backward(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col, HALF: tl.constexpr):
    decay_CK = exp2(sums_where(level_sides(row, col, HALF), high, low))
    here = level_pairs(row, col, HALF)
    E_dot = narrow(tl.where(here, E_CC, 0.0))
    F_dot = narrow(tl.where(here, F_CC, 0.0))
    k_dot = narrow(k_CK * decay_CK)
    d_k_level = tl.dot(E_dot, k_dot, tl.dot(tl.trans(E_dot), k_dot))
    d_k_level = decay_CK * tl.dot(tl.trans(F_dot), narrow(q_CK * decay_CK), d_k_level)
    d_q_level = decay_CK * tl.dot(F_dot, k_dot)
    within = level_sides(col, row, HALF)  # row's gate lies between col and the cut
    d_g += wide_sums_where(within, k_CK * d_k_level + q_CK * d_q_level)
    return d_q + d_q_level, d_k + d_k_level, d_g


@triton.jit
def pair_gradients(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col):
    """Add the gradients of `pair_products` to those of q, k and g, for gradients E of L and F of A (both fp32)."""
    diagonal = tl.sum(tl.where(row == col, F_CC, 0.0), 1)[:, None]
    d_q += diagonal * k_CK
    d_k += diagonal * q_CK
    d_q, d_k, d_g = _level_backward(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col, 1)
    d_q, d_k, d_g = _level_backward(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col, 2)
    d_q, d_k, d_g = _level_backward(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col, 4)
    return _level_backward(d_q, d_k, d_g, q_CK, k_CK, E_CC, F_CC, high, low, row, col, 8)
