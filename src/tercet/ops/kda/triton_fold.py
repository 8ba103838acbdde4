"""KDA context parallelism inside one device: pieces of a sequence fold side by side, then a chain links them.

A piece of tiles maps the state before it to the one after it, ``S_out = M S_in + S̃`` (kernels.md §6). `fold_pieces`
walks a piece as `triton_recurrence` does, without its outputs: from zero for S̃, and from the unit states, without
values, for M. Rows of ``Sᵀ`` never meet, so both are rows of one walk, V + K of them, and what is kept is Mᵀ, by whose
product from the right a stored state moves on. `chain_states` walks the pieces, ``Sᵀ ← Sᵀ Mᵀ + S̃ᵀ``, and every piece
is then walked from its exact state. Backwards the same holds for the adjoint D with M in the place of Mᵀ; M is folded
again there, for the backward pass rounds its tiles' operands differently.

All products with M are fp32 in effect. The tile's operands are fp16 already; the walked rows enter as two fp16 halves
of 22 bits, M in units of 2⁻¹² so that no half is subnormal before it is below 1e-9. Keys are unit vectors and gates and
β at most 1, so no product of tiles grows (its norm is ≤ 1): an error once made is never amplified.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import fitted
from tercet.ops.kda.triton_math import TILE, halves, inverse_power, power
from tercet.ops.kda.triton_plan import BLOCK_V
from tercet.ops.kda.triton_recurrence import common_unit, load_piece, load_state
from tercet.ops.triton_math import FP32

FOLD = {"STAGES": 4, "num_warps": 4}
FOLD_BACK = {"STAGES": 3, "num_warps": 4}
CHAIN_ROWS = 16
"""Rows of the state a program of the chain owns: few, because its steps are serial and small."""
CHAIN = {"num_warps": 8}
"""Each thread of four warps would hold 256 numbers of a split M."""


@fitted
@triton.jit
def fold_pieces(
    v,
    wide,
    k_hat,
    small,
    decay,
    v_max,
    folds,
    initial,
    states,
    transitions,
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
):
    """Fold one piece × head × BV rows: S̃ to ``states [slots, H, V, K]``, Mᵀ to ``transitions [slots, H, K, K]``.

    Both go to the slot after the piece, or where that is −2 to the one before it. The first piece of a sequence starts
    from its initial state and has no M.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    first, count, token0, length, sequence, before, after = load_piece(folds, tl.program_id(2))
    target = tl.where(after == -2, before, after)
    moves = block >= V // BV  # rows of M
    if moves and before == -1:
        return
    r = tl.arange(0, C)
    key = tl.arange(0, K)
    row = (block - tl.where(moves, V // BV, 0)) * BV + tl.arange(0, BV)
    matrix = row[:, None] * K + key[None, :]
    slot = tl.where(moves, -2, before)
    S_VK = load_state(initial, initial, sequence, slot, head * (V * K) + matrix, H * V * K, HAS_INITIAL, False)
    unit = tl.where(moves, 115 << 23, common_unit(tl.load(v_max + sequence * H + head), S_VK))
    shrink, grow = inverse_power(unit), power(unit)
    S_VK = tl.where(moves & (row[:, None] == key[None, :]), 1.0, S_VK) * shrink

    for step in tl.range(0, count, num_stages=STAGES):
        index = (first + step).to(tl.int64) * H + head
        w_CK = tl.load(wide + index * (2 * C * K) + C * K + r[:, None] * K + key[None, :])
        k_hat_CK = tl.load(k_hat + index * (C * K) + r[:, None] * K + key[None, :])
        solve_CC = tl.load(small + index * (MATRICES * C * C) + C * C + r[:, None] * C + r[None, :])
        decay_K = tl.load(decay + index * K + key)
        position = step * C + r
        inside = (position[None, :] < length) & (block < V // BV)
        token = token0 + position
        v_VC = tl.load(v + token[None, :] * stride_vt + head * stride_vh + row[:, None], mask=inside, other=0.0)
        high, low = halves(S_VK)
        w_KC = tl.trans(w_CK)
        u_VC = tl.dot(low, w_KC, tl.dot(high, w_KC))
        u_VC = tl.dot((v_VC.to(tl.float32) * shrink).to(tl.float16), tl.trans(solve_CC), u_VC)
        high, low = halves(u_VC)
        S_VK = tl.dot(high, k_hat_CK, tl.dot(low, k_hat_CK, S_VK * decay_K[None, :]))
    if moves:
        tl.store(transitions + (target * H + head).to(tl.int64) * (K * K) + matrix, S_VK * grow)
    else:
        tl.store(states + (target * H + head).to(tl.int64) * (V * K) + matrix, S_VK * grow)


@fitted
@triton.jit
def fold_back(
    d_o,
    wide,
    k_hat,
    decay,
    d_o_max,
    folds,
    write,
    d_final,
    adjoints,
    transitions,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_FINAL: tl.constexpr,
):
    """Carry D through one piece backwards, to the slot before it in ``adjoints [slots, H, V, K]``.

    It starts from zero, and M goes to that slot of ``transitions [slots, H, K, K]``; but in a slab's last piece of a
    sequence it starts from the true adjoint, d_final or the slot after it, and there is no M.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    first, count, token0, length, sequence, before, after = load_piece(folds, tl.program_id(2))
    moves = block >= V // BV  # rows of M
    if moves and after != -2:
        return
    r = tl.arange(0, C)
    key = tl.arange(0, K)
    rank = (block - tl.where(moves, V // BV, 0)) * BV + tl.arange(0, BV)
    matrix = rank[:, None] * K + key[None, :]
    D_VK = load_state(d_final, adjoints, sequence, after, head * (V * K) + matrix, H * V * K, HAS_FINAL, True)
    unit = tl.where(moves, 115 << 23, common_unit(tl.load(d_o_max + sequence * H + head), D_VK))
    shrink, grow = inverse_power(unit), power(unit)
    D_VK = tl.where(moves & (rank[:, None] == key[None, :]), 1.0, D_VK) * shrink

    for back in tl.range(0, count, num_stages=STAGES):
        step = count - 1 - back
        index = (first + step).to(tl.int64) * H + head
        plane = wide + index * (2 * C * K) + r[:, None] * K + key[None, :]
        q_CK = tl.load(plane)
        w_CK = tl.load(plane + C * K)
        k_hat_CK = tl.load(k_hat + index * (C * K) + r[:, None] * K + key[None, :])
        beta_C = tl.load(write + index * (3 * C) + r)
        decay_K = tl.load(decay + index * K + key)
        position = step * C + r
        token = token0 + position
        inside = (position[None, :] < length) & (block < V // BV)
        d_o_VC = tl.load(d_o + token[None, :] * stride_ot + head * stride_oh + rank[:, None], mask=inside, other=0.0)
        high, low = halves(D_VK)
        k_hat_KC = tl.trans(k_hat_CK)
        through_VC = tl.dot(low, k_hat_KC, tl.dot(high, k_hat_KC)) * beta_C[None, :]
        D_VK = tl.dot((d_o_VC.to(tl.float32) * shrink).to(tl.float16), q_CK, D_VK * decay_K[None, :])
        high, low = halves(through_VC)
        D_VK = tl.dot(high, w_CK, tl.dot(low, w_CK, D_VK))
    if moves:
        tl.store(transitions + (before * H + head).to(tl.int64) * (K * K) + matrix, D_VK * grow)
    else:
        tl.store(adjoints + (before * H + head).to(tl.int64) * (V * K) + matrix, D_VK * grow)


@fitted
@triton.jit
def chain_states(
    values,
    transitions,
    chains,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Complete the zero-start folds of one sequence × head × BV rows in place.

    Forwards ``values[s] += values[s−1] transitions[s]`` from the second slot of the chain on; in reverse ``values[s] +=
    values[s+1] transitions[s]`` from the last but one.
    """
    head = tl.program_id(1)
    first = tl.load(chains + 2 * tl.program_id(2))
    count = tl.load(chains + 2 * tl.program_id(2) + 1)
    key = tl.arange(0, K)
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    matrix = head * (V * K) + value[:, None] * K + key[None, :]
    square = head * (K * K) + key[:, None] * K + key[None, :]
    slot = first + count - 1 if REVERSE else first
    S_VK = tl.load(values + slot.to(tl.int64) * (H * V * K) + matrix)
    for _ in range(1, count):
        slot += -1 if REVERSE else 1
        move_KK = tl.load(transitions + slot.to(tl.int64) * (H * K * K) + square)
        here = values + slot.to(tl.int64) * (H * V * K) + matrix
        S_VK = tl.dot(S_VK, move_KK, tl.load(here), input_precision=FP32)
        tl.store(here, S_VK)


def fold(
    v: Tensor,
    work: tuple[Tensor, ...],
    folds: Tensor,
    initial: Tensor | None,
    states: Tensor,
    transitions: Tensor,
) -> None:
    """Run `fold_pieces` over the rows of *folds*."""
    H, V = v.shape[1:]
    K = work[3].shape[-1]
    block = min(BLOCK_V, V, K)
    fold_pieces[((V + K) // block, H, len(folds))](
        *(v, *work[:5], folds, initial, states, transitions, *v.stride()[:2]),
        **dict(H=H, K=K, V=V, BV=block, C=TILE, MATRICES=work[2].shape[2], HAS_INITIAL=initial is not None, **FOLD),
    )


def fold_adjoint(
    d_o: Tensor,
    work: tuple[Tensor, ...],
    folds: Tensor,
    d_final: Tensor | None,
    adjoints: Tensor,
    transitions: Tensor | None,
) -> None:
    """Run `fold_back` over the rows of *folds*; *work* is that of the backward pass. Without *transitions* no M."""
    H, V = d_o.shape[1:]
    K = work[3].shape[-1]
    wide, k_hat, _, decay, d_o_max, write = work
    block = min(BLOCK_V, V, K)
    rows, moves = (V, adjoints) if transitions is None else (V + K, transitions)
    fold_back[(rows // block, H, len(folds))](
        *(d_o, wide, k_hat, decay, d_o_max, folds, write, d_final, adjoints, moves, *d_o.stride()[:2]),
        **dict(H=H, K=K, V=V, BV=block, C=TILE, HAS_FINAL=d_final is not None, **FOLD_BACK),
    )


def chain(values: Tensor, transitions: Tensor, chains: Tensor, *, reverse: bool = False) -> None:
    """Run `chain_states` over the rows of *chains*."""
    H, V, K = values.shape[1:]
    block = min(CHAIN_ROWS, V)
    grid = (V // block, H, len(chains))
    chain_states[grid](values, transitions, chains, H=H, K=K, V=V, BV=block, REVERSE=reverse, **CHAIN)
