"""Settings: frozen dataclasses, and nothing that needs torch.

`ModelConfig` is the architecture (model.md §1); it has no architectural defaults, because a forgotten key would
silently build another model. `RunConfig` adds data, optimiser, schedule, balance and loop settings, which do have
defaults. Every run writes its `RunConfig` as JSON beside its checkpoints.

Reading and overriding (TOML, ``--set a.b=c``) is in `tercet.util.settings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tercet.errors import ConfigError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (report §2.1.1)."""

    num_heads: int
    head_dim: int
    """Key and value width of a head."""
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    """Floor of the log decay per token, in [-5, 0): ``g = bound · sigmoid(exp(A_log) · z)``.
    None selects Kimi-Linear's unbounded ``g = -exp(A_log) · softplus(z)``."""
    full_rank_gate: bool
    """Output gate ``hidden → heads·dim`` in one matrix (K3) or through a rank of `head_dim` (Kimi-Linear)."""

    def __post_init__(self) -> None:
        _require(self.num_heads > 0 and self.head_dim > 0, "kda.num_heads and kda.head_dim must be positive")
        _require(self.short_conv_kernel_size >= 1, "kda.short_conv_kernel_size must be at least 1")
        bound = self.gate_lower_bound
        _require(
            bound is None or -5.0 <= bound < 0.0,
            f"kda.gate_lower_bound is {bound}; it must lie in [-5, 0), or be absent for the softplus gate "
            "(a tile of 16 tokens would leave the bf16 exponent range below -5)",
        )

    @property
    def width(self) -> int:
        """Heads times head width."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without position encoding (report §2.1.2)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key part shared by all heads; it is never rotated, and never dropped."""
    v_head_dim: int
    output_gate: bool

    def __post_init__(self) -> None:
        sizes = (
            self.num_heads,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
        )
        _require(min(sizes) > 0, f"mla sizes must be positive, got {sizes}")
        _require(self.q_lora_rank is None or self.q_lora_rank > 0, "mla.q_lora_rank must be positive or absent")

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: content plus shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token: normalised latent plus the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE (report §2.3); without `latent_size` it is Kimi-Linear's full-width MoE."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    """Inner width of one expert, routed or shared."""
    latent_size: int | None
    """Width at which tokens are dispatched; None dispatches the full hidden width."""
    latent_norm: bool
    """RMSNorm between the sum over experts and the up-projection."""
    routed_scaling_factor: float
    renormalize: bool

    def __post_init__(self) -> None:
        _require(
            0 < self.num_experts_per_token < self.num_experts,
            f"moe.num_experts_per_token ({self.num_experts_per_token}) must be in [1, num_experts) "
            f"with num_experts = {self.num_experts}: Quantile Balancing needs the (k+1)-th score",
        )
        _require(self.num_shared_experts >= 0, "moe.num_shared_experts must not be negative")
        _require(self.intermediate_size > 0, "moe.intermediate_size must be positive")
        _require(self.latent_size is None or self.latent_size > 0, "moe.latent_size must be positive or absent")
        _require(not (self.latent_norm and self.latent_size is None), "moe.latent_norm needs moe.latent_size")


@dataclass(frozen=True)
class ModelConfig:
    """One K3-shaped text model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    full_attention_layers: tuple[int, ...]
    """0-based indices of the MLA layers; every other layer is KDA. (Published files count from 1.)"""
    intermediate_size: int
    """Inner width of the dense MLP in the first `first_dense_layers` layers."""
    first_dense_layers: int
    activation: Literal["situ", "silu"]
    attn_res_block_size: int | None
    """Decoder layers per Attention-Residuals block; None keeps the ordinary residual stream."""
    rms_norm_eps: float
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    initializer_range: float = 0.02
    num_nextn_predict_layers: Literal[0, 1] = 0
    """1 adds the multi-token-prediction layer (model.md §9)."""

    def __post_init__(self) -> None:
        _require(min(self.vocab_size, self.hidden_size, self.num_layers) > 0, "model sizes must be positive")
        layers = self.full_attention_layers
        _require(
            tuple(sorted(set(layers))) == tuple(layers) and all(0 <= layer < self.num_layers for layer in layers),
            f"full_attention_layers must be sorted, distinct and 0-based in [0, {self.num_layers}), got {layers}",
        )
        _require(
            0 <= self.first_dense_layers <= self.num_layers,
            f"first_dense_layers is {self.first_dense_layers}; it must lie in [0, {self.num_layers}]",
        )
        block = self.attn_res_block_size
        _require(
            block is None or block > 0,
            f"attn_res_block_size is {block}; use a positive number or leave it out",
        )
        _require(self.activation in ("situ", "silu"), f"activation is {self.activation!r}; use 'situ' or 'silu'")
        _require(self.num_nextn_predict_layers in (0, 1), "num_nextn_predict_layers must be 0 or 1")

    def is_mla(self, layer: int) -> bool:
        """Whether decoder layer *layer* (0-based) is a full-attention layer."""
        return layer in self.full_attention_layers

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer *layer* (0-based) has a routed feed-forward block."""
        return layer >= self.first_dense_layers

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(layer for layer in range(self.num_layers) if not self.is_mla(layer))


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are cut."""

    path: str = ""
    """Directory written by ``tercet data prepare``."""
    sequence_length: int = 512
    """Tokens a sequence may see; documents longer than this are continued in the next sequence, without state."""
    batch_sequences: int = 8
    """Sequences in one optimiser step, over all ranks and micro-batches."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_sequences"):
            value = getattr(self, name)
            _require(value >= 1, f"data.{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class MuonConfig:
    """Muon for matrices (training.md §1)."""

    momentum: float = 0.95
    nesterov: bool = True
    update_rms: float = 0.2
    ns: Literal["quintic", "polar_express", "8+2"] = "quintic"
    head_group: int = 1
    """Heads orthogonalised together in Q, K and V; 1 is K3, 0 takes all heads (classic Muon)."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimisers, learning rate and clipping."""

    lr: float = 4e-3
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    qk_clip: float | None = 100.0
    """Largest attention logit a head may reach before its projections are scaled back; None switches it off."""
    matrix_optimizer: Literal["muon", "adamw"] = "muon"
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        _require(0 < self.lr < math.inf, f"optim.lr is {self.lr}; it must be positive and finite")
        _require(self.weight_decay >= 0, "optim.weight_decay must not be negative")
        _require(self.grad_clip > 0, "optim.grad_clip must be positive")
        _require(self.qk_clip is None or self.qk_clip > 0, "optim.qk_clip must be positive or absent")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule over optimiser steps (training.md §3)."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_fraction: float = 0.01
    min_lr_fraction: float = 0.1
    decay_fraction: float = 0.35
    """Share of the run in which WSD decays."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"

    def __post_init__(self) -> None:
        for name in ("warmup_fraction", "min_lr_fraction", "decay_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"schedule.{name} is {value}; it must lie in [0, 1]")


@dataclass(frozen=True)
class BalanceConfig:
    """Expert load balancing (training.md §2)."""

    kind: Literal["qb", "qb_micro", "bip", "sign", "sign_centred", "aux", "none"] = "qb"
    bins: int = 1000
    ema: float = 0.0
    """Weight of the old quantile in a moving average; 0 uses each step's own estimate."""
    sign_rate: float = 1e-3
    aux_weight: float = 1e-2

    def __post_init__(self) -> None:
        _require(self.bins >= 2, f"balance.bins is {self.bins}; it must be at least 2")
        _require(0 <= self.ema < 1, f"balance.ema is {self.ema}; it must lie in [0, 1)")


@dataclass(frozen=True)
class TrainConfig:
    """The loop around the model."""

    steps: int = 1000
    micro_batch_sequences: int = 8
    """Sequences in one forward pass; `data.batch_sequences` must be a multiple of it."""
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of the large matrix products; auto is bfloat16 on a GPU and float32 on a CPU."""
    device: str = "auto"
    workers: int = 0
    """Micro-batches computed side by side on a CPU, one core each; 0 takes as many as there are cores. Two cores that
    share every operation wait for each other thousands of times a step; two that have a micro-batch each, once."""
    recompute: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    mtp_weight: float = 0.3
    mtp_weight_final: float = 0.1
    """Weight of the multi-token-prediction loss in the last third of training."""
    eval_every: int = 100
    eval_sequences: int = 64
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    async_checkpoint: bool = True
    """Copy the state and write it while training goes on; False waits for the disk."""
    peer_timeout: float = 1800.0
    """Longest wait for another process of the run in seconds; evaluation on the first one must fit into it."""
    log_every: int = 10
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = "none"

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "micro_batch_sequences",
            "eval_every",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
            "eval_sequences",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name} is {value}; it must be at least 1")
        _require(self.peer_timeout > 0, f"train.peer_timeout is {self.peer_timeout}; it must be positive")
        _require(self.workers >= 0, f"train.workers is {self.workers}; it must not be negative")


@dataclass(frozen=True)
class RunConfig:
    """Everything a training run needs to be repeated."""

    preset: str
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        total, micro = self.data.batch_sequences, self.train.micro_batch_sequences
        _require(
            total % micro == 0,
            f"data.batch_sequences ({total}) must be a multiple of train.micro_batch_sequences ({micro})",
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, of all ranks together."""
        return self.data.batch_sequences // self.train.micro_batch_sequences
