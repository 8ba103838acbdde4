"""One decoder layer, and how layers hand information through depth.

With Attention Residuals there is no residual stream: a layer reads mixtures of `Depth.bank` (finished block sums) and
`Depth.prefix` (running sum of the current block) and adds to the prefix (report §2.2). Without them the prefix is the
ordinary residual stream and the bank stays empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.model.context import Context, Place
from tercet.model.kda import KimiDeltaAttention
from tercet.model.layers import MLP, RMSNorm, linear
from tercet.model.mla import MultiHeadLatentAttention
from tercet.model.moe import LatentMoE
from tercet.ops import attn_res, attn_res_read


@dataclass
class Depth:
    """What travels from layer to layer: the payload of a pipeline boundary."""

    bank: list[Float[Tensor, "batch tokens hidden"]]
    prefix: Float[Tensor, "batch tokens hidden"]


def mix(depth: Depth, norm: RMSNorm, proj: nn.Linear, layer: int, place: Place, context: Context) -> Tensor:
    """Return the Attention-Residuals mixture of the bank and the prefix."""
    sources, query = _sources(depth, norm, proj, layer, place, context)
    return attn_res(sources, norm.weight, query, eps=norm.eps)


def mix_and_norm(
    depth: Depth, norm: RMSNorm, proj: nn.Linear, then: RMSNorm, layer: int, place: Place, context: Context
) -> tuple[Tensor, Depth]:
    """Return ``then(mix(…))``, what a sub-layer reads, and the depth from which to go on (`attn_res_read`)."""
    sources, query = _sources(depth, norm, proj, layer, place, context)
    x, (*bank, prefix) = attn_res_read(sources, norm.weight, query, then.weight, eps=norm.eps, next_eps=then.eps)
    return x, Depth(bank, prefix)


def _sources(
    depth: Depth, norm: RMSNorm, proj: nn.Linear, layer: int, place: Place, context: Context
) -> tuple[list[Tensor], Tensor]:
    """Return what a mixture is of and its query, shown to the observer."""
    sources, query = [*depth.bank, depth.prefix], proj.weight.squeeze(0)  # a view, whose gradient is one too
    context.observer.mixing(layer, place, sources, norm.weight, query)
    return sources, query


class DecoderLayer(nn.Module):
    """Attention (KDA or MLA) and feed-forward (dense or LatentMoE), each behind its own norm."""

    def __init__(self, config: ModelConfig, layer: int, *, is_mla: bool, is_moe: bool, attn_res: bool):
        super().__init__()
        self.layer = layer
        self.block_size = config.attn_res_block_size if attn_res else None
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: nn.Module = (MultiHeadLatentAttention if is_mla else KimiDeltaAttention)(config, layer)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if is_moe:
            self.block_sparse_moe = LatentMoE(config, layer)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        self.is_moe = is_moe
        if self.block_size is not None:
            self.self_attention_res_norm = RMSNorm(hidden, eps)
            self.self_attention_res_proj = linear(hidden, 1)
            self.mlp_res_norm = RMSNorm(hidden, eps)
            self.mlp_res_proj = linear(hidden, 1)

    def forward(self, depth: Depth, context: Context) -> Depth:
        """Advance through this layer; the given `Depth` is left unchanged."""
        if self.block_size is None:
            x = depth.prefix
            x = x + self.self_attn(self.input_layernorm(x), context)
            return Depth(depth.bank, x + self._feed_forward(self.post_attention_layernorm(x), context))
        if depth.bank:
            x, depth = self._read(depth, "attention", context)
        else:
            x = self.input_layernorm(depth.prefix)
        a = self.self_attn(x, context)
        if self.layer % self.block_size == 0:
            depth = Depth([*depth.bank, depth.prefix], a)
        else:
            depth = Depth(depth.bank, depth.prefix + a)
        x, depth = self._read(depth, "mlp", context)
        return Depth(depth.bank, depth.prefix + self._feed_forward(x, context))

    def _read(self, depth: Depth, place: Place, context: Context) -> tuple[Tensor, Depth]:
        """Return the normed mixture in front of a sub-layer, and the depth from which to go on."""
        if place == "attention":
            parts = self.self_attention_res_norm, self.self_attention_res_proj, self.input_layernorm
        else:
            parts = self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm
        return mix_and_norm(depth, *parts, self.layer, place, context)

    def _feed_forward(self, x: Tensor, context: Context) -> Tensor:
        return self.block_sparse_moe(x, context) if self.is_moe else self.mlp(x)


def run_layer(layer: DecoderLayer, depth: Depth, context: Context) -> Depth:
    """Run one layer, recomputing it in the backward pass when the context asks for that."""
    if not context.recompute or not torch.is_grad_enabled():
        return layer(depth, context)

    def body(prefix: Tensor, *bank: Tensor) -> tuple[Tensor, ...]:
        out = layer(Depth(list(bank), prefix), context)
        return (out.prefix, *out.bank)

    prefix, *bank = torch.utils.checkpoint.checkpoint(body, depth.prefix, *depth.bank, use_reentrant=False)
    return Depth(bank, prefix)
