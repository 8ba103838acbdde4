"""What the probe reports, against the formulas on the same tensors."""

import math

import pytest
import torch

from tercet.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from tercet.model import Context, Observer, build
from tercet.train.probe import HALF_LIFE_EDGES, Probe, probe


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=5,
        full_attention_layers=(3, 4),
        intermediate_size=64,
        first_dense_layers=1,
        activation="situ",
        attn_res_block_size=2,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=2, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=2,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
            intermediate_size=16,
            latent_size=16,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )


@pytest.fixture(scope="module")
def model(config):
    torch.manual_seed(1)
    model = build(config)
    for name, parameter in model.named_parameters():
        if "res_proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def packed():
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 64, (37,), generator=generator), torch.tensor([0, 11, 37], dtype=torch.int32)


class Tape(Observer):
    def __init__(self):
        self.mixes, self.routed, self.gates = {}, {}, {}

    def mixing(self, layer, place, sources, norm_weight, query):
        self.mixes[layer, place] = ([s.double() for s in sources], norm_weight.double(), query.double())

    def routing(self, layer, routing):
        self.routed[layer] = routing

    def decay(self, layer, z, A_log, dt_bias, lower_bound):
        self.gates[layer] = (z.double(), A_log.double(), dt_bias.double(), lower_bound)


@pytest.fixture(scope="module")
def seen(model, packed):
    tokens, bounds = packed
    tape = Tape()
    with torch.no_grad():
        model.features(tokens[None], Context(cu_seqlens=bounds, observer=tape))
    return tape, probe(model, tokens, bounds, step=7)


def test_row_names_every_mix_in_order(seen):
    _, row = seen
    assert row["kind"] == "probe" and row["step"] == 7
    places = [(mix["layer"], mix["place"]) for mix in row["mixes"]]
    assert places == [(0, "mlp")] + [(n, p) for n in range(1, 5) for p in ("attention", "mlp")] + [(5, "output")]
    # Embedding, then one more source with every block of two layers.
    assert [len(mix["weights"]) for mix in row["mixes"]] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_mix_weights_and_rms(seen):
    tape, row = seen
    for mix in row["mixes"]:
        sources, norm_weight, query = tape.mixes[mix["layer"], mix["place"]]
        scores = [(v * (v**2).mean(-1, keepdim=True).add(1e-5).rsqrt() * norm_weight) @ query for v in sources]
        weights = torch.stack(scores).softmax(0).flatten(1).mean(1)
        assert mix["weights"] == pytest.approx(weights.tolist(), rel=2e-4)
        assert sum(mix["weights"]) == pytest.approx(1.0, abs=1e-4)
        assert mix["rms"] == pytest.approx([float((v**2).mean().sqrt()) for v in sources], rel=2e-4)
    assert max(row["mixes"][-1]["weights"]) > 1.05 * min(row["mixes"][-1]["weights"])


def test_decay(seen):
    tape, row = seen
    assert sorted(row["decay"]) == ["0", "1", "2"]
    edges = row["half_life_edges"]
    assert edges == list(HALF_LIFE_EDGES) and edges[0] == 0.125 and edges[-1] == 8192
    for layer, entry in row["decay"].items():
        z, A_log, dt_bias, bound = tape.gates[int(layer)]
        g = bound / (1 + torch.exp(-A_log.exp()[:, None] * (z + dt_bias)))
        assert entry["half_life"] == pytest.approx([math.log(2) / float(-g[0, :, h].mean()) for h in (0, 1)], rel=1e-3)
        for head, histogram in enumerate(entry["histogram"]):
            half_lives = (math.log(2) / -g[0, :, head]).clamp(edges[0], edges[-1] * 0.999)
            expected = torch.histogram(half_lives.flatten(), torch.tensor(edges).double()).hist / half_lives.numel()
            assert histogram == pytest.approx(expected.tolist(), abs=2.1 / half_lives.numel())
            assert sum(histogram) == pytest.approx(1.0, abs=1e-3)
        assert entry["near_floor"] == pytest.approx(float((g < -4.5).double().mean()), abs=1e-3)
        assert entry["near_one"] == pytest.approx(float((g > -0.05).double().mean()), abs=1e-3)


def test_decay_at_both_ends_is_counted():
    watching = Probe()
    for z in (-1e4, 1e4):
        watching.decay(0, torch.full((1, 5, 1, 4), z), torch.zeros(1), torch.zeros(1, 4), -5.0)
    entry = watching.row(0)["decay"]["0"]
    assert entry["histogram"][0][0] == entry["histogram"][0][-1] == 0.5
    assert entry["near_floor"] == entry["near_one"] == 0.5
    assert entry["half_life"] == pytest.approx([math.log(2) / 2.5], rel=1e-4)


def test_loads(seen):
    tape, row = seen
    assert sorted(row["load"]) == ["1", "2", "3", "4"]
    for layer, load in row["load"].items():
        counts = torch.bincount(tape.routed[int(layer)].experts.flatten(), minlength=8)
        assert load == pytest.approx((counts / 74).tolist(), rel=1e-4)


def test_several_batches_count_by_token(model, packed):
    """The row over two documents run apart is the row over both packed."""
    tokens, bounds = packed
    apart = Probe(model.config.rms_norm_eps)
    with torch.no_grad():
        for start, stop in ((0, 11), (11, 37)):
            model.features(tokens[None, start:stop], Context(observer=apart))
    together, row = probe(model, tokens, bounds, 0), apart.row(0)
    for one, two in zip(together["mixes"], row["mixes"], strict=True):
        assert one["weights"] == pytest.approx(two["weights"], rel=1e-3)
        assert one["rms"] == pytest.approx(two["rms"], rel=1e-3)
    for layer in row["load"]:
        assert row["load"][layer] == pytest.approx(together["load"][layer])
    for layer in row["decay"]:
        assert row["decay"][layer]["half_life"] == pytest.approx(together["decay"][layer]["half_life"], rel=1e-3)


def test_probing_changes_nothing(model, packed):
    tokens, bounds = packed
    model.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model.features(tokens[None], Context(cu_seqlens=bounds)).hidden
    watched = model.features(tokens[None], Context(cu_seqlens=bounds, observer=Probe())).hidden
    assert torch.equal(plain, watched)
    probe(model, tokens, bounds, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    watched.sum().backward()
    assert model.model.layers[1].block_sparse_moe.gate.weight.grad is not None


def test_an_unused_probe_is_an_empty_row():
    row = Probe().row(3)
    assert row["mixes"] == [] and row["decay"] == {} and row["load"] == {}
