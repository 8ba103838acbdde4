"""Initial values (model.md §11)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tercet.config import ModelConfig
from tercet.model.kda import KimiDeltaAttention, ShortConv
from tercet.model.layers import RMSNorm
from tercet.model.moe import Experts, Router
from tercet.model.transformer import CausalLM


@torch.no_grad()
def initialize(model: CausalLM, seed: int) -> None:
    """Fill every parameter, reproducibly from *seed* and independently of the global generator.

    Matrices, embedding and router N(0, initializer_range²); norms 1; Attention-Residuals queries 0, so that every mix
    starts as a plain average; gates so that the initial decay is that of Mamba-2; filters uniform ±1/√taps.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.initializer_range

    def normal(parameter: Tensor) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(std))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.zero_() if name.endswith("_res_proj") else normal(module.weight)
        elif isinstance(module, nn.Embedding | Router):
            normal(module.weight)
            if isinstance(module, Router):
                module.e_score_correction_bias.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Experts):
            for parameter in (module.w1, module.w2, module.w3):
                normal(parameter)
        elif isinstance(module, ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            module.weight.copy_(torch.rand(module.weight.shape, generator=generator).mul_(2 * bound).sub_(bound))
        elif isinstance(module, KimiDeltaAttention):
            _initialize_gate(module, generator)


def _initialize_gate(module: KimiDeltaAttention, generator: torch.Generator) -> None:
    """Bias: inverse softplus of a step drawn log-uniformly from [1e-3, 0.1]; slope: 1, or U(1, 16) for softplus."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.rand(module.dt_bias.shape, generator=generator).mul_(high - low).add_(low).exp_().clamp_(min=1e-4)
    module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
    if module.kda.gate_lower_bound is None:
        module.A_log.copy_(torch.rand(module.A_log.shape, generator=generator).mul_(15).add_(1).log_())
    else:
        module.A_log.zero_()


FP32_SUFFIXES = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
"""Tensors that stay fp32 whatever the compute dtype (model.md §12)."""


def to_compute_dtype(model: CausalLM, dtype: torch.dtype) -> CausalLM:
    """Cast the model's matrices to *dtype*, leaving the tensors of `FP32_SUFFIXES` in fp32."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.endswith(FP32_SUFFIXES):
            tensor.data = tensor.data.to(dtype)
    return model


def build(config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> CausalLM:
    """Return an initialised fp32 model for a `ModelConfig`."""
    with torch.device("meta"):
        model = CausalLM(config)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model.to(device)
