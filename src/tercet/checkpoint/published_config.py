"""``config.json`` of the published layouts, to and from `ModelConfig` (checkpoint.md §7, model.md §1.1 and §13).

Reading invents nothing: every architectural key must be there, aliases of other writers are accepted but must agree,
the 1-based layer lists are converted once and must cover every layer exactly once, and a value that the architecture
does not have (another router, rotated keys, tied embeddings) is refused by name. ``head_dim``, ``rope_theta`` and
``rope_scaling`` are ignored: nothing is rotated, and the head widths have keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tercet.checkpoint.layouts import GROUP, Layout, layout
from tercet.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from tercet.errors import ConfigError

_ALIASES = {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
    "moe_renormalize": ("norm_topk_prob",),
    "num_expert_group": ("n_group",),
    "max_position_embeddings": ("model_max_length",),
}

_FIXED: dict[str, Any] = {
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
}
"""Keys with one value in this architecture."""

_MISSING = object()

MAX_NUMBER = 2**31
"""No setting of a model is this large."""


@dataclass(frozen=True)
class Published:
    """What a ``config.json`` says."""

    layout: Layout
    model: ModelConfig
    vision: dict[str, Any] | None


class _Fields:
    """Typed access to a mapping; a missing key, a wrong type or disagreeing aliases are errors that name the key."""

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where or 'config.json'} must be an object, got {type(data).__name__}")
        self.data, self.where = data, where

    def find(self, key: str) -> Any:
        """Return the value of *key* or of its aliases, or `_MISSING`."""
        found = {name: self.data[name] for name in (key, *_ALIASES.get(key, ())) if name in self.data}
        values = list(found.values())
        if any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values[1:]):
            raise ConfigError(f"config.json gives two values for one setting: {found}; remove the wrong one")
        return values[0] if values else _MISSING

    def take(self, key: str, kind: type, *, optional: bool = False) -> Any:
        """Return *key*, which must be there and be a *kind*; null only where it is *optional*."""
        value = self.find(key)
        if value is _MISSING:
            names = " or ".join(repr(self.where + name) for name in (key, *_ALIASES.get(key, ())))
            raise ConfigError(f"config.json lacks {names}; architectural settings have no default")
        if value is None and optional:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not abs(value) < MAX_NUMBER:  # refuses NaN and infinity too: JSON spells them 1e999
            raise ConfigError(f"config.json: {self.where}{key} is beyond what any model has")
        if kind is float and isinstance(value, int) and number:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"config.json: {self.where}{key} must be {kind.__name__}, got {value!r}")
        return value

    def group(self, key: str) -> _Fields:
        """Return the object under *key*."""
        return _Fields(self.take(key, dict), f"{self.where}{key}.")

    def check_fixed(self, required: bool) -> None:
        """Refuse values of `_FIXED` that this architecture does not have."""
        for key, expected in _FIXED.items():
            value = self.find(key)
            if value is _MISSING and not required:
                continue
            value = self.take(key, type(expected))
            if value != expected:
                raise ConfigError(f"config.json: {key} is {value!r}; this architecture has {expected!r}")


def read_config(data: Any) -> Published:
    """Return layout, `ModelConfig` and vision settings of a parsed ``config.json``.

    Raises:
        ConfigError: a key is missing, of the wrong type, contradicts an alias or another key, or describes something
            that the architecture does not have.
    """
    fields = _Fields(data, "")
    kind = fields.take("model_type", str)
    if kind == "kimi_k3":
        text = fields.group("text_config")
        vision = fields.take("vision_config", dict) if "vision_config" in fields.data else None
        _check_quantisation(text.data.get("quantization_config", fields.data.get("quantization_config")))
        return Published(layout("k3"), _read_k3(text), vision)
    if kind == "kimi_linear":
        return Published(layout("kimi-linear"), _read_kimi_linear(fields), None)
    raise ConfigError(f"config.json: model_type is {kind!r}; tercet reads 'kimi_k3' and 'kimi_linear'")


def _read_k3(text: _Fields) -> ModelConfig:
    text.check_fixed(required=True)
    linear = text.group("linear_attn_config")
    activation = text.take("hidden_act", str)
    if activation != "situ":
        raise ConfigError(f"config.json: hidden_act is {activation!r}; the K3 layout has 'situ'")
    num_layers = text.take("num_hidden_layers", int)
    return ModelConfig(
        **_common(text),
        num_layers=num_layers,
        full_attention_layers=_layer_lists(linear, num_layers),
        first_dense_layers=text.take("first_k_dense_replace", int),
        activation="situ",
        situ_beta=text.take("activation_situ_beta", float),
        situ_linear_beta=text.take("activation_situ_linear_beta", float),
        attn_res_block_size=text.take("attn_res_block_size", int),
        num_nextn_predict_layers=text.take("num_nextn_predict_layers", int),
        kda=KDAConfig(
            num_heads=linear.take("num_heads", int),
            head_dim=linear.take("head_dim", int),
            short_conv_kernel_size=linear.take("short_conv_kernel_size", int),
            gate_lower_bound=linear.take("gate_lower_bound", float),
            full_rank_gate=linear.take("use_full_rank_gate", bool),
        ),
        mla=_mla(text, output_gate=text.take("mla_use_output_gate", bool)),
        moe=_moe(
            text,
            latent_size=text.take("routed_expert_hidden_size", int),
            latent_norm=text.take("latent_moe_use_norm", bool),
        ),
    )


def _read_kimi_linear(fields: _Fields) -> ModelConfig:
    fields.check_fixed(required=False)
    activation = fields.take("hidden_act", str)
    if activation != "silu":
        raise ConfigError(f"config.json: hidden_act is {activation!r}; the Kimi-Linear layout has 'silu'")
    num_layers = fields.take("num_hidden_layers", int)
    linear = _linear_attention(fields, num_layers)
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        if linear.data.get(key):
            raise ConfigError(f"config.json: linear_attn_config.{key} belongs to the K3 layout, not to kimi_linear")
    if fields.data.get("num_nextn_predict_layers"):
        raise ConfigError("config.json: num_nextn_predict_layers must be 0 in the Kimi-Linear layout")
    return ModelConfig(
        **_common(fields),
        num_layers=num_layers,
        full_attention_layers=_layer_lists(linear, num_layers),
        first_dense_layers=_first_dense(fields, num_layers),
        activation="silu",
        attn_res_block_size=None,
        num_nextn_predict_layers=0,
        kda=KDAConfig(
            num_heads=linear.take("num_heads", int),
            head_dim=linear.take("head_dim", int),
            short_conv_kernel_size=linear.take("short_conv_kernel_size", int),
            gate_lower_bound=None,
            full_rank_gate=False,
        ),
        mla=_mla(fields, output_gate=False),
        moe=_moe(fields, latent_size=None, latent_norm=False),
    )


def _common(fields: _Fields) -> dict[str, Any]:
    return {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": fields.take("hidden_size", int),
        "intermediate_size": fields.take("intermediate_size", int),
        "rms_norm_eps": fields.take("rms_norm_eps", float),
        "initializer_range": fields.take("initializer_range", float),
    }


def _mla(fields: _Fields, *, output_gate: bool) -> MLAConfig:
    heads = fields.take("num_attention_heads", int)
    if fields.take("num_key_value_heads", int) != heads:
        raise ConfigError(f"config.json: num_key_value_heads must equal num_attention_heads ({heads})")
    return MLAConfig(
        num_heads=heads,
        q_lora_rank=fields.take("q_lora_rank", int, optional=True),
        kv_lora_rank=fields.take("kv_lora_rank", int),
        qk_nope_head_dim=fields.take("qk_nope_head_dim", int),
        qk_rope_head_dim=fields.take("qk_rope_head_dim", int),
        v_head_dim=fields.take("v_head_dim", int),
        output_gate=output_gate,
    )


def _moe(fields: _Fields, *, latent_size: int | None, latent_norm: bool) -> MoEConfig:
    return MoEConfig(
        num_experts=fields.take("num_experts", int),
        num_experts_per_token=fields.take("num_experts_per_token", int),
        num_shared_experts=fields.take("num_shared_experts", int),
        intermediate_size=fields.take("moe_intermediate_size", int),
        latent_size=latent_size,
        latent_norm=latent_norm,
        routed_scaling_factor=fields.take("routed_scaling_factor", float),
        renormalize=fields.take("moe_renormalize", bool),
    )


def _layer_lists(linear: _Fields, num_layers: int) -> tuple[int, ...]:
    """Return 0-based MLA layers from the two 1-based lists, which together must name every layer exactly once."""
    lists = {key: linear.take(key, list) for key in ("kda_layers", "full_attn_layers")}
    for key, values in lists.items():
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise ConfigError(f"config.json: linear_attn_config.{key} must list layer numbers, got {values!r}")
    named = sorted(lists["kda_layers"] + lists["full_attn_layers"])
    if len(named) != num_layers:
        raise ConfigError(
            f"config.json: kda_layers and full_attn_layers name {len(named):,} layers, num_hidden_layers is "
            f"{num_layers:,}; together they must name each layer once"
        )
    if named != list(range(1, num_layers + 1)):
        twice = sorted({value for value in named if named.count(value) > 1})
        stray = [value for value in named if not 1 <= value <= num_layers]
        absent = sorted(set(range(1, num_layers + 1)) - set(named))
        raise ConfigError(
            "config.json: kda_layers and full_attn_layers must together name each layer 1 … "
            f"{num_layers} once (they count from 1); twice: {twice}, out of range: {stray}, absent: {absent}"
        )
    return tuple(sorted(value - 1 for value in lists["full_attn_layers"]))


def _linear_attention(fields: _Fields, num_layers: int) -> _Fields:
    """Return ``linear_attn_config``, rebuilt from transformers' flat spelling where that is what the file has.

    Where a file has both, they must agree.
    """
    flat: dict[str, Any] = {}
    for key, name in (
        ("num_heads", "linear_num_heads"),
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ):
        if name in fields.data:
            flat[key] = fields.data[name]
    if fields.data.get("layer_types") is not None:
        kinds = fields.take("layer_types", list)
        if len(kinds) != num_layers or set(kinds) - {"linear_attention", "full_attention"}:
            raise ConfigError(
                f"config.json: layer_types must name 'linear_attention' or 'full_attention' for each of {num_layers} "
                f"layers, got {kinds!r}"
            )
        for key, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention")):
            flat[key] = [n + 1 for n, name in enumerate(kinds) if name == kind]
    nested = dict(fields.take("linear_attn_config", dict)) if "linear_attn_config" in fields.data else {}
    for key, value in flat.items():
        if key in nested and nested[key] != value:
            raise ConfigError(f"config.json gives two values for linear_attn_config.{key}: {nested[key]} and {value}")
    return _Fields({**flat, **nested}, "linear_attn_config.")


def _first_dense(fields: _Fields, num_layers: int) -> int:
    """Return the number of leading dense layers, from ``first_k_dense_replace`` or transformers' list of kinds."""
    kinds = fields.data.get("mlp_layer_types")
    if kinds is None:
        return fields.take("first_k_dense_replace", int)
    dense = sum(kind == "dense" for kind in kinds) if isinstance(kinds, Sequence) else -1
    if list(kinds) != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ConfigError(f"config.json: mlp_layer_types must be dense layers, then sparse ones, got {kinds!r}")
    if fields.data.get("first_k_dense_replace", dense) != dense:
        raise ConfigError("config.json: first_k_dense_replace and mlp_layer_types disagree")
    return dense


def _check_quantisation(quantisation: Any) -> None:
    """Check group size, bits and scale dtype; what is quantised is decided by the tensors (checkpoint.md §6)."""
    if quantisation is None:
        return
    fields = _Fields(quantisation, "quantization_config.")
    kind = fields.take("format", str)
    if kind != "mxfp4-pack-quantized":
        raise ConfigError(f"config.json: quantization_config.format is {kind!r}; tercet reads 'mxfp4-pack-quantized'")
    for name in fields.group("config_groups").data:
        scheme = fields.group("config_groups").group(name).group("weights")
        expected = {"num_bits": 4, "type": "float", "group_size": GROUP}
        for key, value in expected.items():
            if scheme.data.get(key) != value:
                raise ConfigError(f"config.json: {scheme.where}{key} must be {value!r}, got {scheme.data.get(key)!r}")
        if scheme.data.get("scale_dtype", "torch.uint8") not in ("torch.uint8", None):
            raise ConfigError(f"config.json: {scheme.where}scale_dtype must be torch.uint8 (E8M0)")


def control_token(vocab_size: int, published: int) -> int | None:
    """Return the id of a control token, which keeps its distance from the end of the vocabulary; None if too small."""
    identity = vocab_size - (163_840 - published)
    return identity if identity >= 0 else None


_IGNORED_LINEARS = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
    "re:.*routed_expert_(down|up)_proj.*",
    r"re:.*block_sparse_moe\.gate.*",
    "re:.*_res_proj.*",
]
"""The released patterns, and those that make the list true: latent projections, router and queries are plain (§6)."""


def _quantisation_config() -> dict[str, Any]:
    scheme = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8", "zp_dtype": None, "observer": "minmax", "observer_kwargs": {}, "actorder": None,
        "block_structure": None,
    }  # fmt: skip
    group = {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "weights": scheme,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _IGNORED_LINEARS,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def write_config(
    chosen: Layout,
    model: ModelConfig,
    vision: Mapping[str, Any] | None = None,
    *,
    quantised: bool | None = None,
    dtype: str = "BF16",
    max_position_embeddings: int = 1_048_576,
) -> dict[str, Any]:
    """Return the ``config.json`` of *model* in a published layout, under Moonshot's names.

    Args:
        chosen: ``k3`` or ``kimi-linear``.
        model: the architecture.
        vision: ``vision_config`` of carried vision tensors (K3 only).
        quantised: whether experts are MXFP4; by default the layout's choice.
        dtype: safetensors dtype of plain matrices.
        max_position_embeddings: only informative, since no position is encoded.

    Raises:
        ConfigError: the layout cannot express *model*; the message names the settings.
    """
    check_expressible(chosen, model)
    text = _write_text(chosen, model, max_position_embeddings) | {"dtype": _DTYPE_NAMES[dtype]}
    if chosen.name == "kimi-linear":
        return text
    if chosen.quantised if quantised is None else quantised:
        text["quantization_config"] = _quantisation_config()
    ids = {key: control_token(model.vocab_size, value) for key, value in _TOKEN_IDS.items()}
    top: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **ids,
        "media_placeholder_token_id": control_token(model.vocab_size, 163_605),
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "dtype": _DTYPE_NAMES[dtype],
        "text_config": text,
    }
    if vision is not None:
        top["vision_config"] = dict(vision)
    return top


_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_TOKEN_IDS = {"bos_token_id": 163_584, "eos_token_id": 163_586, "pad_token_id": 163_839}


def _write_text(chosen: Layout, model: ModelConfig, max_position_embeddings: int) -> dict[str, Any]:
    kda, mla, moe = model.kda, model.mla, model.moe
    linear: dict[str, Any] = {
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.short_conv_kernel_size,
        "kda_layers": [layer + 1 for layer in model.kda_layers],
        "full_attn_layers": [layer + 1 for layer in model.full_attention_layers],
    }
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.intermediate_size,
        "first_k_dense_replace": model.first_dense_layers,
        "moe_layer_freq": 1,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range,
        "hidden_act": model.activation,
        "max_position_embeddings" if chosen.name == "k3" else "model_max_length": max_position_embeddings,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": moe.routed_scaling_factor,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
        "tie_word_embeddings": False,
        **{key: control_token(model.vocab_size, value) for key, value in _TOKEN_IDS.items()},
        "use_cache": True,
    }
    if chosen.name == "k3":
        linear |= {"gate_lower_bound": kda.gate_lower_bound, "use_full_rank_gate": kda.full_rank_gate}
        text |= {
            "activation_situ_beta": model.situ_beta,
            "activation_situ_linear_beta": model.situ_linear_beta,
            "attn_res_block_size": model.attn_res_block_size,
            "mla_use_output_gate": mla.output_gate,
            "routed_expert_hidden_size": moe.latent_size,
            "latent_moe_use_norm": moe.latent_norm,
        }
    return text


def check_expressible(chosen: Layout, model: ModelConfig) -> None:
    """Refuse an architecture that a published layout has no keys for.

    Raises:
        ConfigError: names each setting that stands in the way.
    """
    if chosen.name == "run":
        raise ConfigError("the 'run' layout has no published config.json; choose 'k3' or 'kimi-linear'")
    k3 = chosen.name == "k3"
    wrong = [
        name
        for name, fine in {
            "activation": model.activation == ("situ" if k3 else "silu"),
            "attn_res_block_size": (model.attn_res_block_size is not None) == k3,
            "kda.gate_lower_bound": (model.kda.gate_lower_bound is not None) == k3,
            "kda.full_rank_gate": k3 or not model.kda.full_rank_gate,
            "mla.output_gate": k3 or not model.mla.output_gate,
            "moe.latent_size": (model.moe.latent_size is not None) == k3,
            "num_nextn_predict_layers": k3 or model.num_nextn_predict_layers == 0,
        }.items()
        if not fine
    ]
    if wrong:
        other = "kimi-linear" if k3 else "k3"
        raise ConfigError(
            f"the {chosen.name} layout cannot hold this model because of: {', '.join(wrong)}; try {other!r}"
        )
