"""KDA kernel 2, serial over a sequence's tiles: the state lives in registers from the first tile to the last.

One program owns BV value channels of one head of one sequence and keeps ``Sᵀ [BV, K]`` in fp32, transposed so that the
state is the left operand of both products of a tile (`triton_prepare`):

    [o | u]ᵀ = Vᵀ [B; INV]ᵀ + Sᵀ [Q'; −W]ᵀ        Sᵀ ← Sᵀ γ_C + uᵀ K̂

fp16 operands need their range watched: the program works in units of a power of two at least as large as every ``|v|``
of the sequence and every entry of its initial state. A row of S then grows no faster than √T, far from overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.kda.triton_math import exponent, inverse_power, power


@triton.jit
def common_unit(largest, S_VK):
    """Exponent field of a power of two that covers the float bits *largest* and every entry of S."""
    return tl.maximum(exponent(largest.to(tl.float32, bitcast=True)), exponent(tl.max(tl.max(tl.abs(S_VK), 1), 0)))


@triton.jit
def walk_tiles(
    v,
    o,
    wide,
    k_hat,
    small,
    decay,
    v_max,
    sequences,
    initial,
    final,
    exports,
    exported,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    MATRICES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
):
    """Run one sequence × head × BV channels.

    ``exports [X]`` gives for every tile the slot of ``exported [slots, H, V, K]`` that receives the state after it, or
    −1.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(sequences + 4 * sequence)
    count = tl.load(sequences + 4 * sequence + 1)
    token0 = tl.load(sequences + 4 * sequence + 2).to(tl.int64)
    length = tl.load(sequences + 4 * sequence + 3)
    r = tl.arange(0, C)
    pair = tl.arange(0, 2 * C)
    key = tl.arange(0, K)
    value = split * BV + tl.arange(0, BV)
    matrix = value[:, None] * K + key[None, :]
    here = (sequence * H + head).to(tl.int64) * (V * K)
    S_VK = tl.load(initial + here + matrix).to(tl.float32) if HAS_INITIAL else tl.zeros([BV, K], tl.float32)
    unit = common_unit(tl.load(v_max + sequence * H + head), S_VK)
    shrink, grow = inverse_power(unit), power(unit)
    S_VK = S_VK * shrink

    for step in tl.range(0, count, num_stages=STAGES):
        tile = first + step
        index = tile.to(tl.int64) * H + head
        wide_PK = tl.load(wide + index * (2 * C * K) + pair[:, None] * K + key[None, :])
        k_hat_CK = tl.load(k_hat + index * (C * K) + r[:, None] * K + key[None, :])
        small_PC = tl.load(small + index * (MATRICES * C * C) + pair[:, None] * C + r[None, :])
        decay_K = tl.load(decay + index * K + key)
        position = step * C + r
        inside = position[None, :] < length
        token = token0 + position
        v_VC = tl.load(v + token[None, :] * stride_vt + head * stride_vh + value[:, None], mask=inside, other=0.0)
        both = tl.dot(S_VK.to(tl.float16), tl.trans(wide_PK))
        both = tl.dot((v_VC.to(tl.float32) * shrink).to(tl.float16), tl.trans(small_PC), both)
        o_VC, u_VC = tl.split(tl.permute(tl.reshape(both, [BV, 2, C]), (0, 2, 1)))
        S_VK = tl.dot(u_VC.to(tl.float16), k_hat_CK, S_VK * decay_K[None, :])
        out = token[None, :] * (H * V) + head * V + value[:, None]
        tl.store(o + out, (o_VC * grow).to(o.dtype.element_ty), mask=inside)
        if HAS_EXPORTS:
            slot = tl.load(exports + tile)
            if slot >= 0:
                tl.store(exported + (slot * H + head).to(tl.int64) * (V * K) + matrix, S_VK * grow)
    tl.store(final + here + matrix, S_VK * grow)
