"""Routed experts sorted by expert: one matrix product per expert and projection, one pass per element-wise step.

Shapes: T tokens, k choices, R = T·k rows sorted by expert, E experts, L latent width, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tercet.ops.compiling import result
from tercet.ops.glu import Activation, situ_backward, situ_forward

Settings = tuple[Activation, float, float]
"""Activation, SiTU's β₁ and β₂."""


def _activate(gate: Tensor, up: Tensor, settings: Settings) -> Tensor:
    activation, beta, linear_beta = settings
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    y = situ_forward(g, u, beta, linear_beta) if activation == "situ" else g * torch.sigmoid(g) * u
    return y.to(gate.dtype)


def _activate_backward(grad: Tensor, gate: Tensor, up: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(hidden, ∂gate, ∂up)`` in grad's dtype."""
    activation, beta, linear_beta = settings
    g, u = gate.to(grad.dtype), up.to(grad.dtype)
    if activation == "situ":
        return situ_backward(grad, g, u, beta, linear_beta)
    s = torch.sigmoid(g)
    silu = g * s
    return silu * u, grad * u * (s * (1 + g * (1 - s))), grad * silu


class _RoutedExperts(torch.autograd.Function):
    """Works expert by expert, so that one expert's rows stay in cache from the first product to the last."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, experts: Tensor, settings: Settings
    ) -> Tensor:
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=w1.shape[0]).tolist()
        rows = z.index_select(0, order // experts.shape[1])
        gate, up = (rows.new_empty(len(order), w1.shape[1]) for _ in range(2))
        y = torch.empty_like(rows)
        for e, here in _groups(counts):
            torch.mm(rows[here], w1[e].t(), out=gate[here])
            torch.mm(rows[here], w3[e].t(), out=up[here])
            torch.mm(_activate(gate[here], up[here], settings), w2[e].t(), out=y[here])
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(order), device=order.device)
        compute = torch.promote_types(z.dtype, torch.float32)
        y_TkL = y.index_select(0, slot).view(*experts.shape, z.shape[1]).to(compute)
        ctx.save_for_backward(z, weights, w1, w2, w3, order, slot, gate, up)
        ctx.counts, ctx.settings = counts, settings
        return result((y_TkL * weights.to(compute)[..., None]).sum(1), z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, w1, w2, w3, order, slot, gate, up = ctx.saved_tensors
        compute = torch.promote_types(z.dtype, torch.float32)
        token = order // weights.shape[1]
        d_y, rows = grads[0].index_select(0, token), z.index_select(0, token)
        p = weights.flatten().index_select(0, order).to(compute)
        d_p, d_rows = torch.empty_like(p), torch.empty_like(rows)
        d_w1, d_w2, d_w3 = (torch.zeros_like(w) for w in (w1, w2, w3))
        for e, here in _groups(ctx.counts):
            pulled = (d_y[here] @ w2[e]).to(compute)
            factor = p[here, None]
            hidden, d_gate, d_up = _activate_backward(pulled * factor, gate[here], up[here], ctx.settings)
            d_p[here] = torch.linalg.vecdot(pulled, hidden)
            d_gate, d_up = d_gate.to(z.dtype), d_up.to(z.dtype)
            torch.mm(d_y[here].t(), hidden.mul_(factor).to(z.dtype), out=d_w2[e])
            torch.mm(d_gate.t(), rows[here], out=d_w1[e])
            torch.mm(d_up.t(), rows[here], out=d_w3[e])
            torch.mm(d_gate, w1[e], out=d_rows[here])
            d_rows[here].addmm_(d_up, w3[e])
        d_weights = d_p.index_select(0, slot).view_as(weights).to(weights.dtype)
        d_z = d_rows.index_select(0, slot).view(*weights.shape, z.shape[1]).to(compute).sum(1).to(z.dtype)
        return d_z, d_weights, d_w1, d_w2, d_w3, None, None


def _groups(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield every expert that has rows, with the slice of its rows."""
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(start, start + count)
        start += count


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
