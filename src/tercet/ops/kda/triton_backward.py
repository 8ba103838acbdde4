"""Gradients of KDA in three kernels over a slab of tiles; nothing but the raw inputs comes from the forward pass.

`rebuild_states` walks the pieces of a slab forwards again and keeps the state S before every tile and the errors e
(u = β e). `walk_back` carries the adjoint ``D = ∂loss/∂S`` from a piece's last tile to its first and keeps it too; with
the names of `triton_prepare`

    dU = K̂ D + Aᵀ dO     dV = INVᵀ dU     dβ_r = ((I + β L₀)⁻ᵀ dU)_r · e_r     D ← γ_C D − Wᵀ K̂ D + Q'ᵀ dO

`tile_gradients` then works on all tiles at once. With ``E = −tril(dV uᵀ, −1)``, ``F = tril(dO uᵀ)``, ``X = Γk``,
``Y = s Γq`` and ``K⁻ = k/Γ`` it forms

    dX = −dV Sᵀ + E K⁻     dY = dO Sᵀ + F K⁻     dK⁻ = Eᵀ X + Fᵀ Y     dK̂ = u Dᵀ

    dq = s Γ dY        dk = Γ dX + dK⁻/Γ + dK̂ γ_C/Γ

    dG_r = X dX + Y dY − K⁻ dK⁻ − K̂ dK̂      dg_t = Σ_{r ≥ t} dG_r + Σ_r K̂ dK̂ + γ_C Σ_v S D

and finally the gate, norm and sigmoid backwards. X, Y and K⁻ enter dG as they were rounded for the products: what two
tokens of a tile do to each other then cancels there to the last bit, as in exact arithmetic. Without states from before
that is most of dz, and rounding each side by itself costs a digit. Without a floor on the gate, where 1/Γ does not
exist, E and F go through `triton_gate` instead, and dg is summed from terms that each hold the decay of g. Sums over
tokens leave as one partial a tile and are added in a fixed order, so two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import fitted
from tercet.ops.kda.triton_gate import pair_gradients, softplus_gate
from tercet.ops.kda.triton_math import (
    halves,
    inverse_power,
    narrow,
    power,
    rounded,
    sigmoid,
    sums_down,
    sums_up,
    sums_where,
    wide_sums_where,
)
from tercet.ops.kda.triton_prepare import load_rows
from tercet.ops.kda.triton_recurrence import common_unit, load_piece, load_state
from tercet.ops.triton_math import exp2, reciprocal


@fitted
@triton.jit
def rebuild_states(
    v,
    wide,
    k_hat,
    small,
    decay,
    v_max,
    pieces,
    initial,
    starts,
    write,
    states,
    errors,
    stride_vt,
    stride_vh,
    tile_low,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write S before every tile of a slab to ``states [tiles, H, V, K]``, e to ``errors [tiles, H, C, V]``.

    *pieces*, *initial* and *starts* are as in `walk_tiles`; the slab begins at *tile_low*.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    first, count, token0, length, sequence, before, _ = load_piece(pieces, tl.program_id(2))
    r = tl.arange(0, C)
    key = tl.arange(0, K)
    value = split * BV + tl.arange(0, BV)
    matrix = value[:, None] * K + key[None, :]
    place = head * (V * K) + matrix
    S_VK = load_state(initial, starts, sequence, before, place, H * V * K, HAS_INITIAL, HAS_STARTS)
    unit = common_unit(tl.load(v_max + sequence * H + head), S_VK)
    shrink, grow = inverse_power(unit), power(unit)
    S_VK = S_VK * shrink

    for step in tl.range(0, count, num_stages=STAGES):
        tile = first + step
        index = tile.to(tl.int64) * H + head
        w_CK = tl.load(wide + index * (2 * C * K) + C * K + r[:, None] * K + key[None, :])
        k_hat_CK = tl.load(k_hat + index * (C * K) + r[:, None] * K + key[None, :])
        inverse_CC = tl.load(small + index * (5 * C * C) + C * C + r[:, None] * C + r[None, :])
        beta_C = tl.load(write + index * (3 * C) + r)
        decay_K = tl.load(decay + index * K + key)
        position = step * C + r
        token = token0 + position
        inside = position[None, :] < length
        v_VC = tl.load(v + token[None, :] * stride_vt + head * stride_vh + value[:, None], mask=inside, other=0.0)
        slot = (tile - tile_low).to(tl.int64) * H + head
        tl.store(states + slot * (V * K) + matrix, narrow(S_VK * grow).to(states.dtype.element_ty))
        high, low = halves(S_VK)
        w_KC = tl.trans(w_CK)
        e_VC = tl.dot(high, w_KC)
        if EXACT:
            e_VC = tl.dot(low, w_KC, e_VC)
        e_VC = tl.dot((v_VC.to(tl.float32) * shrink).to(tl.float16), tl.trans(inverse_CC), e_VC)
        high, low = halves(e_VC * beta_C[None, :])
        S_VK = tl.dot(high, k_hat_CK, S_VK * decay_K[None, :])
        if EXACT:
            S_VK = tl.dot(low, k_hat_CK, S_VK)
        out = errors + slot * (C * V) + r[None, :] * V + value[:, None]
        tl.store(out, narrow(e_VC * grow).to(errors.dtype.element_ty))


@fitted
@triton.jit
def walk_back(
    d_o,
    d_v,
    wide,
    k_hat,
    small,
    decay,
    d_o_max,
    pieces,
    write,
    errors,
    d_final,
    ends,
    d_initial,
    adjoints,
    d_write,
    stride_ot,
    stride_oh,
    tile_low,
    tiles_total,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Carry D from a piece's last tile to its first.

    It starts from ``d_final [N, H, V, K]`` or, where another piece follows, from its slot in ``ends``; it ends in
    ``d_initial`` or, where the slab begins, in a slot of ends. Writes D after every tile to ``adjoints [tiles, H, V,
    K]``, dV to its place, and this program's share of dβ to ``d_write [V / BV, X, H, C]``.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    first, count, token0, length, sequence, before, after = load_piece(pieces, tl.program_id(2))
    r = tl.arange(0, C)
    pair = tl.arange(0, 2 * C)
    key = tl.arange(0, K)
    value = split * BV + tl.arange(0, BV)
    matrix = value[:, None] * K + key[None, :]
    place = head * (V * K) + matrix
    D_VK = load_state(d_final, ends, sequence, after, place, H * V * K, HAS_FINAL, HAS_ENDS)
    unit = common_unit(tl.load(d_o_max + sequence * H + head), D_VK)
    shrink, grow = inverse_power(unit), power(unit)
    D_VK = D_VK * shrink

    for back in tl.range(0, count, num_stages=STAGES):
        step = count - 1 - back
        tile = first + step
        index = tile.to(tl.int64) * H + head
        plane = wide + index * (2 * C * K) + r[:, None] * K + key[None, :]
        q_CK = tl.load(plane)
        w_CK = tl.load(plane + C * K)
        k_hat_CK = tl.load(k_hat + index * (C * K) + r[:, None] * K + key[None, :])
        matrices = small + index * (5 * C * C) + r[:, None] * C
        solves_CP = tl.load(matrices + (2 + pair[None, :] // C) * (C * C) + pair[None, :] % C)
        A_CC = tl.load(matrices + 4 * C * C + r[None, :])
        beta_C = tl.load(write + index * (3 * C) + r)
        decay_K = tl.load(decay + index * K + key)
        position = step * C + r
        token = token0 + position
        inside = position[None, :] < length
        d_o_VC = tl.load(d_o + token[None, :] * stride_ot + head * stride_oh + value[:, None], mask=inside, other=0.0)
        slot = (tile - tile_low).to(tl.int64) * H + head
        tl.store(adjoints + slot * (V * K) + matrix, narrow(D_VK * grow).to(adjoints.dtype.element_ty))
        d_o16 = (d_o_VC.to(tl.float32) * shrink).to(tl.float16)
        high, low = halves(D_VK)
        k_hat_KC = tl.trans(k_hat_CK)
        through_VC = tl.dot(high, k_hat_KC)
        if EXACT:
            through_VC = tl.dot(low, k_hat_KC, through_VC)
        D_VK = tl.dot(d_o16, q_CK, D_VK * decay_K[None, :])
        high, low = halves(through_VC * beta_C[None, :])
        D_VK = tl.dot(high, w_CK, D_VK)
        if EXACT:
            D_VK = tl.dot(low, w_CK, D_VK)
        d_u_VC = tl.dot(d_o16, A_CC, through_VC)
        both = tl.dot(d_u_VC.to(tl.float16), solves_CP) * grow
        d_v_VC, d_y_VC = tl.split(tl.permute(tl.reshape(both, [BV, 2, C]), (0, 2, 1)))
        out = token[None, :] * (H * V) + head * V + value[:, None]
        tl.store(d_v + out, d_v_VC.to(d_v.dtype.element_ty), mask=inside)
        e_VC = tl.load(errors + slot * (C * V) + r[None, :] * V + value[:, None]).to(tl.float32)
        share = (split * tiles_total + tile).to(tl.int64) * H + head
        tl.store(d_write + share * C + r, tl.sum(d_y_VC * e_VC, 0))
    if before == -1:
        if HAS_INITIAL:
            tl.store(d_initial + sequence.to(tl.int64) * (H * V * K) + place, D_VK * grow)
    elif first == tile_low:  # inside of a slab another program reads that slot now
        tl.store(ends + before.to(tl.int64) * (H * V * K) + place, D_VK * grow)


@triton.jit
def state_products(
    states,
    adjoints,
    errors,
    d_o,
    d_v,
    slot,
    token0,
    r,
    inside,
    beta_C,
    key,
    head,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return dO Sᵀ, −dV Sᵀ, u Dᵀ, E, F and Σ_v S D of one tile.

    S and D pass through shared memory in blocks of BV value channels, and from there straight into the products.
    """
    row, col = r[:, None], r[None, :]
    d_Y = tl.zeros([C, K], tl.float32)
    d_X = tl.zeros([C, K], tl.float32)
    d_k_hat = tl.zeros([C, K], tl.float32)
    both = tl.zeros([C, K], tl.float32)
    E_CC = tl.zeros([C, C], tl.float32)
    F_CC = tl.zeros([C, C], tl.float32)
    ones = narrow(tl.where(row == 0, 1.0, 0.0) + tl.zeros([C, BV], tl.float32))
    for block in tl.range(0, V, BV, num_stages=STAGES):
        value = block + tl.arange(0, BV)
        matrix = slot * (V * K) + value[:, None] * K + key[None, :]
        S_dot = narrow(tl.load(states + matrix))
        D_dot = narrow(tl.load(adjoints + matrix))
        e_dot = narrow(tl.load(errors + slot * (C * V) + row * V + value[None, :]))
        d_o_dot = narrow(load_rows(d_o, token0, r, value, head, stride_ot, stride_oh, inside, 0.0))
        d_v_dot = narrow(load_rows(d_v, token0, r, value, head, H * V, V, inside, 0.0))
        d_k_hat = tl.dot(e_dot, D_dot, d_k_hat)
        d_Y = tl.dot(d_o_dot, S_dot, d_Y)
        d_X = tl.dot(d_v_dot, S_dot, d_X)
        e_right = tl.trans(e_dot)
        E_CC = tl.dot(d_v_dot, e_right, E_CC)
        F_CC = tl.dot(d_o_dot, e_right, F_CC)
        both = tl.dot(ones, narrow(S_dot * D_dot), both)
    E_CC = tl.where(row > col, -E_CC * beta_C[None, :], 0.0)
    F_CC = tl.where(row >= col, F_CC * beta_C[None, :], 0.0)
    return d_Y, -d_X, d_k_hat * beta_C[:, None], E_CC, F_CC, tl.sum(both, 0)


@fitted
@triton.jit
def tile_gradients(
    q,
    k,
    z,
    b,
    A_log,
    dt_bias,
    d_o,
    d_v,
    tiles,
    states,
    adjoints,
    errors,
    write,
    decay,
    d_write,
    d_q,
    d_k,
    d_z,
    d_b,
    d_bias,
    d_slope,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_zt,
    stride_zh,
    stride_ot,
    stride_oh,
    stride_bt,
    scale,
    floor2,
    tile_low,
    tiles_total,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    SHARES: tl.constexpr,
    BOUNDED: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """All gradients of one (head, tile) that need no recurrence; see the module's formulas.

    ``d_bias [X, H, K]`` and ``d_slope [X, H]`` receive this tile's share of the gate parameters' gradients; SHARES is
    the first axis of d_write.
    """
    head = tl.program_id(0) % H
    tile = tile_low + tl.program_id(0) // H
    token0 = tl.load(tiles + 3 * tile).to(tl.int64)
    r = tl.arange(0, C)
    inside = r < tl.load(tiles + 3 * tile + 1)
    key = tl.arange(0, K)
    row, col = r[:, None], r[None, :]
    slot = tl.program_id(0).to(tl.int64)
    here = tile.to(tl.int64) * H + head
    factors = write + here * (3 * C) + r
    beta_C, q_norm, k_norm = tl.load(factors), tl.load(factors + C), tl.load(factors + 2 * C)
    b_C = tl.load(b + (token0 * stride_bt + head) + r * stride_bt, mask=inside, other=0.0).to(tl.float32)
    d_beta_C = tl.zeros([C], tl.float32)
    for share in tl.static_range(SHARES):
        d_beta_C += tl.load(d_write + ((share * tiles_total + tile).to(tl.int64) * H + head) * C + r)
    d_b_C = d_beta_C * sigmoid(b_C, LOG2E) * sigmoid(-b_C, LOG2E)
    tl.store(d_b + (token0 * H + head) + r * H, d_b_C.to(d_b.dtype.element_ty), mask=inside)
    z_CK = load_rows(z, token0, r, key, head, stride_zt, stride_zh, inside, -1e30)  # on their way during the products
    q_CK = load_rows(q, token0, r, key, head, stride_qt, stride_qh, inside, 0.0)
    k_CK = load_rows(k, token0, r, key, head, stride_kt, stride_kh, inside, 0.0)
    total_K = tl.load(decay + here * K + key)
    d_Y, d_X, d_k_hat, E_CC, F_CC, at_end_K = state_products(
        *(states, adjoints, errors, d_o, d_v, slot, token0, r, inside, beta_C, key, head, stride_ot, stride_oh),
        *(H, K, V, C, BV, STAGES),
    )
    slope = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias_K = tl.load(dt_bias + head * K + key).to(tl.float32)
    biased_CK = z_CK.to(tl.float32) + bias_K[None, :]
    if BOUNDED:
        odds_CK = tl.minimum(exp2(-LOG2E * slope * biased_CK), 1e30)
        open_CK = reciprocal(1.0 + odds_CK)
        G_CK = sums_down(floor2 * open_CK, row, col)
        gamma_CK = exp2(G_CK)
    else:
        g_CK = softplus_gate(biased_CK, slope, LOG2E)
        high, low = halves(g_CK)
        gamma_CK = exp2(sums_where(col <= row, high, low))

    k_CK = k_CK.to(tl.float32) * k_norm[:, None]
    q_CK = q_CK.to(tl.float32) * q_norm[:, None]
    rows = (token0 * H + head) * K + (row * (H * K) + key[None, :])
    if BOUNDED:
        inverse_gamma = exp2(-G_CK)
        X, Y, k_out = rounded(k_CK * gamma_CK), rounded(q_CK * (gamma_CK * scale)), rounded(k_CK * inverse_gamma)
        X_dot, Y_dot, k_out_dot = narrow(X), narrow(Y), narrow(k_out)
        E_dot, F_dot = narrow(E_CC), narrow(F_CC)
        d_Y = tl.dot(F_dot, k_out_dot, d_Y)
        d_X = tl.dot(E_dot, k_out_dot, d_X)
        d_k_out = tl.dot(tl.trans(F_dot), Y_dot, tl.dot(tl.trans(E_dot), X_dot))
        d_k_hat = d_k_hat * total_K[None, :]
        to_end = k_out * d_k_hat
        d_G = X * d_X + Y * d_Y - k_out * d_k_out - to_end
        d_query = (scale * gamma_CK) * d_Y
        d_key = gamma_CK * d_X + inverse_gamma * (d_k_out + d_k_hat)
        at_end_K = tl.sum(to_end, 0) + total_K * at_end_K
        d_g = sums_up(d_G, row, col) + at_end_K[None, :]
        d_z_CK = d_g * (floor2 / LOG2E * slope) * (odds_CK * open_CK) * open_CK
        slope_terms = d_z_CK * tl.where(inside[:, None], biased_CK, 0.0)
    else:
        d_query = gamma_CK * d_Y
        d_in = gamma_CK * d_X
        d_k_hat = d_k_hat * exp2(sums_where(col > row, high, low))
        d_key = d_in + d_k_hat
        scaled_CK = q_CK * scale
        d_g = wide_sums_where(col >= row, k_CK * d_in + scaled_CK * d_query)
        d_g += wide_sums_where(col < row, k_CK * d_k_hat) + (total_K * at_end_K)[None, :]
        d_query, d_key, d_g = pair_gradients(d_query, d_key, d_g, scaled_CK, k_CK, E_CC, F_CC, high, low, row, col)
        d_query = scale * d_query
        d_z_CK = -slope * sigmoid(biased_CK, LOG2E) * d_g
        slope_terms = d_g * (g_CK / LOG2E)

    d_q_raw = q_norm[:, None] * (d_query - q_CK * tl.sum(q_CK * d_query, 1)[:, None])
    tl.store(d_q + rows, d_q_raw.to(d_q.dtype.element_ty), mask=inside[:, None])
    d_k_raw = k_norm[:, None] * (d_key - k_CK * tl.sum(k_CK * d_key, 1)[:, None])
    tl.store(d_k + rows, d_k_raw.to(d_k.dtype.element_ty), mask=inside[:, None])
    tl.store(d_z + rows, d_z_CK.to(d_z.dtype.element_ty), mask=inside[:, None])
    tl.store(d_bias + here * K + key, tl.sum(tl.where(inside[:, None], d_z_CK, 0.0), 0))
    tl.store(d_slope + here, tl.sum(tl.sum(tl.where(inside[:, None], slope_terms, 0.0), 1), 0))
