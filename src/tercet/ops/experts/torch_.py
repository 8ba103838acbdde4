"""Routed experts sorted by expert: one matrix product per expert and projection, one pass per element-wise step.

Shapes: T tokens, k choices, R = T·k rows sorted by expert, E experts, L latent width, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.ops.glu import Activation, situ_backward, situ_forward


def _silu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(gate)
    silu = gate * s
    return silu * up, grad * up * (s * (1 + gate * (1 - s))), grad * silu


def _grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of group e times ``weight[e]ᵀ``; weight is ``[E, out, in]``."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            torch.mm(x[start : start + count], weight[e].t(), out=out[start : start + count])
        start += count
    return out


def _grouped_weight_grad(left: Tensor, right: Tensor, counts: list[int]) -> Tensor:
    """``leftᵀ right`` per group: ``[E, left width, right width]``; empty groups are zero."""
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            torch.mm(left[start : start + count].t(), right[start : start + count], out=out[e])
        start += count
    return out


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        experts: Tensor,
        settings: tuple[Activation, float, float],
    ) -> Tensor:
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=w1.shape[0]).tolist()
        rows = z.index_select(0, order // experts.shape[1])
        gate, up = _grouped(rows, w1, counts), _grouped(rows, w3, counts)
        y = _grouped(_activate(gate, up, settings), w2, counts)
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(order), device=order.device)
        compute = torch.promote_types(z.dtype, torch.float32)
        y_TkL = y.index_select(0, slot).view(*experts.shape, -1).to(compute)
        ctx.save_for_backward(z, weights, w1, w2, w3, order, slot, gate, up)
        ctx.counts, ctx.settings = counts, settings
        return torch.einsum("tkl,tk->tl", y_TkL, weights.to(compute)).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, w1, w2, w3, order, slot, gate, up = ctx.saved_tensors
        counts, (activation, beta, linear_beta) = ctx.counts, ctx.settings
        compute = torch.promote_types(z.dtype, torch.float32)
        token = order // weights.shape[1]
        d_y = grads[0].index_select(0, token)
        p = weights.flatten().index_select(0, order).to(compute)[:, None]
        pulled = _grouped(d_y, w2.transpose(1, 2), counts).to(compute)
        g, u = gate.to(compute), up.to(compute)
        if activation == "situ":
            hidden, d_gate, d_up = situ_backward(pulled * p, g, u, beta, linear_beta)
        else:
            hidden, d_gate, d_up = _silu_backward(pulled * p, g, u)
        d_weights = torch.linalg.vecdot(pulled, hidden).index_select(0, slot).view_as(weights).to(weights.dtype)
        d_w2 = _grouped_weight_grad(d_y, (hidden * p).to(z.dtype), counts)
        d_gate, d_up = d_gate.to(z.dtype), d_up.to(z.dtype)
        rows = z.index_select(0, token)
        d_w1, d_w3 = _grouped_weight_grad(d_gate, rows, counts), _grouped_weight_grad(d_up, rows, counts)
        d_rows = _grouped(d_gate, w1.transpose(1, 2), counts).add_(_grouped(d_up, w3.transpose(1, 2), counts))
        d_z = d_rows.index_select(0, slot).view(*weights.shape, -1).to(compute).sum(1).to(z.dtype)
        return d_z, d_weights, d_w1, d_w2, d_w3, None, None


def _activate(gate: Tensor, up: Tensor, settings: tuple[Activation, float, float]) -> Tensor:
    activation, beta, linear_beta = settings
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    y = situ_forward(g, u, beta, linear_beta) if activation == "situ" else g * torch.sigmoid(g) * u
    return y.to(gate.dtype)


def routed_experts(
    z: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    activation: Activation,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See `tercet.ops.experts.routed_experts`."""
    return _RoutedExperts.apply(z, weights, w1, w2, w3, experts, (activation, beta, linear_beta))
