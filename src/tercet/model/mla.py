"""Multi-head latent attention without position encoding, with an output gate (report §2.1.2)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.model.context import Attended, Context
from tercet.model.layers import LATENT_NORM_EPS, RMSNorm, linear
from tercet.model.state import MLAState
from tercet.ops import mla_attention, project, sigmoid_gate
from tercet.ops.packing import sequence_lengths


class MultiHeadLatentAttention(nn.Module):
    """Expanded attention for whole sequences, absorbed attention on the latent cache for continuations."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        mla = config.mla
        self.mla, self.layer = mla, layer
        self.scale = mla.qk_head_dim**-0.5
        if mla.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, mla.num_heads * mla.qk_head_dim)
        else:
            self.q_a_proj = linear(config.hidden_size, mla.q_lora_rank)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, mla.cache_width)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        if mla.output_gate:
            self.g_proj = linear(config.hidden_size, mla.num_heads * mla.v_head_dim)
        self.o_proj = linear(mla.num_heads * mla.v_head_dim, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"], context: Context
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Attend; appends to and reads this layer's `MLAState` when the context carries states."""
        mla = self.mla
        maps = [self.q_proj if mla.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]
        maps += [self.g_proj] if mla.output_gate else []
        q, rows, *gate = project(x, [linear.weight for linear in maps])
        if mla.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.view(*x.shape[:2], mla.num_heads, mla.qk_head_dim)
        latent, k_pe = rows.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if context.states is None:
            o = self._expanded(q, latent, k_pe, context)
        else:
            state = context.states[self.layer]
            assert isinstance(state, MLAState)
            o = self._cached(q, torch.cat([latent, k_pe], dim=-1), state, context)
        if mla.output_gate:
            o = sigmoid_gate(o, *gate, dtype=x.dtype)
        return self.o_proj(o.flatten(2).to(x.dtype))

    def _expanded(self, q: Tensor, latent: Tensor, k_pe: Tensor, context: Context) -> Tensor:
        """Attend with keys and values expanded per head; the output stays at least fp32 (report §2.1.2)."""
        mla = self.mla
        kv = self.kv_b_proj(latent).view(*latent.shape[:2], mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim)
        o, row_max = mla_attention(q, kv, k_pe, scale=self.scale, cu_seqlens=context.cu_seqlens)
        attended = Attended(q, kv[..., : mla.qk_nope_head_dim], k_pe, self.scale, context.cu_seqlens, row_max)
        context.observer.attention(self.layer, attended)
        return o

    def _cached(self, q: Tensor, rows: Tensor, state: MLAState, context: Context) -> Tensor:
        """Attend in latent space: queries absorb the key expansion, outputs the value expansion."""
        mla = self.mla
        lengths = sequence_lengths(q.shape[0], q.shape[1], context.cu_seqlens)
        expansion = self.kv_b_proj.weight.view(mla.num_heads, -1, mla.kv_lora_rank)
        W_UK, W_UV = expansion.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
        q_nope, q_pe = q.flatten(0, 1).split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, W_UK), q_pe], dim=-1)
        wide = torch.promote_types(q.dtype, torch.float32)
        outputs = []
        for n, (query, new) in enumerate(zip(absorbed.split(list(lengths)), rows.flatten(0, 1).split(list(lengths)))):
            cache = state.append(n, new)
            logits = torch.einsum("thw,sw->hts", query, cache).to(wide) * self.scale
            past = cache.shape[0] - new.shape[0]
            future = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(past + 1)
            p = logits.masked_fill_(future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hts,sl->thl", p, cache[:, : mla.kv_lora_rank].to(wide)))
        o = torch.einsum("thl,hvl->thv", torch.cat(outputs), W_UV.to(wide))
        return o.view(*q.shape[:3], mla.v_head_dim)
