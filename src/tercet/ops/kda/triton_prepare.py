"""KDA kernel 1, parallel over tiles and heads: everything about a tile that does not depend on the state.

With Γ the running decay inside the tile, ``L₀ = Γk · k/Γ`` below the diagonal and ``A = s Γq · k/Γ`` on and below it,

    INV = β (I + L₀ β)⁻¹      W = INV Γk      B = A INV      Q' = s Γq − B Γk      K̂ = k γ_C / Γ

turn a tile of the delta rule into two lines, which `triton_recurrence` walks:

    [o; u] = [B; INV] V + [Q'; −W] S        S ← γ_C S + K̂ᵀ u

The gate ``g_min σ(e^A (z + bias))``, the L2 norms and ``β = σ(b)`` are evaluated here from the raw projections. L and A
are bf16 products, because Γ and 1/Γ span e^±80; all else is at most 1 in magnitude and stored as fp16, which is three
bits finer than bf16 and what keeps the final state under 1e-3 (a bf16 workspace gives 3e-3 on random inputs).

The backward pass wants the error ``e = (I + L₀ β)⁻¹ (V − Γk S)`` rather than ``u = β e``: dβ is a product with e, and
dividing u by a β near zero is no way to get it. Its workspace therefore holds ``W/β``, written without the division.

Without a floor on the gate (BOUNDED false, softplus) 1/Γ is never formed: L₀ and A come from `triton_gate`, K̂ from the
sum of the gates after each token. The workspace is the same, and so are the kernels that read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import fitted
from tercet.ops.kda.triton_gate import pair_products, softplus_gate
from tercet.ops.kda.triton_math import halves, narrow, sigmoid, sums_where, unit_lower_inverse
from tercet.ops.triton_math import exp2, reciprocal


@triton.jit
def load_rows(pointer, token0, r, channel, head, stride_token, stride_head, inside, OTHER: tl.constexpr):
    """Load ``[C, D]`` rows of one head from *token0* on; rows outside the sequence are OTHER.

    Only the first row's address takes 64-bit arithmetic, once a program.
    """
    rows = pointer + (token0 * stride_token + head * stride_head)
    return tl.load(rows + (r[:, None] * stride_token + channel[None, :]), mask=inside[:, None], other=OTHER)


@triton.jit
def gate_rows(z_CK, A_log, dt_bias, head, channel, floor2, K: tl.constexpr, LOG2E: tl.constexpr):
    """Return ``g log2 e`` of a tile of gate logits, for ``floor2 = g_min log2 e``."""
    slope = -LOG2E * tl.exp(tl.load(A_log + head).to(tl.float32))
    bias_K = tl.load(dt_bias + head * K + channel).to(tl.float32) * slope
    return floor2 * reciprocal(1.0 + exp2(slope * z_CK.to(tl.float32) + bias_K[None, :]))


@fitted
@triton.jit
def prepare_tile(
    q,
    k,
    v,
    z,
    b,
    A_log,
    dt_bias,
    tiles,
    wide,
    k_hat,
    small,
    decay,
    v_max,
    write,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_zt,
    stride_zh,
    stride_bt,
    scale,
    floor2,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    VECTOR: tl.constexpr,
    BOUNDED: tl.constexpr,
    SAVE: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Write the workspace of one (head, tile) and raise the sequence's largest ``|v|``.

    ``wide [X, H, 2, C, K]`` holds Q' and −W, ``small [X, H, 2, C, C]`` B and INV, ``decay [X, H, K]`` γ_C. With SAVE
    the second plane of wide is −W/β, small is ``[X, H, 5, C, C]``: B, INV/β, INV, (I + β L₀)⁻¹, A,
    and ``write [X, H, 3, C]`` holds β and the reciprocal norms of q and k.
    """
    head = tl.program_id(0) % H  # one axis: the second of a grid ends at 65,535
    tile = tl.program_id(0) // H
    token0 = tl.load(tiles + 3 * tile).to(tl.int64)
    count = tl.load(tiles + 3 * tile + 1)
    sequence = tl.load(tiles + 3 * tile + 2)
    r = tl.arange(0, C)
    channel = tl.arange(0, K)
    if VECTOR != 0:  # fewer channels a thread, so that each thread holds whole columns and sums over rows stay local
        channel = tl.max_contiguous(channel, VECTOR)
    row, col = r[:, None], r[None, :]
    inside = r < count
    q_CK = load_rows(q, token0, r, channel, head, stride_qt, stride_qh, inside, 0.0).to(tl.float32)
    k_CK = load_rows(k, token0, r, channel, head, stride_kt, stride_kh, inside, 0.0).to(tl.float32)
    z_CK = load_rows(z, token0, r, channel, head, stride_zt, stride_zh, inside, -1e30)
    b_C = tl.load(b + (token0 * stride_bt + head) + r * stride_bt, mask=inside, other=-1e30).to(tl.float32)
    v_CV = load_rows(v, token0, r, tl.arange(0, V), head, stride_vt, stride_vh, inside, 0.0)
    largest = tl.max(tl.max(tl.abs(v_CV.to(tl.float32)), 1), 0)
    tl.atomic_max(v_max + sequence * H + head, largest.to(tl.int32, bitcast=True), sem="relaxed")

    q_norm_C = tl.rsqrt(tl.sum(q_CK * q_CK, 1) + 1e-6)
    k_norm_C = tl.rsqrt(tl.sum(k_CK * k_CK, 1) + 1e-6)
    q_CK = q_CK * (q_norm_C * scale)[:, None]
    k_CK = k_CK * k_norm_C[:, None]
    beta_C = sigmoid(b_C, LOG2E)
    if BOUNDED:
        G_CK = tl.cumsum(gate_rows(z_CK, A_log, dt_bias, head, channel, floor2, K, LOG2E), 0)
        total_K = exp2(tl.sum(tl.where(row == C - 1, G_CK, 0.0), 0))
        gamma_CK = exp2(G_CK)
        q_gamma = q_CK * gamma_CK
        k_gamma = k_CK * gamma_CK
        k_out = k_CK * exp2(-G_CK)
        right = tl.trans(narrow(k_out))
        L = tl.dot(narrow(k_gamma), right)
        A = tl.where(row >= col, tl.dot(narrow(q_gamma), right), 0.0)
        k_end = k_out * total_K[None, :]
    else:
        slope = tl.exp(tl.load(A_log + head).to(tl.float32))
        bias_K = tl.load(dt_bias + head * K + channel).to(tl.float32)
        g_CK = softplus_gate(z_CK.to(tl.float32) + bias_K[None, :], slope, LOG2E)
        total_K = exp2(tl.sum(g_CK, 0))
        high, low = halves(g_CK)
        gamma_CK = exp2(sums_where(col <= row, high, low))
        q_gamma = q_CK * gamma_CK
        k_gamma = k_CK * gamma_CK
        k_end = k_CK * exp2(sums_where(col > row, high, low))
        L, A = pair_products(q_CK, k_CK, high, low, row, col)
    here = tile.to(tl.int64) * H + head
    tl.store(k_hat + here * (C * K) + row * K + channel[None, :], k_end.to(tl.float16))
    tl.store(decay + here * K + channel, total_K)

    L = tl.where(row > col, L, 0.0)
    inverse = unit_lower_inverse(L * beta_C[None, :], row, col)
    solve = (inverse * beta_C[:, None]).to(tl.float16)
    inverse = inverse.to(tl.float16)
    A = A.to(tl.float16)
    B = tl.dot(A, solve).to(tl.float16)
    k_gamma16 = k_gamma.to(tl.float16)
    matrices: tl.constexpr = 5 if SAVE else 2
    out = small + here * (matrices * C * C) + row * C + col
    tl.store(out, B)
    tl.store(out + C * C, inverse if SAVE else solve)
    if SAVE:  # before the wide products: the compiler spreads all products over warps as the last one wants it
        other_side = tl.where(row == col, 1.0, 0.0) - tl.dot(solve, L.to(tl.float16))
        tl.store(out + 2 * C * C, solve)
        tl.store(out + 3 * C * C, other_side.to(tl.float16))
        tl.store(out + 4 * C * C, A)
        factors = write + here * (3 * C) + r
        tl.store(factors, beta_C)
        tl.store(factors + C, q_norm_C)
        tl.store(factors + 2 * C, k_norm_C)
    out = wide + here * (2 * C * K) + row * K + channel[None, :]
    tl.store(out, (q_gamma - tl.dot(B, k_gamma16)).to(tl.float16))
    tl.store(out + C * K, -tl.dot(inverse if SAVE else solve, k_gamma16).to(tl.float16))
