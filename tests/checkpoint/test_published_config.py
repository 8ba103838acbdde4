"""``config.json`` both ways: nothing invented, aliases that agree, lists that count from one."""

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tercet.checkpoint.layouts import LAYOUTS, natural_layout
from tercet.checkpoint.published_config import read_config, write_config
from tercet.checkpoint.vision import PUBLISHED_VISION
from tercet.errors import ConfigError
from tercet.presets import k3_model, kimi_linear_48b_model
from tests.checkpoint.miniatures import MINIATURE, MINIATURES


def written(name: str, **top: Any) -> dict[str, Any]:
    models = {"k3": k3_model(), "kimi-linear": kimi_linear_48b_model()}
    vision = PUBLISHED_VISION if name == "k3" else None
    return json.loads(json.dumps(write_config(LAYOUTS[name], models[name], vision) | top))


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_round_trip(name: str) -> None:
    for model in ({"k3": k3_model(), "kimi-linear": kimi_linear_48b_model()}[name], MINIATURES[name]):
        vision = {**PUBLISHED_VISION, "text_hidden_size": model.hidden_size} if name == "k3" else None
        data = json.loads(json.dumps(write_config(LAYOUTS[name], model, vision)))
        published = read_config(data)
        assert published.model == model
        assert published.layout is LAYOUTS[name]
        assert published.vision == vision
        assert natural_layout(model).name == name


def test_published_values() -> None:
    data = written("k3")
    text, linear = data["text_config"], data["text_config"]["linear_attn_config"]
    assert (data["bos_token_id"], data["eos_token_id"], data["pad_token_id"]) == (163584, 163586, 163839)
    assert data["media_placeholder_token_id"] == 163605
    assert data["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert (text["num_experts_per_token"], text["activation_situ_linear_beta"]) == (16, 25.0)
    assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(linear["kda_layers"]) == 69
    assert linear["gate_lower_bound"] == -5.0
    for absent in ("rope_theta", "rope_scaling", "head_dim"):
        assert absent not in text
    kimi = written("kimi-linear")
    assert kimi["linear_attn_config"]["full_attn_layers"] == [4, 8, 12, 16, 20, 24, 27]
    assert "gate_lower_bound" not in kimi["linear_attn_config"]
    assert "use_full_rank_gate" not in kimi["linear_attn_config"]
    assert (kimi["routed_scaling_factor"], kimi["q_lora_rank"]) == (2.446, None)


def test_every_released_text_setting_is_written() -> None:
    """model.md §1.1, value by value."""
    text = dict(written("k3")["text_config"])
    linear, quantisation = text.pop("linear_attn_config"), text.pop("quantization_config")
    assert text == {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840,
        "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "mla_use_output_gate": True, "intermediate_size": 33792, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
        "use_grouped_topk": True, "num_nextn_predict_layers": 0, "bos_token_id": 163584, "eos_token_id": 163586,
        "pad_token_id": 163839, "use_cache": True, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "num_experts": 896,
        "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    assert {key for key in linear if not key.endswith("layers")} == {
        "num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate",
    }  # fmt: skip
    assert quantisation["format"] == "mxfp4-pack-quantized"
    scheme = quantisation["config_groups"]["group_0"]["weights"]
    assert (scheme["num_bits"], scheme["group_size"], scheme["scale_dtype"]) == (4, 32, "torch.uint8")


def test_M11_the_written_ignore_list_is_true() -> None:
    """Every plain linear map of the layout matches a pattern, and no packed one does."""
    patterns = [
        re.compile(pattern.removeprefix("re:"))
        for pattern in written("k3")["text_config"]["quantization_config"]["ignore"]
    ]
    for tensor in LAYOUTS["k3"].stored(MINIATURES["k3"], {**PUBLISHED_VISION, "text_hidden_size": 64}):
        linear = len(tensor.shape) == 2 and not tensor.name.endswith("embed_tokens.weight")
        if tensor.part == "packed":
            assert not any(pattern.match(tensor.name) for pattern in patterns), tensor.name
        elif tensor.part == "whole" and linear:
            assert any(pattern.match(tensor.name) for pattern in patterns), tensor.name


COMMON = """vocab_size hidden_size num_hidden_layers intermediate_size first_k_dense_replace rms_norm_eps
    initializer_range hidden_act num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts moe_intermediate_size
    moe_renormalize routed_scaling_factor linear_attn_config"""
K3_ONLY = """moe_layer_freq mla_use_nope mla_use_output_gate moe_router_activation_func topk_method num_expert_group
    topk_group num_nextn_predict_layers tie_word_embeddings activation_situ_beta activation_situ_linear_beta
    attn_res_block_size routed_expert_hidden_size latent_moe_use_norm"""


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_M37_every_architecture_key_is_mandatory(name: str) -> None:
    """A missing key must never silently change the activation or switch the latent path off."""
    linear = ["num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"]
    linear += ["gate_lower_bound", "use_full_rank_gate"] if name == "k3" else []
    keys = f"{COMMON} {K3_ONLY if name == 'k3' else ''}".split()
    for key in keys + [f"linear_attn_config.{key}" for key in linear]:
        data = written(name)
        node = data["text_config"] if name == "k3" else data
        *path, last = key.split(".")
        for part in path:
            node = node[part]
        del node[last]
        with pytest.raises(ConfigError, match=f"lacks.*{last}"):
            read_config(data)


def test_M32_aliases_are_read_and_must_agree() -> None:
    """K2 numbers or alias spellings must not slip in: no defaults, and two values for one setting are an error."""
    data = written("kimi-linear")
    renamed = copy.deepcopy(data)
    for name, alias in {
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
    }.items():
        renamed[alias] = renamed.pop(name)
    assert read_config(renamed).model == kimi_linear_48b_model()
    both = data | {"num_experts_per_tok": data["num_experts_per_token"]}
    assert read_config(both).model == kimi_linear_48b_model()
    with pytest.raises(ConfigError, match=r"two values.*num_experts_per_tok"):
        read_config(data | {"num_experts_per_tok": 6})
    with pytest.raises(ConfigError, match="two values"):
        read_config(data | {"norm_topk_prob": 1})


def test_M15_layer_lists_count_from_one() -> None:
    model = read_config(written("k3")).model
    assert model.full_attention_layers == (*range(3, 88, 4), 91, 92)
    assert len(model.full_attention_layers) == 24  # what a cache is sized from
    data = written("k3")
    linear = data["text_config"]["linear_attn_config"]
    linear["full_attn_layers"] = [layer - 1 for layer in linear["full_attn_layers"]]
    linear["kda_layers"] = [layer - 1 for layer in linear["kda_layers"]]
    with pytest.raises(ConfigError, match="count from 1"):
        read_config(data)
    for change in ({"kda_layers": [1, 2, 3]}, {"full_attn_layers": [1, *range(4, 93, 4), 93]}):
        data = written("k3")
        data["text_config"]["linear_attn_config"] |= change
        with pytest.raises(ConfigError, match="once"):
            read_config(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("num_expert_group", 8),
        ("mla_use_nope", False),
        ("tie_word_embeddings", True),
        ("moe_layer_freq", 2),
        ("hidden_act", "silu"),
        ("num_key_value_heads", 8),
        ("num_experts", "896"),
        ("num_experts", True),
        ("rms_norm_eps", None),
    ],
)
def test_other_architectures_are_refused(key: str, value: Any) -> None:
    data = written("k3")
    data["text_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        read_config(data)


def test_other_model_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="deepseek_v3"):
        read_config({"model_type": "deepseek_v3"})
    with pytest.raises(ConfigError, match="object"):
        read_config([])
    data = written("kimi-linear")
    data["linear_attn_config"]["gate_lower_bound"] = -5.0
    with pytest.raises(ConfigError, match="gate_lower_bound"):
        read_config(data)
    with pytest.raises(ConfigError, match="num_nextn"):
        read_config(written("kimi-linear", num_nextn_predict_layers=1))


def test_quantisation_is_checked_for_consistency_only() -> None:
    data = written("k3")
    scheme = data["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    for key, value in (("group_size", 16), ("num_bits", 8), ("type", "int"), ("scale_dtype", "torch.float8_e4m3fn")):
        changed = copy.deepcopy(data)
        changed["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"] = scheme | {key: value}
        with pytest.raises(ConfigError, match=key):
            read_config(changed)
    del data["text_config"]["quantization_config"]
    assert read_config(data).model == k3_model()


def test_layouts_refuse_models_they_have_no_keys_for() -> None:
    with pytest.raises(ConfigError, match="attn_res_block_size"):
        write_config(LAYOUTS["k3"], replace(MINIATURE, attn_res_block_size=None))
    with pytest.raises(ConfigError, match=r"activation.*kda\.gate_lower_bound"):
        write_config(LAYOUTS["kimi-linear"], MINIATURE)
    with pytest.raises(ConfigError, match="run"):
        write_config(LAYOUTS["run"], MINIATURE)


def test_M18_rope_keys_are_ignored() -> None:
    """No position encoding is not "no 64 dimensions": widths stay, rotation settings have no effect."""
    data = written("k3")
    data["text_config"] |= {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn"}, "head_dim": 74}
    model = read_config(data).model
    assert model == k3_model()
    assert (model.mla.qk_head_dim, model.mla.cache_width) == (192, 576)
