"""Layout-exact miniatures with random weights, for tests of any loader.

Every mechanism is made visible: the decay differs between heads and channels, pseudo-queries, norms, selection biases
and filters are away from their initial values, so that a loader that drops, swaps or pads one of them changes the
logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.layouts import Layout
from tercet.checkpoint.vision import miniature_vision
from tercet.checkpoint.weights import weights
from tercet.config import ModelConfig
from tercet.model import CausalLM, build
from tercet.model.names import published_tensors


def as_kimi_linear(config: ModelConfig) -> ModelConfig:
    """Return *config* with Kimi-Linear's mechanisms in place of K3's, at the same sizes."""
    return replace(
        config,
        activation="silu",
        attn_res_block_size=None,
        num_nextn_predict_layers=0,
        kda=replace(config.kda, gate_lower_bound=None, full_rank_gate=False),
        mla=replace(config.mla, q_lora_rank=None, output_gate=False),
        moe=replace(config.moe, latent_size=None, latent_norm=False, routed_scaling_factor=2.446),
    )


@torch.no_grad()
def random_model(config: ModelConfig, seed: int = 0) -> CausalLM:
    """Return a model with every weight away from its initial value, its matrices rounded to bfloat16."""
    model = build(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(tensor: Tensor, scale: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator) * scale

    tensors = dict(published_tensors(model))
    for weight in weights(config):
        data = tensors[weight.name].data
        if weight.name.endswith("_res_proj.weight"):
            data.copy_(noise(data, 0.5))
        elif weight.name.endswith(("norm.weight", "layernorm.weight")):
            data.copy_(1 + noise(data, 0.1))
        elif weight.name.endswith("e_score_correction_bias"):
            data.copy_(noise(data, 0.02))
        elif weight.role == "decay":
            data.copy_(data + noise(data, 0.3))
        elif len(weight.shape) == 2:
            data.mul_(4)  # at the initial 0.02 a narrow model's layers hardly touch the logits
        if not weight.fp32:
            data.copy_(data.bfloat16())
    return model.eval()


class _WithVision(ModelSource):
    """A text model beside random vision tensors."""

    def __init__(self, model: CausalLM, vision: dict[str, Any], layout: Layout, seed: int):
        super().__init__(model)
        self.vision = vision
        generator = torch.Generator().manual_seed(seed + 2)
        self._carried = {
            tensor.name: torch.randn(tensor.shape, generator=generator).mul_(0.02).bfloat16()
            for tensor in layout.stored(model.config, vision)
            if tensor.weight is None
        }

    def tensor(self, name: str) -> Tensor:
        """Return a random vision tensor."""
        return self._carried[name]


def write_miniature(
    path: str | Path, chosen: Layout, config: ModelConfig, *, seed: int = 0, vision: bool = True
) -> CausalLM:
    """Write a random checkpoint of *config*, and return the model before quantisation.

    Args:
        path: a new directory.
        chosen: ``k3`` or ``kimi-linear``.
        config: the architecture; see `as_kimi_linear`.
        seed: of all weights.
        vision: whether a K3 miniature carries a (small) vision tower.

    Raises:
        CheckpointError: *path* exists.
        ConfigError: the layout cannot express *config*.
    """
    model = random_model(config, seed)
    source = ModelSource(model)
    if vision and chosen.name == "k3":
        source = _WithVision(model, miniature_vision(config.hidden_size), chosen, seed)
    write_published(source, path, chosen, show=False)
    return model
