"""KDA in tiles: the chunk form of the report (eq. 3–4), vectorised over tiles, heads and sequences.

Inside a tile of C tokens everything is a small matrix product; across tiles the state obeys one affine recurrence
``S ← M S + N`` (eq. 17's building block), which `_AffineScan` walks with all sequences side by side. Two ways to
form the pairwise decays ``exp(G_r − G_i)``:

* *factorised*, when every gate is ≥ −5: each half of the tile is one product of two factors around its own middle,
  both within e^±40, so that neither they nor their gradients leave fp32; pairs across the halves factor at the cut;
* *halving*, for any gate: split the tile into halves, and pairs across the cut factor through it with both factors
  ≤ 1; recurse into the halves. No ``[C, C, K]`` tensor, no overflow, no cancellation of large sums.

Shapes: T flat tokens, N sequences, X tiles, C tokens a tile, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.ops.packing import Tiling, from_tiles, sequence_lengths, tiling, to_tiles

TILE = 32
"""Tokens a tile: two halves of 16, the report's tile for a decay of at most five nats a token."""


class _UnitLowerInverse(torch.autograd.Function):
    """``(I + A)⁻¹`` for strictly lower triangular A ``[…, C, C]`` by forward substitution, row by row."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        inverse = -A
        for row in range(1, A.shape[-1]):
            done = inverse[..., :row, :row].clone()
            inverse[..., row, :row] += torch.matmul(inverse[..., row, None, :row], done).squeeze(-2)
        inverse.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)


class _AffineScan(torch.autograd.Function):
    """``S_{j+1} = M_j S_j + N_j`` along every sequence's tiles.

    M is ``[X, H, K, K]`` and N ``[X, H, K, V]`` in tile order; `initial` is ``[N, H, K, V]`` in `Tiling.order`. Returns
    the state *before* every tile and the final state of every sequence, in the same orders.
    """

    @staticmethod
    def forward(ctx: Any, M: Tensor, N: Tensor, initial: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        before = torch.empty_like(N)
        final = initial.clone()
        row = 0
        for active in counts:
            here = slice(row, row + active)
            before[here] = final[:active]
            final[:active] = N[here] + M[here] @ before[here]
            row += active
        ctx.save_for_backward(M, before)
        ctx.counts = counts
        return before, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        M, before = ctx.saved_tensors
        d_before, d_final = grads
        carry = d_final.clone()
        d_after = torch.empty_like(before)
        row = M.shape[0]
        for active in reversed(ctx.counts):
            row -= active
            here = slice(row, row + active)
            d_after[here] = carry[:active]
            carry[:active] = d_before[here] + M[here].transpose(-1, -2) @ d_after[here]
        return d_after @ before.transpose(-1, -2), d_after, carry, None


def _later(g: Tensor) -> Tensor:
    """Sum of the rows after each row: exact where subtracting a large row from its own sum would cancel."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _pairwise_factorised(rows: tuple[Tensor, ...], k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """``Σ_c x_r[c] k_i[c] exp(G_r[c] − G_i[c])`` for each x of *rows*; entries with r < i are zero.

    Each half of the tile is one dense product around its own middle; pairs across the cut factor through it.
    """
    lead, half, width = k.shape[:-2], k.shape[-2] // 2, k.shape[-1]
    halves = (*lead, 2, half, width)
    G = g.view(halves).cumsum(-2)
    centred = G - G[..., half // 2, None, :].detach()  # any centre gives the same value and gradient
    k_halves = k.view(halves)
    right, left = (k_halves * (-centred).exp()).mT, centred.exp()
    into = G[..., 1, :, :].exp()
    before = (k_halves[..., 0, :, :] * (G[..., 0, -1:, :] - G[..., 0, :, :]).exp()).mT
    results = []
    for x in rows:
        x_halves = x.view(halves)
        upper, lower = ((x_halves * left) @ right).tril().unbind(-3)
        across = (x_halves[..., 1, :, :] * into) @ before
        results.append(torch.cat([F.pad(upper, (0, half)), torch.cat([across, lower], -1)], -2))
    return tuple(results)


def _pairwise_halving(rows: tuple[Tensor, ...], k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Do as `_pairwise_factorised` for gates of any size; entries with r < i are zero."""
    lead, size = k.shape[:-2], k.shape[-2]
    results = [torch.diag_embed((x * k).sum(-1)) for x in rows]
    half = 1
    while half < size:
        split = (*lead, size // (2 * half), 2, half, k.shape[-1])
        lower_g, upper_g = g.view(split).unbind(-3)
        into = upper_g.cumsum(-2).exp()
        out_of = _later(lower_g).exp()
        right = (k.view(split)[..., 0, :, :] * out_of).transpose(-1, -2)
        for n, x in enumerate(rows):
            block = (x.view(split)[..., 1, :, :] * into) @ right
            grid = results[n].view(*lead, size // (2 * half), 2, half, size // (2 * half), 2, half)
            addition = torch.zeros_like(grid)
            diagonal = addition[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)
            diagonal.copy_(block.movedim(-3, -1))
            results[n] = results[n] + addition.view_as(results[n])
        half *= 2
    return tuple(results)


def _tile_terms(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return P, Γ⊙Q, W, U, M and N of every tile; all inputs are ``[X, H, C, …]``."""
    G = g.cumsum(-2)
    gamma = G.exp()
    total = G[..., -1:, :]
    if bounded:
        P, A = _pairwise_factorised((q, k), k, g)
        to_end = (total - G).exp()
    else:
        P, A = _pairwise_halving((q, k), k, g)
        to_end = _later(g).exp()
    solve = _UnitLowerInverse.apply(A.tril(-1) * beta[..., None]) * beta[..., None, :]
    W = solve @ (k * gamma)
    U = solve @ v
    K_hat = (k * to_end).transpose(-1, -2)
    M = torch.diag_embed(total.squeeze(-2).exp()) - K_hat @ W
    return P, q * gamma, W, U, M, K_hat @ U


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.kda.kda`; *gate_floor* in [-5, 0) promises ``g ≥ gate_floor`` and allows the factorised form."""
    batch, tokens, heads, width_k = q.shape
    width_v = v.shape[-1]
    lengths = sequence_lengths(batch, tokens, cu_seqlens)
    compute = torch.promote_types(q.dtype, torch.float32)
    if lengths and set(lengths) == {1}:
        return _step(q, k, v, g, beta, scale, state, compute)
    plan = tiling(lengths, TILE, q.device)
    if state is None:
        initial = torch.zeros(len(lengths), heads, width_k, width_v, dtype=compute, device=q.device)
    else:
        initial = state.to(compute).transpose(-1, -2).index_select(0, plan.order)
    if tokens * batch == 0:
        final = initial
        o = v.new_zeros(batch, tokens, heads, width_v)
    else:
        tiles = [_head_tiles(x, plan, compute) for x in (q * scale, k, v, g, beta[..., None])]
        q_XHCK, k_XHCK, v_XHCV, g_XHCK, beta_XHC1 = tiles
        bounded = gate_floor is not None
        P, q_gamma, W, U, M, N = _tile_terms(q_XHCK, k_XHCK, v_XHCV, g_XHCK, beta_XHC1.squeeze(-1), bounded)
        before, final = _AffineScan.apply(M, N, initial, plan.counts)
        o_XHCV = q_gamma @ before + P @ (U - W @ before)
        o = from_tiles(o_XHCV.transpose(1, 2), plan).view(batch, tokens, heads, width_v).to(v.dtype)
    original = torch.empty_like(plan.order)
    original[plan.order] = torch.arange(len(lengths), device=q.device)
    return o, final.index_select(0, original).transpose(-1, -2).contiguous()


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor | None,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: the recurrence itself, which a decoder calls once a layer and token."""
    q_NHK, k_NHK, v_NHV, g_NHK, beta_NH = (x.flatten(0, 1).to(compute) for x in (q * scale, k, v, g, beta))
    if state is None:
        state = v_NHV.new_zeros(*v_NHV.shape, k.shape[-1])
    decayed = state.to(compute) * g_NHK.exp()[:, :, None, :]
    u_NHV = beta_NH[..., None] * (v_NHV - (decayed @ k_NHK[..., None]).squeeze(-1))
    final = decayed + u_NHV[..., None] * k_NHK[:, :, None, :]
    return (final @ q_NHK[..., None]).squeeze(-1).view_as(v).to(v.dtype), final


def _head_tiles(x: Tensor, plan: Tiling, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, D]`` → ``[X, H, C, D]`` in the compute dtype."""
    return to_tiles(x.flatten(0, 1).to(dtype), plan).transpose(1, 2).contiguous()
