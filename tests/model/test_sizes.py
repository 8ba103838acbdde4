"""Published totals, byte figures and FLOPs, counted from the configuration alone (model.md §2, §13; anchor 3)."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tercet.model import Context, build, new_states
from tercet.model.sizes import Sizes, sizes
from tercet.ops import use_tier
from tercet.presets import PRESETS, preset, tiny_model

MIB = 1024**2


@pytest.fixture(scope="module")
def k3() -> Sizes:
    return sizes(preset("k3").model)


@pytest.fixture(scope="module")
def kimi_linear() -> Sizes:
    return sizes(preset("kimi-linear-48b").model)


def test_k3_totals(k3):
    assert k3.total == 2_779_484_476_000
    assert k3.active_without_embedding == pytest.approx(104.190e9, abs=0.5e6)
    assert k3.active == pytest.approx(105.364e9, abs=0.5e6)
    assert k3.active_without_embedding - k3.component("head").active == pytest.approx(103.015e9, abs=0.5e6)


def test_k3_components(k3):
    assert k3.component("KDA attention").total == 69 * 443_740_384
    assert k3.component("MLA attention").total == 24 * 232_196_096
    assert k3.component("dense MLP").total == 726_663_168
    assert k3.component("embedding").total == k3.component("head").total == 1_174_405_120
    assert k3.component("routed experts").total == 2_722_740_830_208 == 92 * 896 * 33_030_144
    rest = k3.component("router and latent").total + k3.component("shared experts").total
    assert rest == 92 * 189_927_808
    assert rest + k3.component("routed experts").total == 92 * 29_784_936_832
    # Norms and AttnRes vectors: 6 · H a layer; the final norm and the output mix add three more.
    assert k3.component("norms and AttnRes").total == 93 * 43_008 + 3 * 7168
    assert k3.component("routed experts").total / k3.total == pytest.approx(0.9796, abs=5e-5)


def test_k3_request_memory(k3):
    assert k3.mla_cache_bytes() == 27_648
    assert k3.kda_state_bytes() == 414 * MIB
    assert k3.conv_state_bytes() / MIB == pytest.approx(14.55, abs=0.01)
    assert (k3.kda_state_bytes() + k3.conv_state_bytes()) / MIB == pytest.approx(428.55, abs=0.01)
    assert (k3.kda_state_bytes() + k3.conv_state_bytes()) // k3.mla_cache_bytes() == 16_253


def test_kimi_linear(kimi_linear):
    assert kimi_linear.total == 49_122_681_728
    assert kimi_linear.active_without_embedding == pytest.approx(3.107e9, abs=0.5e6)
    assert kimi_linear.active == pytest.approx(3.484e9, abs=0.5e6)
    assert kimi_linear.mla_cache_bytes() == 8064
    assert kimi_linear.kda_state_bytes() == 40 * MIB
    assert kimi_linear.conv_state_bytes() / MIB == pytest.approx(1.41, abs=0.01)
    assert kimi_linear.component("KDA attention").total / 20 == pytest.approx(39.51e6, abs=5e3)
    assert kimi_linear.component("MLA attention").total / 7 == pytest.approx(29.11e6, abs=5e3)
    assert kimi_linear.component("routed experts").total / (26 * 256) == pytest.approx(7.08e6, abs=5e3)


@pytest.mark.parametrize(("name", "low", "high"), [("small", 95e6, 105e6), ("base", 0.95e9, 1.1e9)])
def test_own_presets_are_the_size_they_say(name, low, high):
    assert low <= sizes(preset(name).model).total <= high


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_is_counted_once(name):
    counted = sizes(preset(name).model)
    assert all(c.total > 0 and c.matrices <= c.active <= c.total for c in counted.components)
    assert len({c.name for c in counted.components}) == len(counted.components)


def test_bytes_equal_what_states_occupy():
    config = tiny_model()
    model, counted = build(config), sizes(config)
    states = new_states(config, 2, dtype=torch.bfloat16)
    assert sum(s.nbytes for s in states) == 2 * (counted.kda_state_bytes() + counted.conv_state_bytes())
    states = new_states(config, 2)
    with torch.no_grad():
        model(torch.randint(config.vocab_size, (2, 7)), Context(states=states))
    fixed = counted.kda_state_bytes() + counted.conv_state_bytes(4)
    assert sum(s.nbytes for s in states) == 2 * (fixed + 7 * counted.mla_cache_bytes(4))


def test_flops_against_the_counter_of_torch():
    """Every product of a real forward pass, counted by torch: the reference tier forms the whole logit matrix."""
    config = replace(tiny_model(), first_dense_layers=4, full_attention_layers=(0, 1, 2, 3))
    model, length = build(config), 64
    with FlopCounterMode(display=False) as counter, torch.no_grad(), use_tier("reference"):
        model(torch.randint(config.vocab_size, (1, length)))
    heads_and_widths = 4 * config.mla.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim)
    causal, full = heads_and_widths * (length + 1), heads_and_widths * 2 * length
    assert counter.get_total_flops() == length * (sizes(config).forward_flops(length) - causal + full)


def test_flops_grow_with_length_only_in_mla(k3):
    slope = (k3.forward_flops(20_000) - k3.forward_flops(10_000)) / 10_000
    assert slope == 24 * 96 * (192 + 128)
    assert k3.training_flops(8192) == 3 * k3.forward_flops(8192)
    assert k3.training_flops(8192, recompute=True) == 4 * k3.forward_flops(8192)
    # Six FLOPs per active parameter is the usual estimate; attention and recurrence come on top.
    assert k3.training_flops(8192) / (6 * k3.active_without_embedding) == pytest.approx(1.03, abs=0.03)


def test_training_memory_is_weights_master_gradients_momentum(k3):
    parts = k3.training_bytes()
    assert parts["bf16 weights"] * 2 == parts["fp32 master weights"] == parts["fp32 gradients"]
    assert parts["fp32 second moment"] == 4 * (2 * 1_174_405_120 + 93 * 43_008 + 3 * 7168)
    assert k3.training_bytes(bf16=False)["bf16 weights"] == 0


def test_mtp_layer_counts_in_training_only():
    plain, extra = sizes(tiny_model()), sizes(replace(tiny_model(), num_nextn_predict_layers=1))
    assert extra.active == plain.active
    assert extra.total - plain.total == extra.component("MTP layer").total > 0
    assert extra.forward_flops(512) == plain.forward_flops(512)
    assert extra.training_flops(512) > plain.training_flops(512)


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_estimate_against_saved_tensors(recompute):
    """The estimate lies within a factor of 1.5 of what autograd really keeps (each storage once, no parameters)."""
    config = tiny_model()
    model, tokens = build(config), torch.randint(config.vocab_size, (2, 256))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(x)
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.features(tokens, Context(recompute=recompute))
    measured = sum(kept.values())
    estimate = sizes(config).activation_bytes(512, value_bytes=4, recompute=recompute)
    if recompute:  # the one layer that is recomputed in full is not alive after the forward pass
        estimate -= 512 * 4 * max(sizes(config)._layer_values(n) for n in range(4))
    assert 1 / 1.5 < estimate / measured < 1.5
