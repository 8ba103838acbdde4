"""Kernels around the Hopper key pass of MLA attention: what it reads, and the two products of the dSᵀ that it stores.

    δ = Σ_V dO ⊙ O        dQ = scale · dS K        dK = scale · dSᵀ Q

dSᵀ is a list of 128 × 128 blocks, keys by queries, one for every pair of a query tile and a key tile not behind it. The
blocks of a query tile are neighbours, and so one tall matrix: block i (i + 1) / 2 + j of a sequence and head belongs to
query tile i and key tile j. Shapes as in `triton_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.attention.triton_forward import fetch, locate

BLOCK = 128
"""Edge of a block of dSᵀ: queries and keys of a tile."""


@triton.jit
def pairs_before(tiles, HEADS, head, count):
    """Return how many blocks of dSᵀ lie in front of those of this program's sequence and head."""
    before = tl.load(tiles + (tl.program_id(0) // HEADS) * 6 + 5)
    return HEADS * before + head * (count * (count + 1) // 2)


@triton.jit
def shuffled(at):
    """Return which query stands at place *at*: within 32, 8 j + 2 i + k at 8 i + 2 j + k; its own inverse."""
    return at // 32 * 32 + at % 8 // 2 * 8 + at % 32 // 8 * 2 + at % 2


@triton.jit(do_not_specialize=["FIRST", "HEADS", "H", "SLOTS"])
def prepare_kernel(
    o, grad, q, lse, q_out, grad_out, lse_out, delta_out, tiles, FIRST, HEADS, H, SLOTS,
    M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Copy queries [HEADS, SLOTS, D + R], dO [HEADS, SLOTS, V] and lse [HEADS, SLOTS], and write δ, in shuffled order.

    Sequences are filled up to a multiple of 64 with rows that weigh nothing: zeros, and an infinite lse.
    """
    start, length, slot, head, tile, _ = locate(tiles, HEADS)
    at = tl.arange(0, 32)
    for m0 in range(tile * M, tl.minimum(tile * M + M, tl.cdiv(length, 64) * 64), 32):
        row = m0 + shuffled(at)
        inside = (row < length)[:, None]
        source = ((start + row).to(tl.int64) * H + FIRST + head)[:, None]
        place = head.to(tl.int64) * SLOTS + slot + m0 + at
        column_V = tl.arange(0, V)[None, :]
        grad_RV = tl.load(grad + source * V + column_V, mask=inside, other=0.0)
        o_RV = tl.load(o + source * V + column_V, mask=inside, other=0.0)
        tl.store(grad_out + place[:, None] * V + column_V, grad_RV.to(grad_out.dtype.element_ty))
        tl.store(delta_out + place, tl.sum(grad_RV * o_RV, 1))
        lse_R = tl.load(lse + (FIRST + head) * SLOTS + slot + row, mask=row < length, other=float("inf"))
        tl.store(lse_out + place, lse_R)
        column_D, column_R = tl.arange(0, D)[None, :], D + tl.arange(0, R)[None, :]
        q_RD = tl.load(q + source * (D + R) + column_D, mask=inside, other=0.0)
        q_RR = tl.load(q + source * (D + R) + column_R, mask=inside, other=0.0)
        tl.store(q_out + place[:, None] * (D + R) + column_D, q_RD)
        tl.store(q_out + place[:, None] * (D + R) + column_R, q_RR)


@triton.jit
def _query_step(
    dq_MD, dq_MR, kv, pe, ds_tile, k_tile, kr_tile, row, token, column, left, kv_stride, pe_stride,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add N keys' part of dq."""
    ds_NM = ds_tile.load([row, 0])
    k_ND = fetch(kv, k_tile, token, column, kv_stride, left, N, D, MASKED, True)
    k_NR = fetch(pe, kr_tile, token, 0, pe_stride, left, N, R, MASKED, True)
    return tl.dot(tl.trans(ds_NM), k_ND, dq_MD), tl.dot(tl.trans(ds_NM), k_NR, dq_MR)


@triton.jit(do_not_specialize=["FIRST", "HEADS", "H"])
def query_product(
    kv, pe, ds_tile, k_tile, kr_tile, d_q, tiles, FIRST, HEADS, H, pe_stride, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write dq [T, H, D + R] of M = 128 queries of one head, N keys at a time."""
    start, length, _, head, tile, count = locate(tiles, HEADS)
    i = count - 1 - tile  # the longest rows first
    row = (pairs_before(tiles, HEADS, head, count) + i * (i + 1) // 2) * M
    head += FIRST
    m0 = i * M
    kv_stride, column = H * (D + V), head * (D + V)
    dq_MD = tl.zeros([M, D], tl.float32)
    dq_MR = tl.zeros([M, R], tl.float32)
    end = tl.minimum(m0 + M, length)
    whole = end // N * N
    for n0 in tl.range(0, whole, N):
        dq_MD, dq_MR = _query_step(
            dq_MD, dq_MR, kv, pe, ds_tile, k_tile, kr_tile, row + n0, start + n0, column, length - n0, kv_stride,
            pe_stride, N, D, R, False,
        )  # fmt: skip
    if whole < end:
        dq_MD, dq_MR = _query_step(
            dq_MD, dq_MR, kv, pe, ds_tile, k_tile, kr_tile, row + whole, start + whole, column, length - whole,
            kv_stride, pe_stride, N, D, R, True,
        )  # fmt: skip
    at_M = tl.arange(0, M)[:, None]
    inside = at_M < length - m0
    target = d_q + ((start + m0).to(tl.int64) * H + head) * (D + R) + at_M * (H * (D + R))
    element = d_q.dtype.element_ty
    tl.store(target + tl.arange(0, D)[None, :], (dq_MD * scale).to(element), mask=inside)
    tl.store(target + D + tl.arange(0, R)[None, :], (dq_MR * scale).to(element), mask=inside)


@triton.jit
def _key_step(
    dk_ND, dk_NR, q, ds_tile, q_tile, qr_tile, block, m0, token, column, left, q_stride,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add M queries' part of dk."""
    i = m0 // N
    ds_NM = ds_tile.load([(block + i * (i + 1) // 2) * N, m0 % N])
    q_MD = fetch(q, q_tile, token, column, q_stride, left, M, D, MASKED, True)
    q_MR = fetch(q, qr_tile, token, column + D, q_stride, left, M, R, MASKED, True)
    return tl.dot(ds_NM, q_MD, dk_ND), tl.dot(ds_NM, q_MR, dk_NR)


@triton.jit(do_not_specialize=["FIRST", "HEADS", "H", "T"])
def key_product(
    q, ds_tile, q_tile, qr_tile, d_kv, d_pe, tiles, FIRST, HEADS, H, T, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write dk into d_kv [T, H, D + V] and this head's d_pe [H, T, R], of N = 128 keys, M queries at a time."""
    start, length, _, head, tile, count = locate(tiles, HEADS)
    block = pairs_before(tiles, HEADS, head, count) + tile
    head += FIRST
    n0 = tile * N
    q_stride, column = H * (D + R), head * (D + R)
    dk_ND = tl.zeros([N, D], tl.float32)
    dk_NR = tl.zeros([N, R], tl.float32)
    whole = length // M * M
    for m0 in tl.range(n0, whole, M):
        dk_ND, dk_NR = _key_step(
            dk_ND, dk_NR, q, ds_tile, q_tile, qr_tile, block, m0, start + m0, column, length - m0, q_stride,
            M, N, D, R, False,
        )  # fmt: skip
    if whole < length:
        dk_ND, dk_NR = _key_step(
            dk_ND, dk_NR, q, ds_tile, q_tile, qr_tile, block, whole, start + whole, column, length - whole, q_stride,
            M, N, D, R, True,
        )  # fmt: skip
    at_N = tl.arange(0, N)[:, None]
    inside = at_N < length - n0
    target = d_kv + ((start + n0).to(tl.int64) * H + head) * (D + V) + at_N * (H * (D + V))
    tl.store(target + tl.arange(0, D)[None, :], (dk_ND * scale).to(d_kv.dtype.element_ty), mask=inside)
    target = d_pe + (head.to(tl.int64) * T + start + n0) * R + at_N * R
    tl.store(target + tl.arange(0, R)[None, :], dk_NR * scale, mask=inside)
