"""The Kimi Delta Attention layer (report §2.1.1; Kimi-Linear §3)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.model.context import Context
from tercet.model.layers import RMSNorm, linear
from tercet.model.state import KDAState
from tercet.ops import fused_kda, gated_rms_norm, project, short_conv


class ShortConv(nn.Module):
    """Holder of one depthwise filter bank under its published name (``q_conv1d.weight`` …)."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class KimiDeltaAttention(nn.Module):
    """Short convolutions, gated delta rule, per-head RMSNorm, then the output gate."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        kda = config.kda
        self.kda, self.layer = kda, layer
        self.q_proj, self.k_proj, self.v_proj = (linear(config.hidden_size, kda.width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(kda.width, kda.short_conv_kernel_size) for _ in range(3)
        )
        self.f_a_proj = linear(config.hidden_size, kda.head_dim)
        self.f_b_proj = linear(kda.head_dim, kda.width)
        self.A_log = nn.Parameter(torch.empty(kda.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(kda.width))
        self.b_proj = linear(config.hidden_size, kda.num_heads)
        if kda.full_rank_gate:
            self.g_proj = linear(config.hidden_size, kda.width)
        else:
            self.g_a_proj = linear(config.hidden_size, kda.head_dim)
            self.g_b_proj = linear(kda.head_dim, kda.width)
        self.o_norm = RMSNorm(kda.head_dim, config.rms_norm_eps)
        self.o_proj = linear(kda.width, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"], context: Context
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Mix tokens; reads and updates this layer's `KDAState` when the context carries states."""
        kda, lead = self.kda, x.shape[:2]
        state = context.states[self.layer] if context.states is not None else None
        assert state is None or isinstance(state, KDAState)
        gate_proj = self.g_proj if kda.full_rank_gate else self.g_a_proj
        maps = self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, gate_proj
        *rows, decay, b, gate = project(x, [linear.weight for linear in maps])
        past = state.conv.split(kda.width, dim=-1) if state is not None else (None,) * 3
        convolved = [
            short_conv(r, conv.weight, state=before, cu_seqlens=context.cu_seqlens, tail=state is not None)
            for r, conv, before in zip(rows, (self.q_conv1d, self.k_conv1d, self.v_conv1d), past)
        ]
        q, k, v = (y.view(*lead, kda.num_heads, kda.head_dim) for y, _ in convolved)
        z = self.f_b_proj(decay).view(*lead, kda.num_heads, kda.head_dim)
        dt_bias = self.dt_bias.view(kda.num_heads, kda.head_dim)
        context.observer.decay(self.layer, z, self.A_log, dt_bias, kda.gate_lower_bound)
        o, matrix = fused_kda(
            q,
            k,
            v,
            z,
            b,
            self.A_log,
            dt_bias,
            lower_bound=kda.gate_lower_bound,
            state=state.recurrent if state is not None else None,
            cu_seqlens=context.cu_seqlens,
        )
        if state is not None:
            state.conv = torch.cat([tail for _, tail in convolved if tail is not None], dim=-1)
            state.recurrent = matrix
        gate = gate if kda.full_rank_gate else self.g_b_proj(gate)
        o = gated_rms_norm(o, gate.view_as(o), self.o_norm.weight, eps=self.o_norm.eps)
        return self.o_proj(o.flatten(2).to(x.dtype))
