"""The generated tables against the published totals and against the model's own parameters."""

from dataclasses import replace

import pytest
import torch

from tercet.checkpoint.layouts import LAYOUTS, index, layout, totals
from tercet.checkpoint.vision import PUBLISHED_VISION, vision_tensors
from tercet.checkpoint.weights import weights
from tercet.config import ModelConfig
from tercet.errors import ConfigError
from tercet.model import CausalLM
from tercet.model.init import FP32_SUFFIXES
from tercet.model.names import published_tensors
from tercet.presets import k3_model, kimi_linear_48b_model, small_model, tiny_model
from tests.checkpoint.miniatures import MINIATURES


def test_k3_totals_are_the_published_ones() -> None:
    counted = totals(LAYOUTS["k3"].stored(k3_model(), PUBLISHED_VISION))
    assert counted.tensors == 497_220
    assert counted.nbytes == 1_560_860_324_864
    assert counted.elements == 1_503_647_073_024
    assert counted.shards == 96
    mla = {layer for layer in range(93) if k3_model().is_mla(layer)}
    expected = {0: 2_341_213_184, 93: 4_697_663_488, 94: 92_289_024, 95: 802_428_928}
    for layer in range(1, 93):
        expected[layer] = 16_566_684_160 if layer in mla else 16_990_092_800
    assert counted.shard_bytes == expected


def test_k3_index_names_and_places() -> None:
    made = index(LAYOUTS["k3"], k3_model(), PUBLISHED_VISION)
    places = made["weight_map"]
    assert made["metadata"] == {"total_size": 1_560_860_324_864}
    assert len(places) == 497_220
    layer = "language_model.model.layers"
    expert = f"{layer}.92.block_sparse_moe.experts.895.w2.weight"
    for name, shard in {
        f"{layer}.0.mlp.gate_proj.weight": 1,
        f"{layer}.0.self_attention_res_proj.weight": 1,
        f"{layer}.91.self_attn.kv_a_proj_with_mqa.weight": 92,
        f"{expert}_packed": 93,
        f"{expert}_scale": 93,
        "language_model.lm_head.weight": 94,
        "language_model.model.output_attn_res_proj.weight": 94,
        "mm_projector.proj.2.weight": 95,
        "vision_tower.encoder.blocks.26.wqkv.weight": 96,
    }.items():
        assert places[name] == f"model-{shard:05d}-of-000096.safetensors"


def test_k3_dtypes_and_shapes() -> None:
    stored = {t.name: t for t in LAYOUTS["k3"].stored(k3_model(), PUBLISHED_VISION) if ".experts." not in t.name}
    attention = "language_model.model.layers.0.self_attn."
    for name, dtype, shape in (
        (attention + "A_log", "F32", (128,)),
        (attention + "dt_bias", "F32", (12288,)),
        (attention + "q_conv1d.weight", "F32", (12288, 1, 4)),
        (attention + "o_norm.weight", "F32", (128,)),
        (attention + "f_b_proj.weight", "BF16", (12288, 128)),
        ("language_model.model.layers.3.self_attn.q_b_proj.weight", "BF16", (18432, 1536)),
        ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
        ("language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight", "BF16", (3584,)),
        ("vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, 1024)),
    ):
        assert (stored[name].dtype, stored[name].shape) == (dtype, shape)
    per_layer = [sum(t.shard == shard for t in stored.values()) for shard in range(96)]
    assert per_layer[0] == 23
    assert per_layer[1] == 28
    assert per_layer[3] == 22
    assert per_layer[93:] == [5, 3, 165]


def test_kimi_linear_totals() -> None:
    counted = totals(LAYOUTS["kimi-linear"].stored(kimi_linear_48b_model()))
    assert counted.tensors == 20_493
    assert counted.nbytes == pytest.approx(98.2e9, rel=1e-3)
    assert sum(weight.numel for weight in weights(kimi_linear_48b_model())) == 49_122_681_728


def test_text_parameters_are_the_published_ones() -> None:
    assert sum(weight.numel for weight in weights(k3_model())) == 2_779_484_476_000
    vision = sum(tensor.numel for tensor in vision_tensors(PUBLISHED_VISION, 7168))
    assert vision == 401_214_464 + 46_144_512


@pytest.mark.parametrize(
    "config",
    [
        *MINIATURES.values(),
        replace(MINIATURES["k3"], num_nextn_predict_layers=1),
        replace(MINIATURES["k3"], kda=replace(MINIATURES["k3"].kda, full_rank_gate=False)),
        tiny_model(),
        small_model(),
    ],
)
def test_table_equals_the_models_parameters(config: ModelConfig) -> None:
    """Two independent sources, the published table and the modules, name the same tensors with the same shapes."""
    with torch.device("meta"):
        model = CausalLM(config)
    from_model = {name: tuple(tensor.shape) for name, tensor in published_tensors(model)}
    table = list(weights(config))
    assert {weight.name: weight.shape for weight in table} == from_model
    assert len(table) == len(from_model)
    assert {w.name for w in table if w.fp32} == {name for name in from_model if name.endswith(FP32_SUFFIXES)}


def test_run_layout_is_the_models_own() -> None:
    config = MINIATURES["k3"]
    stored = list(LAYOUTS["run"].stored(config, dtype="F32"))
    assert {tensor.name: tensor.shape for tensor in stored} == {w.name: w.shape for w in weights(config)}
    assert {tensor.dtype for tensor in stored} == {"F32"}


def test_widths_that_mxfp4_cannot_hold() -> None:
    config = replace(MINIATURES["k3"], moe=replace(MINIATURES["k3"].moe, latent_size=48))
    with pytest.raises(ConfigError, match="48 inputs, which is not a multiple of 32"):
        list(LAYOUTS["k3"].stored(config))
    assert list(LAYOUTS["k3"].stored(config, quantised=False))


def test_unknown_layout_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kimi-linear'"):
        layout("kimi-linaer")


def test_vision_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="patch_size"):
        list(vision_tensors({**PUBLISHED_VISION, "patch_size": None}, 7168))
    with pytest.raises(ConfigError, match="text_hidden_size"):
        list(vision_tensors(PUBLISHED_VISION, 7000))
    with pytest.raises(ConfigError, match="merge_kernel_size"):
        list(vision_tensors({**PUBLISHED_VISION, "merge_kernel_size": 4}, 7168))
