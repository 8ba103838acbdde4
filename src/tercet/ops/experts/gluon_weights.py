"""Gradients of expert weights on Hopper, in Gluon: per expert ``leftᵀ right`` over its rows.

With a hundred rows an expert these are short sums and much to write: 112 experts of 3072 × 3584 are 2.5 GB. Copies in,
products and copies out must all be under way at once. A program therefore keeps a panel of the left operand in shared
memory, all rows of its expert by 256 columns, and tiles of the right operand stream past it. One warp only starts
copies: it runs as far ahead as the ring of buffers allows, across the ends of tiles. Two groups of four warps own half
of the panel each and never wait for one another: while one turns its sums into bf16 and sends them off, the other
multiplies. An expert with more rows than a panel holds streams both operands.

Descriptors are made on the GPU and end where the expert's rows end: what lies beyond reads as zeros. An expert without
rows gets zeros.

Shapes: R rows, E experts; left [R, M], right [R, N], out [E, M, N].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.ops.gpu import blocks

HALF = gl.constexpr(128)
"""Columns of the left operand that a group of warps owns."""
COLUMNS = gl.constexpr(128)
"""Columns of the right operand in a tile."""
ROWS = gl.constexpr(64)
"""Rows of a step."""
STEPS = gl.constexpr(3)
"""Steps that a panel holds."""
RING = gl.constexpr(4)
"""Tiles of the right operand that are under way."""
REGISTERS = gl.constexpr((216, 40))
"""Registers a thread of the second group (the first takes the rest) and of the copying warp."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name changed between Triton 3.6 and 3.7


@gluon.jit
def _copy(a, b, panel, tiles, barriers, steps, m, begin, end):
    """Bring the panel, or a step of it beside each tile, and the tiles of columns *begin* to *end*."""
    loaded, full, empty = barriers
    resident = steps <= STEPS
    slots = gl.where(resident, RING, STEPS)
    if resident:
        for k in range(steps):
            mbarrier.expect(loaded.index(k), 2 * HALF * ROWS * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    a, [k * ROWS, m + half * HALF], loaded.index(k), panel.index(2 * k + half)
                )
    i = 0
    for n in range(begin, end, COLUMNS):
        for k in range(steps):
            slot = i % slots
            mbarrier.wait(empty.index(slot), ((i // slots) & 1) ^ 1)
            if resident:
                mbarrier.expect(full.index(slot), COLUMNS * ROWS * 2)
            else:
                mbarrier.expect(full.index(slot), (2 * HALF + COLUMNS) * ROWS * 2)
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        a, [k * ROWS, m + half * HALF], full.index(slot), panel.index(2 * slot + half)
                    )
            tma.async_copy_global_to_shared(b, [k * ROWS, n], full.index(slot), tiles.index(slot))
            i += 1


@gluon.jit
def _multiply(half: gl.constexpr, to, panel, tiles, sums, barriers, steps, m, begin, end):
    """Multiply one half of the panel with every tile and send the sums off."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    loaded, full, empty = barriers
    resident = steps <= STEPS
    slots = gl.where(resident, RING, STEPS)
    if resident:
        for k in range(steps):
            mbarrier.wait(loaded.index(k), 0)
    own = sums.index(half)
    i = 0
    for n in range(begin, end, COLUMNS):
        total = gl.zeros([HALF, COLUMNS], gl.float32, LAYOUT)
        for k in range(steps):
            slot = i % slots
            mbarrier.wait(full.index(slot), (i // slots) & 1)
            left = panel.index(2 * gl.where(resident, k, slot) + half).permute((1, 0))
            total = hopper.warpgroup_mma(left, tiles.index(slot), total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=[total])
            barrier()
            mbarrier.arrive(empty.index((i + slots - 1) % slots), count=1, pred=k > 0)
            i += 1
        total = hopper.warpgroup_mma_wait(0, deps=[total])
        barrier()
        mbarrier.arrive(empty.index((i + slots - 1) % slots), count=1, pred=steps > 0)
        tma.store_wait(0)
        barrier()
        own.store(total.to(gl.bfloat16))
        hopper.fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(to, [m + half * HALF, n], own)
    tma.store_wait(0)


@gluon.jit
def weight_gradient_kernel(left, right, out, ends, M: gl.constexpr, N: gl.constexpr, SPLIT: gl.constexpr):
    """A program owns 256 rows of one expert's gradient, and one of SPLIT parts of their columns."""
    panels: gl.constexpr = (M + 2 * HALF - 1) // (2 * HALF)
    width: gl.constexpr = (N + SPLIT * COLUMNS - 1) // (SPLIT * COLUMNS) * COLUMNS
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    expert = gl.program_id(0) // (panels * SPLIT)
    within = gl.program_id(0) % (panels * SPLIT)
    m, begin = within // SPLIT * (2 * HALF), within % SPLIT * width
    end = gl.minimum(begin + width, N)
    last = gl.load(ends + expert)
    first = gl.load(ends + expert - 1, mask=expert > 0, other=0)
    rows = gl.maximum(last - first, 1)
    steps = (last - first + ROWS - 1) // ROWS
    row = first.to(gl.int64)
    a = tma.make_tensor_descriptor(left + row * M, [rows, M], [M, 1], [ROWS, HALF], SWIZZLED)
    b = tma.make_tensor_descriptor(right + row * N, [rows, N], [N, 1], [ROWS, COLUMNS], SWIZZLED)
    to = tma.make_tensor_descriptor(out + expert.to(gl.int64) * (M * N), [M, N], [N, 1], [HALF, COLUMNS], SWIZZLED)
    panel = gl.allocate_shared_memory(gl.bfloat16, [2 * STEPS, ROWS, HALF], SWIZZLED)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, COLUMNS], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, COLUMNS], SWIZZLED)
    loaded = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    barriers = (loaded, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), to, panel, tiles, sums, barriers, steps, m, begin, end)),
            (_multiply, (gl.constexpr(1), to, panel, tiles, sums, barriers, steps, m, begin, end)),
            (_copy, (a, b, panel, tiles, barriers, steps, m, begin, end)),
        ],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )


def _reserve(size: int, alignment: int, stream: int | None) -> Any:
    """Give Triton room for descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def weight_gradient(ends: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Per expert ``leftᵀ right`` in bf16; widths are multiples of 8."""
    m, n, count = left.shape[1], right.shape[1], len(ends)
    out = torch.empty(count, m, n, dtype=left.dtype, device=left.device)
    split = 2 if n > 1024 else 1
    triton.set_allocator(_reserve)
    grid = (count * blocks(m, 2 * HALF.value) * split,)
    weight_gradient_kernel[grid](left, right, out, ends, M=m, N=n, SPLIT=split, num_warps=4)
    return out
