"""The assignment table of training.md §1.1."""

from collections import Counter

import pytest
import torch

from tercet.errors import ConfigError
from tercet.model import CausalLM
from tercet.presets import PRESETS, preset
from tercet.train.groups import View, assign
from tests.train.train_models import small_config, small_model


def block_shapes(name: str, shape: tuple[int, ...], config, **options) -> Counter:
    assignment = assign(name, shape, config, **options)
    assert assignment.group == "muon"
    return Counter((view.rows, shape[-1]) for view in assignment.views for _ in range(view.blocks))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_parameter_is_assigned_and_every_row_belongs_to_one_block(name):
    config = preset(name).model
    with torch.device("meta"):
        model = CausalLM(config)
    for parameter_name, parameter in model.named_parameters():
        assignment = assign(parameter_name, tuple(parameter.shape), config)
        assert bool(assignment.views) == (assignment.group == "muon"), parameter_name
        if assignment.group == "muon":
            rows = parameter.numel() // parameter.shape[-1]
            slices = [s for view in assignment.views for block in view.row_slices(rows) for s in block]
            slices.sort(key=lambda s: s.start)
            assert [s.start for s in slices] == [0] + [s.stop for s in slices[:-1]], parameter_name
            assert slices[-1].stop == rows, parameter_name


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [
        ("layers.0.self_attn.q_proj.weight", (12288, 7168), {(128, 7168): 96}),
        ("layers.0.self_attn.k_proj.weight", (12288, 7168), {(128, 7168): 96}),
        ("layers.0.self_attn.v_proj.weight", (12288, 7168), {(128, 7168): 96}),
        ("layers.3.self_attn.q_b_proj.weight", (18432, 1536), {(192, 1536): 96}),
        ("layers.3.self_attn.kv_b_proj.weight", (24576, 512), {(128, 512): 192}),
        ("layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), {(512, 7168): 1, (64, 7168): 1}),
        ("layers.3.self_attn.q_a_proj.weight", (1536, 7168), {(1536, 7168): 1}),
        ("layers.3.self_attn.o_proj.weight", (7168, 12288), {(7168, 12288): 1}),
        ("layers.0.self_attn.g_proj.weight", (12288, 7168), {(12288, 7168): 1}),
        ("layers.0.self_attn.f_a_proj.weight", (128, 7168), {(128, 7168): 1}),
        ("layers.0.self_attn.f_b_proj.weight", (12288, 128), {(12288, 128): 1}),
        ("layers.0.mlp.gate_proj.weight", (33792, 7168), {(33792, 7168): 1}),
        ("layers.1.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), {(3584, 7168): 1}),
        ("layers.1.block_sparse_moe.experts.w1", (896, 3072, 3584), {(3072, 3584): 896}),
        ("layers.1.block_sparse_moe.experts.w2", (896, 3584, 3072), {(3584, 3072): 896}),
        ("layers.1.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), {(6144, 7168): 1}),
        ("layers.1.block_sparse_moe.gate.weight", (896, 7168), {(896, 7168): 1}),
    ],
)
def test_blocks_of_k3(name, shape, blocks):
    assert block_shapes(f"model.{name}", shape, preset("k3").model) == blocks


def test_mtp_layer_is_an_mla_layer():
    config = small_config()
    prefix = f"model.layers.{config.num_layers}"
    assert block_shapes(f"{prefix}.eh_proj.weight", (24, 48), config) == {(24, 48): 1}
    assert block_shapes(f"{prefix}.self_attn.q_b_proj.weight", (48, 12), config) == {(12, 12): 4}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        assert assign(f"{prefix}.{norm}.weight", (24,), config).group == "adamw"


@pytest.mark.parametrize(
    ("rest", "group"),
    [
        ("layers.0.self_attn.b_proj.weight", "adamw"),
        ("layers.0.self_attn.A_log", "adamw_no_decay"),
        ("layers.0.self_attn.dt_bias", "adamw_no_decay"),
        ("layers.0.self_attn.q_conv1d.weight", "adamw"),
        ("layers.0.self_attn.o_norm.weight", "adamw"),
        ("layers.2.self_attn.kv_a_layernorm.weight", "adamw"),
        ("layers.1.mlp_res_proj.weight", "adamw"),
        ("layers.1.self_attention_res_norm.weight", "adamw"),
        ("layers.1.block_sparse_moe.routed_expert_norm.weight", "adamw"),
        ("embed_tokens.weight", "adamw"),
        ("output_attn_res_proj.weight", "adamw"),
    ],
)
def test_adamw_side(rest, group):
    assert assign(f"model.{rest}", (1, 24), small_config()).group == group
    assert assign("lm_head.weight", (48, 24), small_config()).group == "adamw"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_b_proj.weight",  # a KDA layer has none
        "model.layers.2.self_attn.k_proj.weight",  # an MLA layer has none
        "model.layers.4.self_attn.o_proj.weight",  # past the last layer
        "model.layers.1.block_sparse_moe.experts.w13",
        "vision.proj.weight",
    ],
)
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match="no optimiser is assigned"):
        assign(name, (24, 24), small_config())


def test_the_selection_bias_is_nobodys():
    assert "model.layers.1.block_sparse_moe.gate.e_score_correction_bias" not in dict(small_model().named_parameters())
    with pytest.raises(ConfigError):
        assign("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (6,), small_config())


def test_head_groups():
    config = small_config()
    name, shape = "model.layers.2.self_attn.kv_b_proj.weight", (56, 10)
    assert block_shapes(name, shape, config, head_group=2) == {(16, 10): 2, (12, 10): 2}
    assert block_shapes(name, shape, config, head_group=0) == {(32, 10): 1, (24, 10): 1}
    with pytest.raises(ConfigError, match="must divide the number of heads"):
        assign(name, shape, config, head_group=3)


def test_a_view_takes_the_rows_it_lists():
    x = torch.arange(24 * 2).view(24, 2)
    view = View(strips=4, first=1, last=4, joined=2)
    blocks = view.of(x).flatten(1, 2)
    expected = torch.stack([torch.cat([x[s] for s in block]) for block in view.row_slices(24)])
    assert torch.equal(blocks, expected)
    assert [[(s.start, s.stop) for s in block] for block in view.row_slices(24)] == [
        [(1, 4), (7, 10)],
        [(13, 16), (19, 22)],
    ]
