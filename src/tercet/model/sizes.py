"""What a configuration costs before anything runs: parameters, cache, memory and FLOPs, from shapes alone.

Parameters are counted on the meta device, from the very module that trains; nothing here repeats the architecture in
a second form. Numbers of the published models are asserted in ``tests/model/test_sizes.py`` (model.md §2 and §13).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercet.config import ModelConfig
from tercet.model.transformer import CausalLM

_COMPONENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embedding", ("embed_tokens.",)),
    ("head", ("lm_head.",)),
    ("routed experts", (".experts.",)),
    ("shared experts", (".shared_experts.",)),
    ("router and latent", (".block_sparse_moe.",)),
    ("dense MLP", (".mlp.",)),
    ("norms and AttnRes", ("norm.weight", "_res_proj.")),
)
"""Component of a tensor by the first pattern its name contains; attention layers are told apart by their index."""


@dataclass(frozen=True)
class Component:
    """One row of the parameter table."""

    name: str
    total: int
    active: int
    """Parameters that one token uses; an embedding row counts as the whole table here."""
    matrices: int
    """Parameters that one token multiplies with (two FLOPs each): `active` without lookups, vectors and queries."""


@dataclass(frozen=True)
class Sizes:
    """Counts of one `ModelConfig`; everything is a number of values, bytes or FLOPs."""

    components: tuple[Component, ...]
    config: ModelConfig

    def component(self, name: str) -> Component:
        """Return one row by name (zeros if the model has no such part)."""
        return next((c for c in self.components if c.name == name), Component(name, 0, 0, 0))

    @property
    def total(self) -> int:
        """All stored values, including the routers' selection biases."""
        return sum(c.total for c in self.components)

    @property
    def active(self) -> int:
        """Parameters one token uses at inference, embedding table included, MTP layer excluded."""
        return sum(c.active for c in self.components if c.name != "MTP layer")

    @property
    def active_without_embedding(self) -> int:
        """The figure the report quotes: `active` without the input embedding."""
        return self.active - self.component("embedding").active

    def mla_cache_bytes(self, value_bytes: int = 2) -> int:
        """Bytes of latent cache per token of context, over all MLA layers (bf16 by default)."""
        return len(self.config.full_attention_layers) * self.config.mla.cache_width * value_bytes

    def kda_state_bytes(self) -> int:
        """Bytes of fp32 recurrent state per sequence, over all KDA layers; independent of the length."""
        kda = self.config.kda
        return len(self.config.kda_layers) * kda.num_heads * kda.head_dim**2 * 4

    def conv_state_bytes(self, value_bytes: int = 2) -> int:
        """Bytes of convolution history per sequence, over all KDA layers."""
        kda = self.config.kda
        return len(self.config.kda_layers) * (kda.short_conv_kernel_size - 1) * 3 * kda.width * value_bytes

    def forward_flops(self, length: int, *, training: bool = False) -> float:
        """FLOPs per token of one forward pass over sequences of *length* tokens.

        Two per multiplied parameter; the causal half of MLA's two products, ``heads · (qk + v) · (length + 1)``; and
        seven per value of KDA's state (decay 1, read 2, write 2, output 2), independent of the length. Norms, gates,
        mixes and softmax are left out. With *training* the MTP layer and its pass through the head are included.
        """
        config, kda, mla = self.config, self.config.kda, self.config.mla
        attention_layers = len(config.full_attention_layers)
        products = sum(c.matrices for c in self.components if c.name != "MTP layer")
        if training and config.num_nextn_predict_layers:
            attention_layers += 1
            products += self.component("MTP layer").matrices + self.component("head").matrices
        attention = attention_layers * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim) * (length + 1)
        recurrence = 7 * len(config.kda_layers) * kda.num_heads * kda.head_dim**2
        return 2 * products + attention + recurrence

    def training_flops(self, length: int, *, recompute: bool = False) -> float:
        """FLOPs per token of forward and backward (three forwards; four when layers are recomputed)."""
        return (4 if recompute else 3) * self.forward_flops(length, training=True)

    def training_bytes(self, *, bf16: bool = True) -> dict[str, int]:
        """Bytes that training keeps whatever the batch, by purpose.

        fp32 master weights, gradients and momentum; a second moment for everything AdamW trains (embedding, head,
        norms, filters and other vectors); and a bf16 copy for the products when they run in bf16.
        """
        adam = sum(self.component(name).total for name in ("embedding", "head", "norms and AttnRes"))
        return {
            "bf16 weights": 2 * self.total if bf16 else 0,
            "fp32 master weights": 4 * self.total,
            "fp32 gradients": 4 * self.total,
            "fp32 momentum": 4 * self.total,
            "fp32 second moment": 4 * adam,
        }

    def activation_bytes(self, tokens: int, *, value_bytes: int = 2, recompute: bool = False) -> int:
        """Estimate what a forward pass of *tokens* tokens keeps for its backward pass.

        Counted in widths per token: what each sub-layer's products and element-wise steps read. KDA's fp32 tile terms
        and states are included. With *recompute* only each layer's input, and one layer at a time in full.
        """
        config = self.config
        layers = [self._layer_values(n) for n in range(config.num_layers)]
        boundary = config.hidden_size * (config.num_layers + 2)
        kept = boundary + max(layers) if recompute else sum(layers)
        return int(tokens * kept * value_bytes)

    def _layer_values(self, layer: int) -> int:
        config, hidden = self.config, self.config.hidden_size
        kda, mla, moe = config.kda, config.mla, config.moe
        mixes = 0 if config.attn_res_block_size is None else 4 * hidden
        if config.is_mla(layer):
            heads = mla.num_heads
            attention = 2 * hidden + 2 * (mla.q_lora_rank or 0) + 3 * mla.cache_width
            attention += heads * (4 * mla.qk_head_dim + 5 * mla.v_head_dim)
        else:
            # q, k, v before and after the filter; gates; norms; and, in fp32, tile operands and one state a tile.
            attention = 2 * hidden + 26 * kda.width + 2 * kda.width * kda.head_dim // 32
        if config.is_moe(layer):
            width = moe.latent_size or hidden
            routed = moe.num_experts_per_token * (2 * moe.intermediate_size + width)
            feed = 2 * hidden + routed + 2 * width + 4 * moe.num_experts
            feed += 3 * moe.num_shared_experts * moe.intermediate_size
        else:
            feed = 2 * hidden + 3 * config.intermediate_size
        return mixes + attention + feed


def sizes(config: ModelConfig) -> Sizes:
    """Count *config* on the meta device; no memory is allocated, whatever its size."""
    with torch.device("meta"):
        model = CausalLM(config)
    share = config.moe.num_experts_per_token / config.moe.num_experts
    rows: dict[str, list[int]] = {}
    for name, tensor in model.state_dict().items():
        component = _component(config, name)
        routed = ".experts." in name
        count = tensor.numel()
        active = round(count * share) if routed else count
        multiplied = active if tensor.ndim > 1 and tensor.shape[0] > 1 and "embed_tokens" not in name else 0
        row = rows.setdefault(component, [0, 0, 0])
        for n, value in enumerate((count, active, multiplied)):
            row[n] += value
    order = {name: n for n, name in enumerate(("embedding", "KDA attention", "MLA attention", "dense MLP"))}
    ranked = sorted(rows.items(), key=lambda item: order.get(item[0], len(order)))
    return Sizes(tuple(Component(name, *row) for name, row in ranked), config)


def _component(config: ModelConfig, name: str) -> str:
    parts = name.split(".")
    layer = int(parts[2]) if parts[1:2] == ["layers"] else None
    if layer is not None and layer >= config.num_layers:
        return "MTP layer"
    if "self_attn" in parts:
        assert layer is not None
        return "MLA attention" if config.is_mla(layer) else "KDA attention"
    return next(component for component, patterns in _COMPONENTS if any(p in name for p in patterns))
