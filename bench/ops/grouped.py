"""Routed experts of a well-made PyTorch program: `grouped_mm` around an activation, an fp32 sum over the choices."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_situ(gate: Tensor, up: Tensor) -> Tensor:
    """SiTU (β₁ = 4, β₂ = 25) in fp32, operation by operation."""
    g, u = gate.float(), up.float()
    return (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)).to(gate.dtype)


def grouped_experts(
    z: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    activation: Callable[[Tensor, Tensor], Tensor] = eager_situ,
) -> Tensor:
    """Return ``Σ p_e w2_e act(w1_e z, w3_e z)``; shapes as in `tercet.ops.routed_experts`."""
    count, k = len(w1), experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    offs = torch.bincount(experts.flatten(), minlength=count).cumsum(0).int()
    rows = z[order // k]
    gate, up = (F.grouped_mm(rows, w.transpose(1, 2), offs=offs) for w in (w1, w3))
    y = F.grouped_mm(activation(gate, up), w2.transpose(1, 2), offs=offs)
    out = torch.zeros(z.shape, device=z.device)
    return out.index_add(0, order // k, y.float() * weights.flatten()[order][:, None]).to(z.dtype)
