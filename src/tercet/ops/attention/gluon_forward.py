"""Forward kernel of MLA attention for Hopper, in Gluon: copies, tensor cores and softmax at work at the same time.

What it computes, its inputs and its outputs are those of `triton_forward`, which is its check and runs everywhere else.
A program owns 128 queries of one head and splits its warps in three. One group only starts bulk copies of 128 keys and
values into two stages of shared memory each. Two groups own 64 queries each and never wait for one another: a group
issues the logits of the next keys and the product of its present weights with their values, and forms the next weights
while the tensor cores are busy with the latter. Output and statistics stay in registers; the output leaves in fp32.

Key tiles come last to first, so that the one on the diagonal, the only one that needs a mask, starts the softmax.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.ops.attention.triton_forward import locate

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name changed between Triton 3.6 and 3.7


@gluon.jit
def copy_rows(target, source, stride, left, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Start copying *left* rows into shared memory, with zeros behind them, by four warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (rows < left) & (columns < WIDTH)
    hopper.async_copy.async_copy_global_to_shared(target, source + rows * stride + columns, mask=inside)


@gluon.jit
def finish_rows():
    """Wait until rows copied by this warp group are there, for the tensor cores too."""
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def _copy(
    tiles, H, q_tile, qr_tile, k_tile, v_tile, kr_tile, kv, buffers, barriers,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, R: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the program's queries, then its keys and values, tile by tile as room becomes free."""
    q_s, qr_s, k_s, kr_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    start, length, _, head, tile, count = locate(tiles, H)
    m0 = (count - 1 - tile) * M
    mbarrier.expect(q_full, M * (D + R) * 2)
    for group in gl.static_range(M // 64):
        row = start + m0 + group * 64
        tma.async_copy_global_to_shared(q_tile, [row, head * (D + R)], q_full, q_s.index(group))
        tma.async_copy_global_to_shared(qr_tile, [row, head * (D + R) + D], q_full, qr_s.index(group))
    column = head * (D + V)
    blocks = (gl.minimum(m0 + M, length) + N - 1) // N
    for step in range(blocks):
        n0 = (blocks - 1 - step) * N
        stage = step % STAGES
        free = (step // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), N * (D + R) * 2)
        tma.async_copy_global_to_shared(k_tile, [start + n0, column], k_full.index(stage), k_s.index(stage))
        tma.async_copy_global_to_shared(kr_tile, [start + n0, 0], k_full.index(stage), kr_s.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        if n0 + N <= length:
            mbarrier.expect(v_full.index(stage), N * V * 2)
            tma.async_copy_global_to_shared(v_tile, [start + n0, column + D], v_full.index(stage), v_s.index(stage))
        else:  # what lies behind the sequence may be NaN, and no weight of zero undoes that
            stride = H * (D + V)
            source = kv + (start + n0).to(gl.int64) * stride + column + D
            copy_rows(v_s.index(stage), source, stride, length - n0, N, V)
            finish_rows()
            mbarrier.arrive(v_full.index(stage), count=1)


@gluon.jit
def _logits(q_MD, q_MR, k_ND, k_NR, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue a warp group's unscaled logits of one key tile."""
    s_MN = gl.zeros([64, N], gl.float32, LAYOUT)
    s_MN = hopper.warpgroup_mma(q_MD, k_ND.permute((1, 0)), s_MN, is_async=True)
    return hopper.warpgroup_mma(q_MR, k_NR.permute((1, 0)), s_MN, is_async=True)


@gluon.jit
def _attend(
    GROUP: gl.constexpr, tiles, H, T, SLOTS, scale, out, lse, row_max, buffers, barriers,
    M: gl.constexpr, N: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax and output of 64 queries."""
    q_s, qr_s, k_s, kr_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    start, length, slot, head, tile, count = locate(tiles, H)
    m0 = (count - 1 - tile) * M
    blocks = (gl.minimum(m0 + M, length) + N - 1) // N
    factor = scale * 1.4426950408889634
    row_M = m0 + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    key_N = (blocks - 1) * N + gl.arange(0, N, layout=gl.SliceLayout(0, LOGITS))
    q_MD, q_MR = q_s.index(GROUP), qr_s.index(GROUP)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s_MN = hopper.warpgroup_mma_wait(0, deps=[_logits(q_MD, q_MR, k_s.index(0), kr_s.index(0), N, LOGITS)])
    mbarrier.arrive(k_empty.index(0), count=1)
    s_MN = gl.where(key_N[None, :] <= row_M[:, None], s_MN, float("-inf"))
    best_M = gl.max(s_MN, 1)
    p_MN = gl.exp2(s_MN * factor - (best_M * factor)[:, None])
    total_M = gl.sum(p_MN, 1)
    p_MN = gl.convert_layout(p_MN.to(v_s.dtype), WEIGHTS)
    o_MV = gl.zeros([64, V], gl.float32, OUT)
    for step in range(1, blocks):
        stage, phase = step % STAGES, step // STAGES & 1
        before, passed = (step - 1) % STAGES, (step - 1) // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s_MN = _logits(q_MD, q_MR, k_s.index(stage), kr_s.index(stage), N, LOGITS)
        mbarrier.wait(v_full.index(before), passed)
        o_MV = hopper.warpgroup_mma(p_MN, v_s.index(before), o_MV, is_async=True)
        s_MN = hopper.warpgroup_mma_wait(1, deps=[s_MN])
        mbarrier.arrive(k_empty.index(stage), count=1)
        peak_M = gl.maximum(best_M, gl.max(s_MN, 1))
        next_MN = gl.exp2(s_MN * factor - (peak_M * factor)[:, None])
        shrink_M = gl.exp2((best_M - peak_M) * factor)
        total_M = total_M * shrink_M + gl.sum(next_MN, 1)
        best_M = peak_M
        # Passed already: this wait's branch keeps ptxas from moving the next one in front of the softmax.
        mbarrier.wait(v_full.index(before), passed)
        o_MV, p_MN = hopper.warpgroup_mma_wait(0, deps=[o_MV, p_MN])
        mbarrier.arrive(v_empty.index(before), count=1)
        o_MV = o_MV * gl.convert_layout(shrink_M, gl.SliceLayout(1, OUT))[:, None]
        p_MN = gl.convert_layout(next_MN.to(v_s.dtype), WEIGHTS)
    last = blocks - 1
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    o_MV = hopper.warpgroup_mma(p_MN, v_s.index(last % STAGES), o_MV)
    inside = row_M < length
    gl.store(lse + head * SLOTS + slot + row_M, best_M * factor + gl.log2(total_M), mask=inside)
    gl.store(row_max + head * T + start + row_M, best_M * scale, mask=inside)
    to_M = m0 + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    column_V = gl.arange(0, V, layout=gl.SliceLayout(0, OUT))
    address = ((start + to_M).to(gl.int64) * H + head)[:, None] * V + column_V[None, :]
    o_MV = o_MV * gl.convert_layout(1.0 / total_M, gl.SliceLayout(1, OUT))[:, None]
    gl.store(out + address, o_MV, mask=(to_M < length)[:, None])


@gluon.jit(do_not_specialize=["T", "H", "SLOTS"])
def forward_kernel(
    q_tile, qr_tile, k_tile, v_tile, kr_tile, kv, out, lse, row_max, tiles, T, H, SLOTS, scale,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, R: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write ``o`` [T, H, V] in fp32; of every query, the log-sum-exp in base 2 [H, SLOTS], largest logit [H, T]."""
    GROUPS: gl.constexpr = M // 64
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(kv.dtype.element_ty, [GROUPS, 64, D], q_tile.layout)
    qr_s = gl.allocate_shared_memory(kv.dtype.element_ty, [GROUPS, 64, R], qr_tile.layout)
    k_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, N, D], k_tile.layout)
    kr_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, N, R], kr_tile.layout)
    v_s = gl.allocate_shared_memory(kv.dtype.element_ty, [STAGES, N, V], v_tile.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    hopper.fence_async_shared()
    buffers = (q_s, qr_s, k_s, kr_s, v_s)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (
                _attend,
                (gl.constexpr(0), tiles, H, T, SLOTS, scale, out, lse, row_max, buffers, barriers, M, N, V, STAGES),
            ),
            (
                _attend,
                (gl.constexpr(1), tiles, H, T, SLOTS, scale, out, lse, row_max, buffers, barriers, M, N, V, STAGES),
            ),
            (_copy, (tiles, H, q_tile, qr_tile, k_tile, v_tile, kr_tile, kv, buffers, barriers, M, N, D, R, V, STAGES)),
        ],
        [4, 4],
        [240, 24],
    )
