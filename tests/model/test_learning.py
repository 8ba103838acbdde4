"""A model with any mechanism disconnected would fail here: every tensor receives gradient, and every tensor matters."""

from dataclasses import replace

import pytest
import torch

from formulas import k3_miniature, kimi_linear_miniature
from tercet.config import ModelConfig
from tercet.model import CausalLM, Context, build
from tercet.ops import IGNORE, linear_cross_entropy
from tercet.presets import tiny_model

UNUSED = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}
"""Published, and unused: at layer 0 the bank is still empty (model.md §6)."""


def loss_of(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss, plus the MTP loss where the model has that layer."""
    features = model.features(tokens)
    count = tokens.shape[1] - 1
    weight = torch.full((count,), 1 / count)
    total, _ = linear_cross_entropy(features.hidden[0, :-1], model.lm_head.weight, tokens[0, 1:], weight)
    if model.config.num_nextn_predict_layers:
        rows = model.mtp_hidden(features.mixture[:, :-1], tokens[:, 1:])
        targets = torch.cat([tokens[0, 2:], torch.tensor([IGNORE])])
        total = total + 0.3 * linear_cross_entropy(rows[0], model.lm_head.weight, targets, weight)[0]
    return total


def step(model: CausalLM, tokens: torch.Tensor, rate: float) -> float:
    model.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= rate * p.grad / (p.grad.norm() + 1e-12) * p.numel() ** 0.5
    return loss.item()


TINY = replace(tiny_model(), num_nextn_predict_layers=1)
SMALL = {
    "k3": k3_miniature(num_layers=4, full_attention_layers=(1, 3), num_nextn_predict_layers=1),
    "kimi-linear": kimi_linear_miniature(num_layers=3, full_attention_layers=(2,)),
}
CONFIGS = pytest.mark.parametrize(
    "config",
    [pytest.param(TINY, id="tiny", marks=pytest.mark.slow), *(pytest.param(c, id=n) for n, c in SMALL.items())],
)


@pytest.mark.parametrize("config", [TINY, *SMALL.values()], ids=["tiny", *SMALL])
def test_every_parameter_receives_gradient(config: ModelConfig):
    """From the second step on: Attention-Residuals queries start at zero and hold back their norms' gradient."""
    model, tokens = build(config), torch.randint(config.vocab_size, (1, 200))
    step(model, tokens, 1e-3)
    model.zero_grad()
    loss_of(model, tokens).backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.norm() > 0}
    assert idle == (UNUSED if config.attn_res_block_size else set())
    for name, p in model.named_parameters():
        if ".experts." in name:
            assert (p.grad.flatten(1).norm(dim=1) > 0).all(), f"{name}: an expert has no gradient"


@CONFIGS
def test_a_few_steps_reduce_the_loss(config: ModelConfig):
    model, tokens = build(config), torch.randint(config.vocab_size, (1, 60))
    losses = [step(model, tokens, 3e-3) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1


@CONFIGS
def test_every_tensor_changes_the_logits(config: ModelConfig):
    """Perturbing any single tensor, the selection bias among them, moves the output (or the MTP layer's)."""
    model, tokens = build(config).double(), torch.randint(config.vocab_size, (1, 12))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)

        def output() -> torch.Tensor:
            features = model.features(tokens)
            rows = [model.logits(features.hidden)]
            if config.num_nextn_predict_layers:
                rows.append(model.logits(model.mtp_hidden(features.mixture, tokens)))
            return torch.cat(rows)

        before = output()
        silent = set()
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            saved = x.clone()
            x += 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            if torch.equal(output(), before):
                silent.add(name)
            x.copy_(saved)
        assert torch.equal(output(), before)
    assert silent == (UNUSED if config.attn_res_block_size else set())


def test_switches_build_other_functions():
    """Each switch of the architecture, changed alone, gives another model of the same weights where they overlap."""
    config = k3_miniature()
    model, tokens = build(config).double(), torch.randint(config.vocab_size, (1, 24))
    for name, p in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            torch.nn.init.normal_(p, std=0.3)
    with torch.no_grad():
        before = model(tokens)
    changes = {
        "activation": {"activation": "silu"},
        "beta": {"situ_beta": 2.0},
        "linear beta": {"situ_linear_beta": 2.0},
        "block size": {"attn_res_block_size": 3},
        "eps": {"rms_norm_eps": 1e-2},
        "floor": {"kda": replace(config.kda, gate_lower_bound=-2.0)},
        "softplus": {"kda": replace(config.kda, gate_lower_bound=None)},
        "top-k": {"moe": replace(config.moe, num_experts_per_token=2)},
        "scaling of the shared path": {"moe": replace(config.moe, renormalize=False, latent_norm=False)},
    }
    for what, change in changes.items():
        other = CausalLM(replace(config, **change)).double()
        missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
        assert not missing, what
        assert all("routed_expert_norm" in name for name in unexpected), what
        with torch.no_grad():
            assert not torch.allclose(other(tokens), before, rtol=1e-4), what


def test_context_reaches_every_layer():
    """A carried state changes what follows; without it, the same tokens give the same logits."""
    config = k3_miniature()
    model, tokens = build(config), torch.randint(config.vocab_size, (1, 10))
    with torch.no_grad():
        assert torch.equal(model(tokens, Context()), model(tokens))
