"""Named configurations, each with the numbers it must give.

`k3` and `kimi_linear_48b` are the published architectures; `tiny`, `small` and `base` keep every mechanism of K3 at
sizes for a laptop, one GPU for an afternoon, and one GPU for days. Parameter counts are asserted by
``tests/model/test_sizes.py`` and printed by ``tercet plan``.
"""

from __future__ import annotations

from collections.abc import Callable

from tercet.config import (
    DataConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from tercet.errors import ConfigError, nearest


def published_learning_rate(active_parameters: float) -> float:
    """Peak learning rate ``min(4e-3, 2.36 · N^-0.35)`` for N active non-embedding parameters (training.md §4)."""
    return min(4e-3, 2.36 * active_parameters**-0.35)


def _hybrid(num_layers: int, last_is_mla: bool = True) -> tuple[int, ...]:
    """Return 0-based MLA layers in the published pattern: every fourth layer, and the last one."""
    layers = list(range(3, num_layers, 4))
    if last_is_mla and num_layers - 1 not in layers:
        layers.append(num_layers - 1)
    return tuple(layers)


def k3_model() -> ModelConfig:
    """Kimi K3's text backbone: 2.7795 T parameters, 104.19 B active without the input embedding."""
    return ModelConfig(
        vocab_size=163_840,
        hidden_size=7168,
        num_layers=93,
        full_attention_layers=_hybrid(93),
        intermediate_size=33_792,
        first_dense_layers=1,
        activation="situ",
        attn_res_block_size=12,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=96, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=896,
            num_experts_per_token=16,
            num_shared_experts=2,
            intermediate_size=3072,
            latent_size=3584,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )


def kimi_linear_48b_model() -> ModelConfig:
    """Kimi-Linear-48B-A3B: 49.12 B parameters, 3.107 B active without the input embedding."""
    return ModelConfig(
        vocab_size=163_840,
        hidden_size=2304,
        num_layers=27,
        full_attention_layers=_hybrid(27),
        intermediate_size=9216,
        first_dense_layers=1,
        activation="silu",
        attn_res_block_size=None,
        rms_norm_eps=1e-5,
        kda=KDAConfig(
            num_heads=32, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=None, full_rank_gate=False
        ),
        mla=MLAConfig(
            num_heads=32,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=False,
        ),
        moe=MoEConfig(
            num_experts=256,
            num_experts_per_token=8,
            num_shared_experts=1,
            intermediate_size=1024,
            latent_size=None,
            latent_norm=False,
            routed_scaling_factor=2.446,
            renormalize=True,
        ),
    )


def tiny_model() -> ModelConfig:
    """The demo: four layers with every mechanism, for two CPU cores and three minutes."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=128,
        num_layers=4,
        full_attention_layers=(3,),
        intermediate_size=384,
        first_dense_layers=1,
        activation="situ",
        attn_res_block_size=1,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=4, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=16,
            num_experts_per_token=2,
            num_shared_experts=1,
            intermediate_size=128,
            latent_size=64,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )


def small_model() -> ModelConfig:
    """About 100 M parameters in all: one GPU for minutes to hours."""
    return ModelConfig(
        vocab_size=16_384,
        hidden_size=512,
        num_layers=9,
        full_attention_layers=_hybrid(9),
        intermediate_size=1536,
        first_dense_layers=1,
        activation="situ",
        attn_res_block_size=3,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=8, head_dim=64, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=8,
            q_lora_rank=256,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=32,
            num_experts_per_token=4,
            num_shared_experts=1,
            intermediate_size=320,
            latent_size=256,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )


def base_model() -> ModelConfig:
    """About 1 B parameters in all, K3's head width and pattern: one GPU for days."""
    return ModelConfig(
        vocab_size=32_768,
        hidden_size=1024,
        num_layers=17,
        full_attention_layers=_hybrid(17),
        intermediate_size=4096,
        first_dense_layers=1,
        activation="situ",
        attn_res_block_size=4,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=8, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=8,
            q_lora_rank=512,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=64,
            num_experts_per_token=6,
            num_shared_experts=2,
            intermediate_size=512,
            latent_size=512,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )


def _tiny() -> RunConfig:
    """Small batches and a rate above the published range, both measured (docs/log.md).

    Three minutes on a CPU see some 400,000 tokens, for which the rule of training.md §4 gives batches of about 1,000.
    """
    return RunConfig(
        preset="tiny",
        model=tiny_model(),
        data=DataConfig(sequence_length=256, batch_sequences=4),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(steps=300, micro_batch_sequences=2, eval_every=50, eval_sequences=128, checkpoint_every=100),
    )


def _small() -> RunConfig:
    return RunConfig(
        preset="small",
        model=small_model(),
        data=DataConfig(sequence_length=2048, batch_sequences=64),
        optim=OptimConfig(lr=published_learning_rate(25e6)),
        train=TrainConfig(steps=10_000, micro_batch_sequences=32),
    )


def _base() -> RunConfig:
    """Micro-batches as large as 80 GB hold without recomputation; on an H200 they outweigh launching (docs/log.md)."""
    return RunConfig(
        preset="base",
        model=base_model(),
        data=DataConfig(sequence_length=4096, batch_sequences=128),
        optim=OptimConfig(lr=published_learning_rate(2.0e8)),
        train=TrainConfig(steps=40_000, micro_batch_sequences=8),
    )


def _published(name: str, model: Callable[[], ModelConfig], active: float, length: int) -> Callable[[], RunConfig]:
    def build() -> RunConfig:
        return RunConfig(
            preset=name,
            model=model(),
            data=DataConfig(sequence_length=length, batch_sequences=1024),
            optim=OptimConfig(lr=published_learning_rate(active)),
            train=TrainConfig(steps=100_000, micro_batch_sequences=1, recompute=True),
        )

    return build


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny": _tiny,
    "small": _small,
    "base": _base,
    "kimi-linear-48b": _published("kimi-linear-48b", kimi_linear_48b_model, 3.1e9, 4096),
    "k3": _published("k3", k3_model, 103e9, 8192),
}


def preset(name: str) -> RunConfig:
    """Return the run configuration called *name*.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()
