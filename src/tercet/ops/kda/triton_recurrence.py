"""KDA kernel 2, serial over a piece's tiles: the state lives in registers from the first tile to the last.

One program owns BV value channels of one head of one piece (a sequence, or a part of one: `triton_plan`) and keeps
``Sᵀ [BV, K]`` in fp32, transposed so that the state is the left operand of both products of a tile (`triton_prepare`):

    [o | u]ᵀ = Vᵀ [B; INV]ᵀ + Sᵀ [Q'; −W]ᵀ        Sᵀ ← Sᵀ γ_C + uᵀ K̂

fp16 operands need their range watched: the program works in units of a power of two at least as large as every ``|v|``
of the sequence and every entry of its initial state. A row of S then grows no faster than √T, far from overflow.

EXACT, for fp32 inputs, feeds S and u to the products in two fp16 halves of 22 bits: what a piece is given as its start
then makes no difference to the rounding, and a sequence in pieces agrees with the whole to 1e-5. For 16-bit inputs one
half does, and the two agree to 5e-4, below the rounding of o.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import fitted
from tercet.ops.kda.triton_math import exponent, halves, inverse_power, power


@triton.jit
def common_unit(largest, S_VK):
    """Exponent field of a power of two that covers the float bits *largest* and every entry of S."""
    return tl.maximum(exponent(largest.to(tl.float32, bitcast=True)), exponent(tl.max(tl.max(tl.abs(S_VK), 1), 0)))


@triton.jit
def load_piece(table, index):
    """Return a row of a table of `triton_plan.Pieces`; the first token as int64."""
    row = table + 7 * index
    first = tl.load(row)
    count = tl.load(row + 1)
    token0 = tl.load(row + 2).to(tl.int64)
    length = tl.load(row + 3)
    sequence = tl.load(row + 4)
    before = tl.load(row + 5)
    after = tl.load(row + 6)
    return first, count, token0, length, sequence, before, after


@triton.jit
def load_state(own, inner, sequence, slot, matrix, size, HAS_OWN: tl.constexpr, HAS_INNER: tl.constexpr):
    """Load a matrix of ``inner`` where *slot* ≥ 0, of ``own`` (by sequence) where it is −1, else zeros; fp32.

    *matrix* includes the head's offset; *size* is the number of entries of all heads.
    """
    S_VK = tl.zeros(matrix.shape, tl.float32)
    if HAS_OWN:
        S_VK += tl.load(own + sequence.to(tl.int64) * size + matrix, mask=slot == -1, other=0.0).to(tl.float32)
    if HAS_INNER:
        S_VK += tl.load(inner + tl.maximum(slot, 0).to(tl.int64) * size + matrix, mask=slot >= 0, other=0.0)
    return S_VK


@fitted
@triton.jit
def walk_tiles(
    v,
    o,
    wide,
    k_hat,
    small,
    decay,
    v_max,
    runs,
    initial,
    starts,
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
    HAS_STARTS: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Run one piece × head × BV channels; the last piece of a sequence writes its final state.

    ``starts [slots, H, V, K]`` holds the states between pieces. ``exports [X]`` gives for every tile the slot of
    ``exported [slots, H, V, K]`` that receives the state after it, or −1.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    first, count, token0, length, sequence, before, after = load_piece(runs, tl.program_id(2))
    r = tl.arange(0, C)
    pair = tl.arange(0, 2 * C)
    key = tl.arange(0, K)
    value = split * BV + tl.arange(0, BV)
    matrix = head * (V * K) + value[:, None] * K + key[None, :]
    S_VK = load_state(initial, starts, sequence, before, matrix, H * V * K, HAS_INITIAL, HAS_STARTS)
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
        high, low = halves(S_VK)
        wide_KP = tl.trans(wide_PK)
        both = tl.dot(high, wide_KP)
        if EXACT:
            both = tl.dot(low, wide_KP, both)
        both = tl.dot((v_VC.to(tl.float32) * shrink).to(tl.float16), tl.trans(small_PC), both)
        o_VC, u_VC = tl.split(tl.permute(tl.reshape(both, [BV, 2, C]), (0, 2, 1)))
        high, low = halves(u_VC)
        S_VK = tl.dot(high, k_hat_CK, S_VK * decay_K[None, :])
        if EXACT:
            S_VK = tl.dot(low, k_hat_CK, S_VK)
        out = token[None, :] * (H * V) + head * V + value[:, None]
        tl.store(o + out, (o_VC * grow).to(o.dtype.element_ty), mask=inside)
        if HAS_EXPORTS:
            slot = tl.load(exports + tile)
            if slot >= 0:
                tl.store(exported + slot.to(tl.int64) * (H * V * K) + matrix, S_VK * grow)
    if after == -1:
        tl.store(final + sequence.to(tl.int64) * (H * V * K) + matrix, S_VK * grow)
