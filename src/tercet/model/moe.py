"""Stable LatentMoE (report §2.3): sigmoid router, experts at latent width, norm before the way up, shared experts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.model.context import Context
from tercet.model.layers import MLP, RMSNorm, linear
from tercet.ops import merge, project, route, routed_experts, router_logits


class Router(nn.Module):
    """Router weight and the fp32 selection bias that balancing writes (never the gradient)."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens experts"]:
        """Return fp32 logits from the full-width row."""
        return router_logits(x, self.weight)


class Experts(nn.Module):
    """All routed experts in three stacked tensors; published files hold them apart (`tercet.model.names`)."""

    def __init__(self, num_experts: int, width: int, inner: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, inner))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, width))


class LatentMoE(nn.Module):
    """``up(norm(Σ p_e E_e(down x))) + shared(x)``; without a latent size, ``Σ p_e E_e(x) + shared(x)``."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        moe = config.moe
        self.config, self.moe, self.layer = config, moe, layer
        width = moe.latent_size or config.hidden_size
        self.gate = Router(config.hidden_size, moe.num_experts)
        self.experts = Experts(moe.num_experts, width, moe.intermediate_size)
        if moe.latent_size is not None:
            self.routed_expert_down_proj = linear(config.hidden_size, width)
            self.routed_expert_up_proj = linear(width, config.hidden_size)
        if moe.latent_norm:
            self.routed_expert_norm = RMSNorm(width, config.rms_norm_eps)
        if moe.num_shared_experts:
            self.shared_experts = MLP(config, moe.num_shared_experts * moe.intermediate_size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"], context: Context
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Apply the block to every token."""
        moe, rows = self.moe, x.flatten(0, 1)
        routing = route(
            self.gate(rows),
            self.gate.e_score_correction_bias,
            top_k=moe.num_experts_per_token,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
            forced=context.forced_routing.get(self.layer) if context.forced_routing else None,
        )
        context.observer.routing(self.layer, routing)
        z, *shared = self._read(rows)
        r = routed_experts(
            z,
            routing.weights,
            routing.experts,
            self.experts.w1,
            self.experts.w2,
            self.experts.w3,
            activation=self.config.activation,
            beta=self.config.situ_beta,
            linear_beta=self.config.situ_linear_beta,
        )
        if moe.latent_norm:
            r = self.routed_expert_norm(r)
        return self._write(r, shared).view_as(x)

    def _read(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return what the routed experts read, then gate and up of the shared ones: maps of the same rows."""
        maps = [] if self.moe.latent_size is None else [self.routed_expert_down_proj]
        if self.moe.num_shared_experts:
            maps += [self.shared_experts.gate_proj, self.shared_experts.up_proj]
        mapped = project(rows, [linear.weight for linear in maps]) if maps else ()
        return (rows, *mapped) if self.moe.latent_size is None else mapped

    def _write(self, routed: Tensor, shared: list[Tensor]) -> Tensor:
        """Return the sum over both kinds of experts at full width; *shared* is gate and up, or empty."""
        latent = self.moe.latent_size is not None
        rows, maps = ([routed], [self.routed_expert_up_proj]) if latent else ([], [])
        if shared:
            rows.append(self.shared_experts.activate(*shared))
            maps.append(self.shared_experts.down_proj)
        if not rows:
            return routed
        y = merge(rows, [linear.weight for linear in maps])
        return y if latent else routed + y
