"""The two smallest building blocks: RMSNorm and the dense gated MLP."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.ops import project, rms_norm, situ_glu, swiglu

LATENT_NORM_EPS = 1e-6
"""Epsilon of MLA's q_a and kv_a norms; every other norm uses the configuration's (model.md §3)."""


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a learned weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead dim"]:
        """Normalise x."""
        return rms_norm(x, self.weight, eps=self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Make a linear map without bias (the architecture has none anywhere); `initialize` fills it."""
    return nn.Linear(inputs, outputs, bias=False)


class MLP(nn.Module):
    """``W_down act(W_gate x, W_up x)`` with SiTU (report eq. 12) or SiLU."""

    def __init__(self, config: ModelConfig, intermediate_size: int):
        super().__init__()
        self.config = config
        self.gate_proj = linear(config.hidden_size, intermediate_size)
        self.up_proj = linear(config.hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, config.hidden_size)

    def forward(self, x: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead hidden"]:
        """Apply the block."""
        return self.down_proj(self.activate(*project(x, [self.gate_proj.weight, self.up_proj.weight])))

    def activate(self, gate: Float[Tensor, "*lead inner"], up: Float[Tensor, "*lead inner"]) -> Tensor:
        """Return what the way down reads."""
        if self.config.activation == "situ":
            return situ_glu(gate, up, beta=self.config.situ_beta, linear_beta=self.config.situ_linear_beta)
        return swiglu(gate, up)
