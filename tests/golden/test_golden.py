"""Values that a refactor must not move.

Weights come from a closed formula and everything runs in fp64 on one thread, so that the stored numbers hold on any CPU
to about 1e-12; they are compared to 1e-9. Bit-identity across processors cannot be expected (vector widths differ); it
is asserted between two runs on one machine. After a change that is meant to move them, write them anew with
``TERCET_WRITE_GOLDEN=1 pytest tests/golden``.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from formulas import k3_miniature, kimi_linear_miniature
from tercet.model import CausalLM, Context, new_states
from tercet.ops import newton_schulz

STORE = Path(__file__).with_name("values.json")
CONFIGS = {"k3": k3_miniature(num_nextn_predict_layers=1), "kimi-linear": kimi_linear_miniature()}


def wave(shape: torch.Size, phase: float) -> torch.Tensor:
    """Values without a generator: sine of quadratically growing angles."""
    count = torch.arange(shape.numel(), dtype=torch.float64)
    return torch.sin(0.37 * count + 0.0011 * count * count + phase).view(shape)


def golden_model(name: str) -> CausalLM:
    model = CausalLM(CONFIGS[name]).double()
    with torch.no_grad():
        for n, (key, x) in enumerate(model.state_dict().items()):
            scale, shift = (0.3, 1.0) if key.endswith("norm.weight") else (0.3, 0.0)
            x.copy_(scale * wave(x.shape, float(n)) + shift)
    return model


def values_of(name: str) -> dict[str, float]:
    """A few dozen numbers that depend on everything: logits, cached logits, loss, gradients, states."""
    model = golden_model(name)
    config = model.config
    tokens = (torch.arange(45) * 7 % config.vocab_size)[None]
    bounds = torch.tensor([0, 17, 17, 45], dtype=torch.int32)
    features = model.features(tokens, Context(cu_seqlens=bounds))
    logits = model.logits(features.hidden)[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    if config.num_nextn_predict_layers:
        rows = model.mtp_hidden(features.mixture, tokens.roll(-1, 1), Context(cu_seqlens=bounds))
        loss = loss + 0.3 * torch.nn.functional.cross_entropy(model.logits(rows)[0, :-2], tokens[0, 2:])
    loss.backward()
    values = {"loss": loss.item()}
    for t, c in ((0, 0), (16, 3), (17, 5), (44, 7)):
        values[f"logit {t} {c}"] = logits[t, c].item()
    for key, p in model.named_parameters():
        if p.grad is not None:
            values[f"gradient {key}"] = p.grad.norm().item()
    states = new_states(config, 1, dtype=torch.float64)
    with torch.no_grad():
        model(tokens[:, :20], Context(states=states))
        last = model(tokens[:, 20:21], Context(states=states))
    values["cached logit"] = last[0, 0, 0].item()
    values["state"] = states[0].recurrent.norm().item()
    gradient = model.lm_head.weight.grad
    values["orthogonalised gradient"] = newton_schulz(gradient[None])[0, 1, 2].item()
    return values


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_have_not_moved(name):
    values = values_of(name)
    if os.environ.get("TERCET_WRITE_GOLDEN"):
        stored = json.loads(STORE.read_text()) if STORE.exists() else {}
        STORE.write_text(json.dumps({**stored, name: values}, indent=1) + "\n")
    stored = json.loads(STORE.read_text())[name]
    assert stored.keys() == values.keys()
    moved = {k: (stored[k], x) for k, x in values.items() if x != pytest.approx(stored[k], rel=1e-9, abs=1e-12)}
    assert not moved


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_are_bit_identical(name):
    assert values_of(name) == values_of(name)
