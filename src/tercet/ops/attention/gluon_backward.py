"""Backward key pass of MLA attention for Hopper, in Gluon: dV, and dS for the two products that give dQ and dK.

Formulas are those of `triton_backward`, whose two passes are the check and run everywhere else. Here logits and dO Vᵀ
are formed once: this kernel stores dSᵀ in the 16 bits in which it would enter the products of `triton_products`.

A program owns 128 keys of one head. One group of four warps starts bulk copies of 64 queries at a time into three
stages of shared memory; two groups own 64 keys each, never wait for one another, and keep P, dS and dV in registers.
A thread holds, of each key and of every 32 queries, those numbered 8 i + 2 j + k for its own j. `prepare_kernel` lets
them be queries 8 j + 2 i + k, eight neighbours, and so dS leaves in whole 16-byte pieces without a detour.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.ops.attention.gluon_forward import copy_rows, finish_rows
from tercet.ops.attention.triton_forward import locate
from tercet.ops.attention.triton_products import pairs_before, shuffled


@gluon.constexpr_function
def _stored(queries):
    """Return how a warp group's threads hold ``[64, queries]`` of dS, queries in their own order."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 * 2**n] for n in range(queries.bit_length() - 6))]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, queries])


@gluon.jit
def _copy_keys(
    kv, pe, k_tile, kr_tile, v_tile, token, column, left, kv_stride, pe_stride, keys, full,
    N: gl.constexpr, D: gl.constexpr, R: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Bring the program's keys and values, zeros behind the sequence's end: there may be NaN."""
    k_s, kr_s, v_s = keys
    if left >= N:
        mbarrier.expect(full, N * (D + R + V) * 2)
        for group in gl.static_range(N // 64):
            row = token + group * 64
            tma.async_copy_global_to_shared(k_tile, [row, column], full, k_s.index(group))
            tma.async_copy_global_to_shared(kr_tile, [row, 0], full, kr_s.index(group))
            tma.async_copy_global_to_shared(v_tile, [row, column + D], full, v_s.index(group))
    else:
        for group in gl.static_range(N // 64):
            at = (token + group * 64).to(gl.int64)
            here = left - group * 64
            copy_rows(k_s.index(group), kv + at * kv_stride + column, kv_stride, here, 64, D)
            copy_rows(v_s.index(group), kv + at * kv_stride + column + D, kv_stride, here, 64, V)
            copy_rows(kr_s.index(group), pe + at * pe_stride, pe_stride, here, 64, R)
        finish_rows()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _copy(
    tiles, FIRST, HEADS, H, SLOTS, kv, pe, pe_stride,
    q_tile, qr_tile, grad_tile, k_tile, kr_tile, v_tile, lse_tile, delta_tile, keys, ring, barriers,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, R: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the program's keys and values, then queries and their gradients, tile by tile as room becomes free."""
    q_s, qr_s, grad_s, lse_s, delta_s = ring
    keys_full, full, empty = barriers
    start, length, slot, head, tile, _ = locate(tiles, HEADS)
    n0 = tile * N
    pe_stride = pe_stride // 8 * 8  # rows are 16-byte aligned, which the compiler cannot know
    _copy_keys(
        kv, pe, k_tile, kr_tile, v_tile, start + n0, (FIRST + head) * (D + V), length - n0, H * (D + V), pe_stride,
        keys, keys_full, N, D, R, V,
    )  # fmt: skip
    row = head * SLOTS + slot
    for step in range((length - n0 + M - 1) // M):
        m0 = n0 + step * M
        stage = step % STAGES
        there = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(there, M * (D + R + V) * 2 + M * 8)
        tma.async_copy_global_to_shared(q_tile, [row + m0, 0], there, q_s.index(stage))
        tma.async_copy_global_to_shared(qr_tile, [row + m0, D], there, qr_s.index(stage))
        tma.async_copy_global_to_shared(lse_tile, [0, row + m0], there, lse_s.index(stage))
        tma.async_copy_global_to_shared(grad_tile, [row + m0, 0], there, grad_s.index(stage))
        tma.async_copy_global_to_shared(delta_tile, [0, row + m0], there, delta_s.index(stage))


@gluon.jit
def _step(
    dv_NV, step, keys, ring, barriers, factor, key0, m0, ds, block,
    M: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add one stage's part of a group's dv and store its dS; *block*: this key tile's in the row of query tile 0."""
    k_ND, k_NR, v_NV = keys
    q_s, qr_s, grad_s, lse_s, delta_s = ring
    _, full, empty = barriers
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16]), 2)
    STORED: gl.constexpr = _stored(M)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    s_NM = gl.zeros([64, M], gl.float32, LOGITS)
    s_NM = hopper.warpgroup_mma(k_ND, q_s.index(stage).permute((1, 0)), s_NM, is_async=True)
    s_NM = hopper.warpgroup_mma(k_NR, qr_s.index(stage).permute((1, 0)), s_NM, is_async=True)
    dp_NM = gl.zeros([64, M], gl.float32, LOGITS)
    dp_NM = hopper.warpgroup_mma(v_NV, grad_s.index(stage).permute((1, 0)), dp_NM, is_async=True)
    s_NM = hopper.warpgroup_mma_wait(1, deps=[s_NM])
    p_NM = gl.exp2(s_NM * factor - lse_s.index(stage).load(LOGITS))
    if MASKED:
        row_1M = (m0 + shuffled(gl.arange(0, M, layout=gl.SliceLayout(0, LOGITS))))[None, :]
        key_N1 = (key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS)))[:, None]
        p_NM = gl.where(key_N1 <= row_1M, p_NM, 0.0)
    p_a = gl.convert_layout(p_NM.to(k_ND.dtype), OPERAND)
    dv_NV = hopper.warpgroup_mma(p_a, grad_s.index(stage), dv_NV, is_async=True)
    dp_NM = hopper.warpgroup_mma_wait(1, deps=[dp_NM])
    ds_NM = (p_NM * (dp_NM - delta_s.index(stage).load(LOGITS))).to(k_ND.dtype)
    ds_NM = ds_NM.reshape([64, M // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, M])
    i = m0 // 128
    target = ds + (block + i * (i + 1) // 2).to(gl.int64) * (128 * 128) + m0 % 128 // M * M
    at_N1 = gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))[:, None]
    at_1M = gl.arange(0, M, layout=gl.SliceLayout(0, STORED))[None, :]
    gl.store(target + at_N1 * 128 + at_1M, gl.convert_layout(ds_NM, STORED))
    dv_NV, p_a = hopper.warpgroup_mma_wait(0, deps=[dv_NV, p_a])
    mbarrier.arrive(empty.index(stage), count=1)
    return dv_NV, step + 1


@gluon.jit
def _differentiate(
    GROUP: gl.constexpr, tiles, FIRST, HEADS, H, scale, ds, d_kv, keys, ring, barriers,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradient of 64 values, and dS of 64 keys."""
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    k_s, kr_s, v_s = keys
    start, length, _, head, tile, count = locate(tiles, HEADS)
    block = pairs_before(tiles, HEADS, head, count) + tile
    key0 = tile * N + GROUP * 64
    factor = scale * 1.4426950408889634
    mine = (k_s.index(GROUP), kr_s.index(GROUP), v_s.index(GROUP))
    ds += GROUP * 64 * 128
    dv_NV = gl.zeros([64, V], gl.float32, VALUE)
    step = 0
    clear = tile * N + N
    mbarrier.wait(barriers[0], 0)
    for m0 in range(tile * N, gl.minimum(clear, length), M):
        dv_NV, step = _step(dv_NV, step, mine, ring, barriers, factor, key0, m0, ds, block, M, V, STAGES, True)
    for m0 in range(clear, length, M):
        dv_NV, step = _step(dv_NV, step, mine, ring, barriers, factor, key0, m0, ds, block, M, V, STAGES, False)
    key_N = key0 + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUE))
    target = d_kv + ((start + key_N).to(gl.int64) * H + FIRST + head)[:, None] * (D + V) + D
    column_1V = gl.arange(0, V, layout=gl.SliceLayout(0, VALUE))[None, :]
    gl.store(target + column_1V, dv_NV.to(d_kv.dtype.element_ty), mask=(key_N < length)[:, None])


@gluon.jit(do_not_specialize=["FIRST", "HEADS", "H", "SLOTS"])
def key_kernel(
    q_tile, qr_tile, grad_tile, k_tile, kr_tile, v_tile, lse_tile, delta_tile, kv, pe, ds, d_kv,
    tiles, FIRST, HEADS, H, SLOTS, pe_stride, scale,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, R: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write dv into d_kv [T, H, D + V] and dSᵀ [pairs · 128, 128], of HEADS heads from FIRST on."""
    GROUPS: gl.constexpr = N // 64
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_s = gl.allocate_shared_memory(kv.dtype.element_ty, [GROUPS, 64, D], k_tile.layout)
    kr_s = gl.allocate_shared_memory(kv.dtype.element_ty, [GROUPS, 64, R], kr_tile.layout)
    v_s = gl.allocate_shared_memory(kv.dtype.element_ty, [GROUPS, 64, V], v_tile.layout)
    q_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, M, D], q_tile.layout)
    qr_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, M, R], qr_tile.layout)
    grad_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, M, V], grad_tile.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], lse_tile.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], delta_tile.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(keys_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    hopper.fence_async_shared()
    keys, ring, barriers = (k_s, kr_s, v_s), (q_s, qr_s, grad_s, lse_s, delta_s), (keys_full, full, empty)
    gl.warp_specialize(
        [
            (_differentiate, (
                gl.constexpr(0), tiles, FIRST, HEADS, H, scale, ds, d_kv, keys, ring, barriers, M, N, D, V, STAGES,
            )),
            (_differentiate, (
                gl.constexpr(1), tiles, FIRST, HEADS, H, scale, ds, d_kv, keys, ring, barriers, M, N, D, V, STAGES,
            )),
            (_copy, (
                tiles, FIRST, HEADS, H, SLOTS, kv, pe, pe_stride, q_tile, qr_tile, grad_tile, k_tile, kr_tile, v_tile,
                lse_tile, delta_tile, keys, ring, barriers, M, N, D, R, V, STAGES,
            )),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
