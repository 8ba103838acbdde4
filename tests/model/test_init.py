"""Initial values (model.md §11), names, and reproducibility from a seed."""

import math

import pytest
import torch

from formulas import k3_miniature, kimi_linear_miniature
from tercet.model import CausalLM, build, to_compute_dtype
from tercet.model.names import is_stacked, locate, published_name, published_tensors
from tercet.ops import kda_gate
from tercet.presets import preset, tiny_model


def test_seed_fixes_every_value():
    torch.manual_seed(1)
    first = build(k3_miniature(), seed=7)
    torch.manual_seed(2)
    again, other = build(k3_miniature(), seed=7), build(k3_miniature(), seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build(k3_miniature())
    assert torch.equal(torch.get_rng_state(), before)


def test_distributions():
    config = tiny_model()
    for name, x in build(config).named_parameters():
        if name.endswith("_res_proj.weight"):
            assert (x == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (x == 1).all(), name
        elif "conv1d" in name:
            assert x.abs().max() <= 0.5 and x.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)
        elif name.endswith("A_log"):
            assert (x == 0).all()
        elif not name.endswith("dt_bias"):
            assert x.std().item() == pytest.approx(config.initializer_range, rel=0.1), name
            assert abs(x.mean().item()) < 4 * config.initializer_range / x.numel() ** 0.5, name


def test_first_decay_of_the_bounded_gate():
    """g between −0.476 and −0.0050 when the low-rank term is 0."""
    for layer in build(tiny_model()).model.layers:
        if hasattr(layer.self_attn, "dt_bias"):
            bias = layer.self_attn.dt_bias.view(4, 32)
            g = kda_gate(torch.zeros(1, 4, 32), layer.self_attn.A_log, bias)
            assert (g >= -0.476).all() and (g <= -0.00499).all()
            assert g.min() < -0.3 and g.max() > -0.008


def test_first_decay_of_the_softplus_gate():
    """softplus(bias) is Mamba-2's step, log-uniform in [1e-3, 0.1]; slopes in [1, 16]."""
    attention = build(kimi_linear_miniature()).model.layers[0].self_attn
    step = torch.nn.functional.softplus(attention.dt_bias)
    assert (step >= 0.999e-3).all() and (step <= 0.1001).all()
    assert (attention.A_log.exp() >= 1).all() and (attention.A_log.exp() <= 16).all()


def test_router_does_not_tie():
    """M33: a zero router would send every token to the first experts."""
    config = tiny_model()
    model = build(config)
    gate = model.model.layers[1].block_sparse_moe.gate
    assert (gate.e_score_correction_bias == 0).all()
    scores = gate(torch.randn(400, config.hidden_size))
    chosen = scores.topk(2).indices.flatten().bincount(minlength=16)
    assert (chosen > 0).all() and chosen.max() < 4 * chosen.float().mean()


def test_first_loss_is_that_of_a_uniform_guess():
    config = tiny_model()
    model, tokens = build(config), torch.randint(config.vocab_size, (1, 128))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens)[0], torch.randint(config.vocab_size, (128,)))
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.1)


@pytest.mark.parametrize(("name", "count"), [("kimi-linear-48b", 20_493)])
def test_published_tensor_count(name, count):
    with torch.device("meta"):
        model = CausalLM(preset(name).model)
    names = [n for n, _ in published_tensors(model)]
    assert len(names) == len(set(names)) == count


def test_published_names_lead_back():
    model = build(k3_miniature())
    state = model.state_dict()
    assert sum(map(is_stacked, state)) == 15
    for name, x in published_tensors(model):
        parameter, expert = locate(name)
        home = state[parameter] if expert is None else state[parameter][expert]
        assert home.data_ptr() == x.data_ptr() and home.shape == x.shape
        if expert is not None:
            assert published_name(parameter, expert) == name


def test_k3_names():
    """The names that HF's published headers carry, one of each kind (checkpoint.md)."""
    names = {n for n, _ in published_tensors(build(k3_miniature()))}
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.0.self_attn.A_log",
        "model.layers.0.self_attn.f_b_proj.weight",
        "model.layers.0.self_attention_res_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.experts.6.w2.weight",
        "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight",
        "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.3.self_attn.g_proj.weight",
        "model.layers.3.mlp_res_norm.weight",
        "model.output_attn_res_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ):
        assert name in names


def test_no_biases_and_no_position_tables():
    """model.md §3: no bias on any map; M18: nothing rotates."""
    names = [n for n, _ in build(k3_miniature()).named_parameters()]
    assert not any(n.endswith(".bias") or "rope" in n or "rotary" in n or "inv_freq" in n for n in names)


def test_compute_dtype_is_in_place_and_reversible_in_kind():
    model = build(k3_miniature())
    identity = id(model.lm_head.weight)
    assert to_compute_dtype(model, torch.bfloat16) is model
    assert id(model.lm_head.weight) == identity and model.lm_head.weight.dtype is torch.bfloat16
    assert model.model.layers[0].self_attn.A_log.dtype is torch.float32
