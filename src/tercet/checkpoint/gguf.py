"""Export for llama.cpp: one GGUF file under its architecture names ``kimi-k3`` and ``kimi-linear``.

What llama.cpp stores differently from the published layout:

* ``A_log`` becomes ``ssm_a = −exp(A_log)``, so its graph need not exponentiate;
* ``kv_b_proj`` is split per head into ``attn_k_b`` (transposed, absorbed into the query) and ``attn_v_b``;
* norm weight and pseudo-query of an Attention-Residuals mix enter only as their product and are stored as it;
* experts of a layer are stacked; an MXFP4 block is its scale byte, then 16 bytes whose low nibbles are elements 0–15
  and high nibbles 16–31. Codes and scales themselves are the same, so repacking is exact.

Vectors, convolutions and the router stay fp32, as llama.cpp's operators expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tercet.checkpoint.convert import Experts, Source
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.gguf_vocabulary import Vocabulary, vocabulary
from tercet.checkpoint.layouts import GROUP, Rule, natural_layout
from tercet.checkpoint.mxfp4 import PackedWeight, encode
from tercet.checkpoint.progress import byte_progress
from tercet.checkpoint.published_config import check_expressible, control_token
from tercet.checkpoint.weights import Weight, weights
from tercet.config import ModelConfig
from tercet.errors import CheckpointError, ConfigError, StorageError, missing
from tercet.util.files import storage_error

ARCHITECTURES = {"k3": "kimi-k3", "kimi-linear": "kimi-linear"}

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_conv1d.weight": "ssm_conv1d_q.weight",
    "self_attn.k_conv1d.weight": "ssm_conv1d_k.weight",
    "self_attn.v_conv1d.weight": "ssm_conv1d_v.weight",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight",
    "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "block_sparse_moe.routed_expert_up_proj.weight": "ffn_routed_up.weight",
    "block_sparse_moe.routed_expert_norm.weight": "ffn_routed_norm.weight",
    "block_sparse_moe.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "block_sparse_moe.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "block_sparse_moe.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
}
_EXPERT_NAMES = {"w1": "ffn_gate_exps.weight", "w2": "ffn_down_exps.weight", "w3": "ffn_up_exps.weight"}
_MIXES = {"self_attention_res": "attn_res_score.weight", "mlp_res": "ffn_res_score.weight"}
_ALWAYS_FP32 = ("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight", "ffn_gate_inp.weight")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file."""

    name: str
    kind: str
    """F32, F16, BF16 or MXFP4."""
    shape: tuple[int, ...]
    """In values, slowest axis first."""
    data: Callable[[], np.ndarray]
    """Reads and converts the values when they are written."""

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape in bytes along the last axis."""
        last = self.shape[-1] // GROUP * 17 if self.kind == "MXFP4" else self.shape[-1] * _BYTES[self.kind]
        return (*self.shape[:-1], last)


_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def repack(weight: PackedWeight) -> Tensor:
    """Return ggml's form of an MXFP4 matrix: ``[outputs, inputs / 32 · 17]`` bytes."""
    codes = torch.stack([weight.packed & 15, weight.packed >> 4], dim=-1).flatten(-2).unflatten(-1, (-1, GROUP))
    halves = codes[..., : GROUP // 2] | (codes[..., GROUP // 2 :] << 4)
    return torch.cat([weight.scale[..., None], halves], dim=-1).flatten(-2)


def _numpy(value: Tensor, kind: str) -> np.ndarray:
    """Return *value* in the file's dtype; bfloat16, which numpy lacks, as bytes."""
    data = value.detach().to(_TORCH[kind]).contiguous()
    return data.view(torch.uint8).numpy() if kind == "BF16" else data.numpy()


class _Exporter:
    """Lists the tensors of a GGUF file from a source of weights."""

    def __init__(self, source: Source, dtype: str, experts: Experts, rule: Rule):
        self.source, self.config, self.dtype, self.experts, self.rule = source, source.model, dtype, experts, rule
        self.k3 = natural_layout(self.config).name == "k3"
        self.weights = {weight.name: weight for weight in weights(self.config)}

    def plain(self, name: str) -> Tensor:
        """Return a weight's values."""
        value = self.source.weight(self.weights[name])
        return value.decode() if isinstance(value, PackedWeight) else value

    def tensors(self) -> Iterator[GGUFTensor]:
        """Yield all tensors, layer by layer, so that a sharded source is mapped once per shard."""
        for layer in range(self.config.num_layers):
            yield from self._layer(layer)
        for name, target in _GLOBAL_NAMES.items():
            yield self._tensor(name, target)
        if self.k3:
            yield self._mix("model.output_attn_res", "output_res_score.weight")

    def _layer(self, layer: int) -> Iterator[GGUFTensor]:
        prefix = f"model.layers.{layer}."
        for name in [name for name in self.weights if name.startswith(prefix)]:
            rest = name.removeprefix(prefix)
            if rest in _LAYER_NAMES:
                yield self._tensor(name, f"blk.{layer}.{_LAYER_NAMES[rest]}")
            elif rest == "self_attn.g_proj.weight":
                target = "attn_gate" if self.config.is_mla(layer) else "ssm_g"
                yield self._tensor(name, f"blk.{layer}.{target}.weight")
            elif rest == "self_attn.kv_b_proj.weight":
                yield from self._absorbed(name, layer)
            elif rest.endswith("_res_norm.weight"):
                mix = rest.removesuffix("_norm.weight")
                yield self._mix(prefix + mix, f"blk.{layer}.{_MIXES[mix]}")
            elif not rest.endswith("_res_proj.weight") and ".experts." not in rest:
                raise CheckpointError(f"GGUF has no place for {name!r}")
        if self.config.is_moe(layer):
            for part, target in _EXPERT_NAMES.items():
                yield self._stacked(f"{prefix}block_sparse_moe.experts", part, f"blk.{layer}.{target}")

    def _tensor(self, name: str, target: str) -> GGUFTensor:
        weight = self.weights[name]
        fp32 = len(weight.shape) == 1 or target.endswith(("_norm.weight", *_ALWAYS_FP32))
        kind = "F32" if fp32 else self.dtype
        shape = weight.shape
        if "conv1d" in name:
            shape = (1, weight.shape[0], 1, weight.shape[2])
        elif weight.role == "decay" and not self.k3:
            shape = (1, 1, weight.shape[0], 1)

        def data() -> np.ndarray:
            value = self.plain(name)
            return _numpy(-torch.exp(value.float()) if weight.role == "decay" else value, kind).reshape(*shape[:-1], -1)

        return GGUFTensor(target, kind, shape, data)

    def _mix(self, stem: str, target: str) -> GGUFTensor:
        def data() -> np.ndarray:
            norm, query = self.plain(f"{stem}_norm.weight"), self.plain(f"{stem}_proj.weight")
            return _numpy(norm.float() * query.float().flatten(), "F32")

        return GGUFTensor(target, "F32", (self.config.hidden_size,), data)

    def _absorbed(self, name: str, layer: int) -> Iterator[GGUFTensor]:
        mla = self.config.mla

        def heads() -> tuple[Tensor, Tensor]:
            expansion = self.plain(name).unflatten(0, (mla.num_heads, -1))
            keys, values = expansion.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
            return keys.transpose(1, 2), values

        k_shape = (mla.num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim)
        v_shape = (mla.num_heads, mla.v_head_dim, mla.kv_lora_rank)
        yield GGUFTensor(f"blk.{layer}.attn_k_b.weight", self.dtype, k_shape, lambda: _numpy(heads()[0], self.dtype))
        yield GGUFTensor(f"blk.{layer}.attn_v_b.weight", self.dtype, v_shape, lambda: _numpy(heads()[1], self.dtype))

    def _stacked(self, stem: str, part: str, target: str) -> GGUFTensor:
        count = self.config.moe.num_experts
        members = [self.weights[f"{stem}.{expert}.{part}.weight"] for expert in range(count)]
        packed = self.experts == "mxfp4" or (self.experts == "keep" and all(map(self.source.is_packed, members)))
        shape = (count, *members[0].shape)
        if packed and shape[-1] % GROUP:
            raise ConfigError(f"{members[0].name} has {shape[-1]} inputs, not a multiple of {GROUP}; use plain experts")

        def data() -> np.ndarray:
            if packed:
                return np.stack([repack(self._packed(member)).numpy() for member in members])
            return np.stack([_numpy(self.plain(member.name), self.dtype) for member in members])

        return GGUFTensor(target, "MXFP4" if packed else self.dtype, shape, data)

    def _packed(self, weight: Weight) -> PackedWeight:
        value = self.source.weight(weight)
        return value if isinstance(value, PackedWeight) else encode(value, self.rule)


def metadata(config: ModelConfig) -> dict[str, Any]:
    """Return llama.cpp's hyper-parameters; keys lack the architecture's prefix."""
    kda, mla, moe = config.kda, config.mla, config.moe
    table: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": 1_048_576,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": mla.num_heads,
        # The latent cache is one key-value head; none marks a KDA layer.
        "attention.head_count_kv": [int(config.is_mla(layer)) for layer in range(config.num_layers)],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": mla.kv_lora_rank,
        "attention.key_length": mla.cache_width,
        "attention.value_length": mla.kv_lora_rank,
        "attention.key_length_mla": mla.qk_head_dim,
        "attention.value_length_mla": mla.v_head_dim,
        "rope.dimension_count": mla.qk_rope_head_dim,
        "ssm.conv_kernel": kda.short_conv_kernel_size,
        "kda.head_dim": kda.head_dim,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_experts_per_token,
        "expert_shared_count": moe.num_shared_experts,
        "expert_feed_forward_length": moe.intermediate_size,
        "expert_weights_scale": moe.routed_scaling_factor,
        "expert_weights_norm": moe.renormalize,
        "expert_gating_func": 2,  # sigmoid
        "leading_dense_block_count": config.first_dense_layers,
    }
    if mla.q_lora_rank is not None:
        table["attention.q_lora_rank"] = mla.q_lora_rank
    if natural_layout(config).name == "k3":
        assert config.attn_res_block_size is not None and kda.gate_lower_bound is not None
        table |= {
            "kda.gate_lower_bound": kda.gate_lower_bound,
            "expert_latent_length": moe.latent_size,
            "activation.situ_beta": config.situ_beta,
            "activation.situ_linear_beta": config.situ_linear_beta,
            "attn_res.block_size": config.attn_res_block_size,
        }
    return table


def check_runnable(config: ModelConfig) -> None:
    """Refuse what llama.cpp's graphs cannot run (checkpoint.md, interchange notes).

    Raises:
        ConfigError: names the setting.
    """
    check_expressible(natural_layout(config), config)
    if config.kda.num_heads != config.mla.num_heads:
        raise ConfigError("llama.cpp needs as many KDA heads as MLA heads")
    if not config.full_attention_layers or not config.kda_layers:
        raise ConfigError("llama.cpp needs at least one KDA and one MLA layer")
    if natural_layout(config).name == "k3" and not config.kda.full_rank_gate:
        raise ConfigError("llama.cpp's kimi-k3 needs kda.full_rank_gate")
    if config.num_nextn_predict_layers:
        raise ConfigError("llama.cpp's kimi-k3 has no multi-token-prediction layer; export a model without it")
    if not config.moe.renormalize and natural_layout(config).name == "kimi-linear":
        raise ConfigError("llama.cpp's kimi-linear always renormalises routing weights")


def export_gguf(
    source: str | Path,
    path: str | Path,
    *,
    dtype: str | None = None,
    experts: Experts = "keep",
    rule: Rule = "even",
    show: bool | None = None,
) -> Path:
    """Write a run or a published checkpoint as one GGUF file.

    Args:
        source: as `CheckpointDirectory.open` takes it.
        path: a new file.
        dtype: BF16 (default), F16 or F32 for matrices that are not quantised.
        experts: ``keep`` repacks MXFP4 experts as they are and leaves others plain; ``mxfp4`` quantises; ``plain``
            dequantises.
        rule: scale rule of newly encoded blocks.
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: *path* exists, or the source is damaged.
        ConfigError: llama.cpp cannot run this architecture.
        MissingDependencyError: the ``gguf`` package is absent.
        StorageError: the disk refused a write; nothing is left behind.
    """
    target = Path(path)
    if target.exists():
        raise CheckpointError(f"{target} already exists; choose another file, or remove it first")
    kind = dtype or "BF16"
    if kind not in _BYTES:
        raise ConfigError(f"dtype {kind!r} is not one of {', '.join(_BYTES)}")
    directory = CheckpointDirectory.open(source)
    check_runnable(directory.model)
    tensors = list(_Exporter(directory, kind, experts, rule).tensors())
    words = vocabulary(directory)
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(part, directory.model, tensors, words, show)
        part.replace(target)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _write(
    path: Path, config: ModelConfig, tensors: list[GGUFTensor], words: Vocabulary | None, show: bool | None
) -> None:
    try:
        import gguf
    except ImportError as error:
        raise missing("gguf", "gguf", "exporting for llama.cpp") from error
    architecture = ARCHITECTURES[natural_layout(config).name]
    writer = gguf.GGUFWriter(path, architecture)
    name = path.name.removeprefix(".").removesuffix(".part")
    writer.add_name(name.removesuffix(".gguf"))
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata(config).items():
        _add(writer, f"{architecture}.{key}", value)
    _add_vocabulary(writer, config, words)
    for tensor in tensors:
        nbytes = int(np.prod(tensor.byte_shape))
        raw = gguf.GGMLQuantizationType[tensor.kind]
        bytewise = tensor.kind in ("MXFP4", "BF16")
        shape = tensor.byte_shape if bytewise else tensor.shape
        storage = np.uint8 if bytewise else {"F32": np.float32, "F16": np.float16}[tensor.kind]
        writer.add_tensor_info(tensor.name, list(shape), np.dtype(storage), nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with byte_progress(f"writing {name}", sum(int(np.prod(t.byte_shape)) for t in tensors), show) as advance:
        for tensor in tensors:
            data = tensor.data()
            assert data.nbytes == np.prod(tensor.byte_shape), tensor.name
            writer.write_tensor_data(np.ascontiguousarray(data))
            advance(data.nbytes)
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Write one key with the type that llama.cpp reads it as."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: Any, config: ModelConfig, words: Vocabulary | None) -> None:
    if words is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    for add, published in (
        (writer.add_bos_token_id, 163_584),
        (writer.add_eos_token_id, 163_586),
        (writer.add_pad_token_id, 163_839),
    ):
        if (identity := control_token(config.vocab_size, published)) is not None:
            add(identity)
