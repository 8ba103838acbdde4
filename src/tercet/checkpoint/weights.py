"""Every weight of a text model: published name, shape and what it belongs to.

Written out from the published tensor table (checkpoint.md §3 and §9) rather than read off the modules, so that a test
can hold the two against each other. Names carry no prefix; `layouts` adds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tercet.config import ModelConfig

Role = Literal["plain", "expert", "decay"]
"""How a layout may store a weight differently: experts can be MXFP4, A_log has its own shape."""


class Weight(NamedTuple):
    """One weight as the model sees it."""

    name: str
    shape: tuple[int, ...]
    component: str
    """What ``inspect`` counts it under."""
    layer: int | None
    """0-based decoder layer; None outside the layers."""
    fp32: bool = False
    """Kept in fp32 in files whatever the other weights are (model.md §12)."""
    role: Role = "plain"

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def weights(config: ModelConfig) -> Iterator[Weight]:
    """Yield all weights: decoder layers in order, the MTP layer if there is one, then what lies outside the layers."""
    for layer in range(config.num_layers):
        yield from layer_weights(config, layer)
    if config.num_nextn_predict_layers:
        yield from _mtp_layer(config)
    hidden = config.hidden_size
    yield Weight("model.embed_tokens.weight", (config.vocab_size, hidden), "embedding", None)
    yield Weight("lm_head.weight", (config.vocab_size, hidden), "head", None)
    yield Weight("model.norm.weight", (hidden,), "norms", None)
    if config.attn_res_block_size is not None:
        yield Weight("model.output_attn_res_norm.weight", (hidden,), "attention residuals", None)
        yield Weight("model.output_attn_res_proj.weight", (1, hidden), "attention residuals", None)


def layer_weights(config: ModelConfig, layer: int) -> Iterator[Weight]:
    """Yield the weights of decoder layer *layer* (0-based)."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    yield Weight(f"{prefix}input_layernorm.weight", (hidden,), "norms", layer)
    yield Weight(f"{prefix}post_attention_layernorm.weight", (hidden,), "norms", layer)
    if config.attn_res_block_size is not None:
        for place in ("self_attention_res", "mlp_res"):
            yield Weight(f"{prefix}{place}_norm.weight", (hidden,), "attention residuals", layer)
            yield Weight(f"{prefix}{place}_proj.weight", (1, hidden), "attention residuals", layer)
    yield from _mla(config, layer) if config.is_mla(layer) else _kda(config, layer)
    if config.is_moe(layer):
        yield from _moe(config, layer)
    else:
        yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size, "dense feed-forward", layer)


def _mlp(prefix: str, hidden: int, inner: int, component: str, layer: int) -> Iterator[Weight]:
    yield Weight(f"{prefix}gate_proj.weight", (inner, hidden), component, layer)
    yield Weight(f"{prefix}up_proj.weight", (inner, hidden), component, layer)
    yield Weight(f"{prefix}down_proj.weight", (hidden, inner), component, layer)


def _kda(config: ModelConfig, layer: int) -> Iterator[Weight]:
    kda, hidden, prefix = config.kda, config.hidden_size, f"model.layers.{layer}.self_attn."

    def weight(name: str, *shape: int, fp32: bool = False, role: Role = "plain") -> Weight:
        return Weight(prefix + name, shape, "KDA", layer, fp32, role)

    for part in "qkv":
        yield weight(f"{part}_proj.weight", kda.width, hidden)
        yield weight(f"{part}_conv1d.weight", kda.width, 1, kda.short_conv_kernel_size, fp32=True)
    yield weight("A_log", kda.num_heads, fp32=True, role="decay")
    yield weight("dt_bias", kda.width, fp32=True)
    yield weight("f_a_proj.weight", kda.head_dim, hidden)
    yield weight("f_b_proj.weight", kda.width, kda.head_dim)
    yield weight("b_proj.weight", kda.num_heads, hidden)
    if kda.full_rank_gate:
        yield weight("g_proj.weight", kda.width, hidden)
    else:
        yield weight("g_a_proj.weight", kda.head_dim, hidden)
        yield weight("g_b_proj.weight", kda.width, kda.head_dim)
    yield weight("o_norm.weight", kda.head_dim, fp32=True)
    yield weight("o_proj.weight", hidden, kda.width)


def _mla(config: ModelConfig, layer: int) -> Iterator[Weight]:
    mla, hidden, prefix = config.mla, config.hidden_size, f"model.layers.{layer}.self_attn."

    def weight(name: str, *shape: int) -> Weight:
        return Weight(f"{prefix}{name}.weight", shape, "MLA", layer)

    if mla.q_lora_rank is None:
        yield weight("q_proj", mla.num_heads * mla.qk_head_dim, hidden)
    else:
        yield weight("q_a_proj", mla.q_lora_rank, hidden)
        yield weight("q_a_layernorm", mla.q_lora_rank)
        yield weight("q_b_proj", mla.num_heads * mla.qk_head_dim, mla.q_lora_rank)
    yield weight("kv_a_proj_with_mqa", mla.cache_width, hidden)
    yield weight("kv_a_layernorm", mla.kv_lora_rank)
    yield weight("kv_b_proj", mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield weight("g_proj", mla.num_heads * mla.v_head_dim, hidden)
    yield weight("o_proj", hidden, mla.num_heads * mla.v_head_dim)


def _moe(config: ModelConfig, layer: int) -> Iterator[Weight]:
    moe, hidden, prefix = config.moe, config.hidden_size, f"model.layers.{layer}.block_sparse_moe."
    width, inner = moe.latent_size or hidden, moe.intermediate_size
    yield Weight(f"{prefix}gate.weight", (moe.num_experts, hidden), "router", layer)
    yield Weight(f"{prefix}gate.e_score_correction_bias", (moe.num_experts,), "router", layer, fp32=True)
    if moe.latent_size is not None:
        yield Weight(f"{prefix}routed_expert_down_proj.weight", (width, hidden), "latent projections", layer)
        yield Weight(f"{prefix}routed_expert_up_proj.weight", (hidden, width), "latent projections", layer)
    if moe.latent_norm:
        yield Weight(f"{prefix}routed_expert_norm.weight", (width,), "latent projections", layer)
    if moe.num_shared_experts:
        yield from _mlp(f"{prefix}shared_experts.", hidden, moe.num_shared_experts * inner, "shared experts", layer)
    for expert in range(moe.num_experts):
        for part, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
            name = f"{prefix}experts.{expert}.{part}.weight"
            yield Weight(name, shape, "routed experts", layer, role="expert")


def _mtp_layer(config: ModelConfig) -> Iterator[Weight]:
    """Yield the multi-token-prediction layer (model.md §9): MLA and MoE with ordinary residuals."""
    layer, hidden = config.num_layers, config.hidden_size
    prefix = f"model.layers.{layer}."
    yield Weight(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "multi-token prediction", layer)
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        yield Weight(f"{prefix}{name}.weight", (hidden,), "multi-token prediction", layer)
    yield from _mla(config, layer)
    yield from _moe(config, layer)
