"""Backward kernels of MLA attention: one pass over key tiles for dq, one over query tiles for dk, dv and the shared dk.

    P = 2^(factor · s − L)     dV = Pᵀ dO     dS = P ⊙ (dO Vᵀ − δ)     δ = Σ_V dO ⊙ O
    dQ = scale · dS K          dK = scale · dSᵀ Q

Two passes compute S and dO Vᵀ twice and need no atomic: every sum has a fixed order. The second pass works on
transposed tiles (keys × queries), so that P and dS go from registers into their products. The keys' part that all heads
share gets one gradient a head in fp32; the caller sums them. L is the log-sum-exp in base 2. Shapes as in
`triton_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.attention.triton_forward import fetch, locate, logits
from tercet.ops.gpu import PTX, fitted

_SETTLES = tl.constexpr(PTX)


@triton.jit(do_not_specialize=["H", "SLOTS"])
def delta_kernel(o, grad, narrow, delta, tiles, H, SLOTS, M: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr):
    """Write ``δ`` [H, SLOTS] and *grad* in the products' type, for M queries of one head."""
    start, length, slot, head, tile, _ = locate(tiles, H)
    for m0 in range(tile * M, tl.minimum(tile * M + M, length), ROWS):
        row = m0 + tl.arange(0, ROWS)
        inside = (row < length)[:, None]
        address = ((start + row).to(tl.int64) * H + head)[:, None] * V + tl.arange(0, V)[None, :]
        grad_RV = tl.load(grad + address, mask=inside, other=0.0)
        o_RV = tl.load(o + address, mask=inside, other=0.0)
        tl.store(narrow + address, grad_RV.to(narrow.dtype.element_ty), mask=inside)
        tl.store(delta + head * SLOTS + slot + row, tl.sum(grad_RV * o_RV, 1), mask=row < length)


@triton.jit
def _query_step(
    dq_MD,
    dq_MR,
    q_MD,
    q_MR,
    grad_MV,
    lse_M,
    delta_M,
    row_M,
    kv,
    pe,
    k_tile,
    v_tile,
    pe_tile,
    start,
    length,
    n0,
    column,
    kv_stride,
    pe_stride,
    factor,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one key tile's part of dq, still without the scale."""
    k_ND = fetch(kv, k_tile, start + n0, column, kv_stride, length - n0, N, D, MASKED, BULK)
    if R > 0:
        k_NR = fetch(pe, pe_tile, start + n0, 0, pe_stride, length - n0, N, R, MASKED, BULK)
    else:
        k_NR = k_ND
    v_NV = fetch(kv, v_tile, start + n0, column + D, kv_stride, length - n0, N, V, MASKED, BULK)
    s_MN = tl.zeros([q_MD.shape[0], N], tl.float32)
    s_MN = logits(s_MN, q_MD, q_MR, k_ND, k_NR, OPERAND, R, PRECISION)
    dp_MN = tl.dot(grad_MV.to(OPERAND), tl.trans(v_NV.to(OPERAND)), input_precision=PRECISION)
    if MASKED:
        s_MN = tl.where((n0 + tl.arange(0, N))[None, :] <= row_M[:, None], s_MN, float("-inf"))
    p_MN = tl.exp2(s_MN * factor - lse_M[:, None])
    ds_MN = (p_MN * (dp_MN - delta_M[:, None])).to(OPERAND)
    dq_MD = tl.dot(ds_MN, k_ND.to(OPERAND), dq_MD, input_precision=PRECISION)
    if R > 0:
        dq_MR = tl.dot(ds_MN, k_NR.to(OPERAND), dq_MR, input_precision=PRECISION)
    return dq_MD, dq_MR


@fitted
@triton.jit(do_not_specialize=["H", "SLOTS"])
def query_kernel(
    q,
    kv,
    pe,
    grad,
    k_tile,
    v_tile,
    pe_tile,
    lse,
    delta,
    d_q,
    tiles,
    H,
    SLOTS,
    pe_stride,
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
):
    """Write dq [T, H, D + R] for M queries of one head."""
    start, length, slot, head, tile, count = locate(tiles, H)
    m0 = (count - 1 - tile) * M
    left = length - m0
    factor = scale * 1.4426950408889634
    at_M = tl.arange(0, M)
    row_M = m0 + at_M
    q_stride, kv_stride, column = H * (D + R), H * (D + V), head * (D + V)
    q_MD = fetch(q, q, start + m0, head * (D + R), q_stride, left, M, D, True, False)
    if R > 0:
        q_MR = fetch(q, q, start + m0, head * (D + R) + D, q_stride, left, M, R, True, False)
    else:
        q_MR = q_MD
    grad_MV = fetch(grad, grad, start + m0, head * V, H * V, left, M, V, True, False)
    at = head * SLOTS + slot + row_M
    lse_M = tl.load(lse + at, mask=at_M < left, other=float("inf"))
    delta_M = tl.load(delta + at, mask=at_M < left, other=0.0)
    dq_MD = tl.zeros([M, D], tl.float32)
    dq_MR = tl.zeros([M, R if R > 0 else D], tl.float32)
    past = m0 // N * N
    for n0 in tl.range(0, past, N):
        dq_MD, dq_MR = _query_step(
            dq_MD, dq_MR, q_MD, q_MR, grad_MV, lse_M, delta_M, row_M, kv, pe, k_tile, v_tile, pe_tile, start, length,
            n0, column, kv_stride, pe_stride, factor, N, D, R, V, OPERAND, PRECISION, BULK, False,
        )  # fmt: skip
    for n0 in tl.range(past, tl.minimum(m0 + M, length), N, num_stages=1):
        dq_MD, dq_MR = _query_step(
            dq_MD, dq_MR, q_MD, q_MR, grad_MV, lse_M, delta_M, row_M, kv, pe, k_tile, v_tile, pe_tile, start, length,
            n0, column, kv_stride, pe_stride, factor, N, D, R, V, OPERAND, PRECISION, BULK, True,
        )  # fmt: skip
    element = d_q.dtype.element_ty
    target = d_q + (start + m0).to(tl.int64) * q_stride + head * (D + R) + at_M[:, None] * q_stride
    tl.store(target + tl.arange(0, D)[None, :], (dq_MD * scale).to(element), mask=(at_M < left)[:, None])
    if R > 0:
        tl.store(target + (D + tl.arange(0, R))[None, :], (dq_MR * scale).to(element), mask=(at_M < left)[:, None])


@triton.jit
def _settle(x):
    """Return *x*, a product's result that has to be complete here.

    Left in flight across iterations, three accumulators make ptxas wait after every single tensor-core instruction.
    """
    return tl.inline_asm_elementwise("// settled $0", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _key_step(
    dk_ND,
    dk_NR,
    dv_NV,
    k_ND,
    k_NR,
    v_NV,
    key_N,
    q,
    grad,
    q_tile,
    qr_tile,
    grad_tile,
    lse,
    delta,
    lse_tile,
    delta_tile,
    row,
    start,
    length,
    m0,
    head,
    H,
    factor,
    M: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one query tile's part of dk (without the scale) and dv."""
    left = length - m0
    q_stride, q_column = H * (D + R), head * (D + R)
    q_MD = fetch(q, q_tile, start + m0, q_column, q_stride, left, M, D, MASKED, BULK)
    if R > 0:
        q_MR = fetch(q, qr_tile, start + m0, q_column + D, q_stride, left, M, R, MASKED, BULK)
    else:
        q_MR = q_MD
    grad_MV = fetch(grad, grad_tile, start + m0, head * V, H * V, left, M, V, MASKED, BULK)
    at_M = tl.arange(0, M)
    if BULK and not MASKED:
        lse_M, delta_M = lse_tile.load([row + m0]), delta_tile.load([row + m0])
    else:
        lse_M = tl.load(lse + row + m0 + at_M, mask=at_M < left, other=float("inf"))
        delta_M = tl.load(delta + row + m0 + at_M, mask=at_M < left, other=0.0)
    # A row that is not there has an infinite lse, and so no weight.
    s_NM = tl.zeros([k_ND.shape[0], M], tl.float32)
    s_NM = logits(s_NM, k_ND, k_NR, q_MD, q_MR, OPERAND, R, PRECISION)
    dp_NM = tl.zeros([k_ND.shape[0], M], tl.float32)
    dp_NM = tl.dot(v_NV.to(OPERAND), tl.trans(grad_MV.to(OPERAND)), dp_NM, input_precision=PRECISION)
    if MASKED:
        s_NM = tl.where(key_N[:, None] <= (m0 + at_M)[None, :], s_NM, float("-inf"))
    p_NM = tl.exp2(s_NM * factor - lse_M[None, :])
    ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(OPERAND)
    dv_NV = tl.dot(p_NM.to(OPERAND), grad_MV.to(OPERAND), dv_NV, input_precision=PRECISION)
    dk_ND = tl.dot(ds_NM, q_MD.to(OPERAND), dk_ND, input_precision=PRECISION)
    if R > 0:
        dk_NR = tl.dot(ds_NM, q_MR.to(OPERAND), dk_NR, input_precision=PRECISION)
    if _SETTLES:
        dv_NV, dk_ND, dk_NR = _settle(dv_NV), _settle(dk_ND), _settle(dk_NR)
    return dk_ND, dk_NR, dv_NV


@fitted
@triton.jit(do_not_specialize=["T", "H", "SLOTS"])
def key_kernel(
    q,
    kv,
    pe,
    grad,
    q_tile,
    qr_tile,
    grad_tile,
    lse,
    delta,
    lse_tile,
    delta_tile,
    d_kv,
    d_pe,
    tiles,
    T,
    H,
    SLOTS,
    pe_stride,
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of N keys and values of one head: d_kv [T, H, D + V] and this head's d_pe [H, T, R]."""
    start, length, slot, head, tile, _ = locate(tiles, H)
    n0 = tile * N  # the keys that most queries see come first
    left = length - n0
    factor = scale * 1.4426950408889634
    at_N = tl.arange(0, N)
    key_N = n0 + at_N
    kv_stride, column = H * (D + V), head * (D + V)
    k_ND = fetch(kv, kv, start + n0, column, kv_stride, left, N, D, True, False)
    if R > 0:
        k_NR = fetch(pe, pe, start + n0, 0, pe_stride, left, N, R, True, False)
    else:
        k_NR = k_ND
    v_NV = fetch(kv, kv, start + n0, column + D, kv_stride, left, N, V, True, False)
    dk_ND = tl.zeros([N, D], tl.float32)
    dk_NR = tl.zeros([N, R if R > 0 else D], tl.float32)
    dv_NV = tl.zeros([N, V], tl.float32)
    row = head * SLOTS + slot
    # Masked: query tiles on the diagonal, and the sequence's last one where it is cut short.
    first, clear, whole = n0 // M * M, tl.cdiv(n0 + N, M) * M, length // M * M
    diagonal = (tl.minimum(clear, tl.cdiv(length, M) * M) - first) // M
    cut = diagonal + ((whole >= clear) & (whole < length)).to(tl.int32)
    for n in tl.range(0, cut, num_stages=1):
        m0 = tl.where(n < diagonal, first + n * M, whole)
        dk_ND, dk_NR, dv_NV = _key_step(
            dk_ND, dk_NR, dv_NV, k_ND, k_NR, v_NV, key_N, q, grad, q_tile, qr_tile, grad_tile,
            lse, delta, lse_tile, delta_tile, row, start, length, m0, head, H, factor,
            M, D, R, V, OPERAND, PRECISION, BULK, True,
        )  # fmt: skip
    for m0 in tl.range(clear, whole, M, num_stages=STAGES):
        dk_ND, dk_NR, dv_NV = _key_step(
            dk_ND, dk_NR, dv_NV, k_ND, k_NR, v_NV, key_N, q, grad, q_tile, qr_tile, grad_tile,
            lse, delta, lse_tile, delta_tile, row, start, length, m0, head, H, factor,
            M, D, R, V, OPERAND, PRECISION, BULK, False,
        )  # fmt: skip
    element = d_kv.dtype.element_ty
    target = d_kv + (start + n0).to(tl.int64) * kv_stride + column + at_N[:, None] * kv_stride
    mask = (at_N < left)[:, None]
    tl.store(target + tl.arange(0, D)[None, :], (dk_ND * scale).to(element), mask=mask)
    tl.store(target + (D + tl.arange(0, V))[None, :], dv_NV.to(element), mask=mask)
    if R > 0:
        target = d_pe + (head.to(tl.int64) * T + start + n0) * R
        tl.store(target + at_N[:, None] * R + tl.arange(0, R)[None, :], dk_NR * scale, mask=mask)


@triton.jit(do_not_specialize=["H"])
def head_sum(d_pe, out, H, count, SIZE: tl.constexpr):
    """Write the sum of *count* values over H heads, in their order, and round it once."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    source = d_pe + at
    total = tl.zeros([SIZE], tl.float32)
    for _ in range(H):
        total += tl.load(source, mask=at < count, other=0.0)
        source += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
