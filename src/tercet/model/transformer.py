"""The whole text model: embedding, decoder layers, final mix, norm, head — and the multi-token-prediction layer.

Module names give the published tensor names (``model.layers.7.self_attn.q_proj.weight``); the one exception, stacked
experts, is undone by `tercet.model.names`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.errors import ShapeError
from tercet.model.context import PLAIN, Context
from tercet.model.decoder import DecoderLayer, Depth, mix, run_layer
from tercet.model.layers import RMSNorm, linear


class Features(NamedTuple):
    """What the backbone gives for every token."""

    mixture: Float[Tensor, "batch tokens hidden"]
    """After the final Attention-Residuals mix, before the final norm: what a draft or MTP head reads."""
    hidden: Float[Tensor, "batch tokens hidden"]
    """After the final norm: what the head reads."""


class SharedHead(nn.Module):
    """Norm in front of the (shared) output head of the MTP layer, under its published name."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """Predicts token t+2 from the mixture at t and the embedding of token t+1 (model.md §9).

    An MLA + MoE layer with ordinary residuals; embedding and head are the main model's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.num_layers, is_mla=True, is_moe=True, attn_res=False)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)


class Backbone(nn.Module):
    """Everything below the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[DecoderLayer] = [
            DecoderLayer(config, n, is_mla=config.is_mla(n), is_moe=config.is_moe(n), attn_res=True)
            for n in range(config.num_layers)
        ]
        if config.num_nextn_predict_layers:
            layers.append(MTPLayer(config))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = linear(config.hidden_size, 1)

    def forward(self, tokens: Int[Tensor, "batch tokens"], context: Context) -> Features:
        """Run all decoder layers."""
        config = self.config
        depth = Depth([], self.embed_tokens(tokens))
        for layer in self.layers[: config.num_layers]:
            assert isinstance(layer, DecoderLayer)
            depth = run_layer(layer, depth, context)
        mixture = depth.prefix
        if config.attn_res_block_size is not None:
            norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
            mixture = mix(depth, norm, proj, config.num_layers, "output", context)
        return Features(mixture, self.norm(mixture))


class CausalLM(nn.Module):
    """A K3-shaped language model."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def features(self, tokens: Int[Tensor, "batch tokens"], context: Context | None = None) -> Features:
        """Return what the head and the MTP layer read.

        Raises:
            ShapeError: tokens is not ``[batch, tokens]`` of integers.
        """
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ShapeError(
                f"tokens must be an integer tensor [batch, tokens], got {tuple(tokens.shape)} {tokens.dtype}"
            )
        return self.model(tokens, context or PLAIN)

    def forward(
        self, tokens: Int[Tensor, "batch tokens"], context: Context | None = None
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Return logits, at least fp32."""
        return self.logits(self.features(tokens, context).hidden)

    def logits(self, hidden: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead vocab"]:
        """Apply the head."""
        y = self.lm_head(hidden)
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def mtp_hidden(
        self,
        mixture: Float[Tensor, "batch tokens hidden"],
        next_tokens: Int[Tensor, "batch tokens"],
        context: Context | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Return the MTP layer's rows for the head: position t predicts token t+2.

        Args:
            mixture: `Features.mixture` of the same tokens.
            next_tokens: token t+1 at position t; a position without one must be given no loss.
            context: packing and observer; states are not supported here.
        """
        layer = self.model.layers[-1]
        assert isinstance(layer, MTPLayer), "the configuration has no MTP layer"
        context = context or PLAIN
        embedded = layer.enorm(self.model.embed_tokens(next_tokens))
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(mixture)], dim=-1))
        return layer.shared_head.norm(run_layer(layer, Depth([], x), context).prefix)
