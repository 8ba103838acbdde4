"""A model with every kind of parameter, small enough for a test to step it many times."""

from dataclasses import replace

import torch
from torch import nn

from tercet.config import ModelConfig
from tercet.model import CausalLM, build
from tercet.presets import tiny_model


def small_config(*, mtp: bool = True) -> ModelConfig:
    """KDA, MLA with q-LoRA, dense and routed layers; head widths differ, so that no two cuts coincide."""
    tiny = tiny_model()
    return replace(
        tiny,
        vocab_size=48,
        hidden_size=24,
        num_layers=3,
        full_attention_layers=(2,),
        intermediate_size=40,
        kda=replace(tiny.kda, num_heads=4, head_dim=8),
        mla=replace(
            tiny.mla,
            num_heads=4,
            q_lora_rank=12,
            kv_lora_rank=10,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
        ),
        moe=replace(tiny.moe, num_experts=6, intermediate_size=14, latent_size=16),
        num_nextn_predict_layers=1 if mtp else 0,
    )


def small_model(dtype: torch.dtype = torch.float64, *, mtp: bool = True) -> CausalLM:
    return build(small_config(mtp=mtp), seed=3).to(dtype)


def fill_gradients(model: nn.Module, seed: int, scale: float = 1e-2) -> None:
    """Give every parameter a random gradient of its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (noise * scale).to(parameter.dtype)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
