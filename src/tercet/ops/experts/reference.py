"""Routed experts as a loop over tokens' choices."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.glu import Activation, situ_glu_reference, swiglu


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
    compute = torch.promote_types(z.dtype, torch.float32)
    out = torch.zeros_like(z, dtype=compute)
    for e in range(w1.shape[0]):
        token, choice = (experts == e).nonzero(as_tuple=True)
        gate, up = z[token] @ w1[e].t(), z[token] @ w3[e].t()
        if activation == "situ":
            hidden = situ_glu_reference(gate, up, beta=beta, linear_beta=linear_beta)
        else:
            hidden = swiglu(gate, up)
        y = (hidden @ w2[e].t()).to(compute) * weights[token, choice][:, None].to(compute)
        out = out.index_add(0, token, y)
    return out.to(z.dtype)
