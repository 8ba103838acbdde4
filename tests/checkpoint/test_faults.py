"""Rows of the list of public faults that show only once a checkpoint is a model."""

from pathlib import Path

import pytest
import torch

from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import random_model
from tercet.checkpoint.mxfp4 import PackedWeight, decode, encode
from tercet.checkpoint.weights import weights
from tercet.model import Context
from tercet.model.layers import RMSNorm
from tercet.model.mla import MultiHeadLatentAttention
from tercet.model.moe import Experts
from tests.checkpoint.miniatures import MINIATURES, published


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_M16_epsilons_after_loading(name: str) -> None:
    """1e-6 for the norms of the latent q and kv, the configured one (1e-5) everywhere else."""
    seen = set()
    for path, module in load_model(published(name)).named_modules():
        if isinstance(module, RMSNorm):
            latent = path.endswith(("q_a_layernorm", "kv_a_layernorm"))
            assert module.eps == (1e-6 if latent else 1e-5), path
            seen.add(latent)
    assert seen == {True, False}


def test_M18_shared_key_part_is_used_and_never_rotated() -> None:
    """The 16 (published: 64) shared dims enter q·k, and the order of the past does not matter to attention."""
    model = load_model(published("k3"))
    layer = next(m for m in model.modules() if isinstance(m, MultiHeadLatentAttention))
    x = torch.randn(1, 12, 64)
    out = layer(x, Context())
    shuffled = torch.cat([x[:, torch.randperm(11)], x[:, 11:]], dim=1)
    torch.testing.assert_close(layer(shuffled, Context())[:, -1], out[:, -1], rtol=0, atol=1e-5)
    weight = layer.get_parameter("kv_a_proj_with_mqa.weight")
    with torch.no_grad():
        weight[-16:] = 0
    assert (layer(x, Context())[:, -1] - out[:, -1]).abs().max() > 1e-3
    assert layer.scale == 48**-0.5


def test_M14_a_wrong_exponent_bias_shows_in_each_of_w1_w2_w3() -> None:
    """The latent norm hides a factor on w2 from the logits, so each matrix is compared by value."""
    model = random_model(MINIATURES["k3"])
    experts = next(m for m in model.modules() if isinstance(m, Experts))
    for name in ("w1", "w2", "w3"):
        value = experts.get_parameter(name)[0].detach()
        packed = encode(value)
        error = (decode(packed.packed, packed.scale) - value).norm() / value.norm()
        assert error < 0.15
        wrong = decode(packed.packed, packed.scale + 2)  # what bias 125 would give
        assert (wrong - value).norm() / value.norm() > 2


@torch.no_grad()
def test_M14_a_factor_on_w2_alone_hides_behind_the_latent_norm() -> None:
    """Why the test above compares values: times four on all w2 is invisible in the logits, on w1 it is not."""

    def logits(w1: float, w2: float) -> torch.Tensor:
        model = random_model(MINIATURES["k3"])
        for name, parameter in model.named_parameters():
            if name.endswith("experts.w1"):
                parameter *= w1
            elif name.endswith("experts.w2"):
                parameter *= 256 * w2  # well above the norm's epsilon
        return model(torch.arange(9)[None])

    right = logits(1, 1)
    assert (logits(1, 4) - right).abs().max() < 1e-3 * right.std()
    assert (logits(4, 1) - right).abs().max() > 0.1 * right.std()


def test_M12_codes_and_scales_reach_the_model_as_they_are() -> None:
    """Codes and scales of a checkpoint reach the model as E2M1 × E8M0, value by value."""
    directory = CheckpointDirectory.open(published("k3"))
    model = load_model(directory)
    for weight in weights(directory.model):
        if weight.role != "expert":
            continue
        packed = directory.weight(weight)
        assert isinstance(packed, PackedWeight)
        head, _, tail = weight.name.partition(".experts.")
        number, part, _ = tail.split(".")
        loaded = model.get_submodule(f"{head}.experts").get_parameter(part)[int(number)]
        codes = torch.stack([packed.packed & 15, packed.packed >> 4], -1).flatten(1)
        magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()]
        scale = torch.pow(2.0, packed.scale.double() - 127).repeat_interleave(32, 1)
        expected = torch.where(codes >= 8, -magnitude, magnitude) * scale
        assert torch.equal(loaded.double(), expected)


@torch.no_grad()
def test_gate_up_order_of_experts() -> None:
    """w1 is the gate and w3 the way up: SiTU is not symmetric, so swapping them moves the logits."""
    model, swapped = random_model(MINIATURES["k3"]), random_model(MINIATURES["k3"])
    for module in swapped.modules():
        if isinstance(module, Experts):
            module.w1, module.w3 = module.w3, module.w1
    tokens = torch.arange(9)[None]
    assert (swapped(tokens) - model(tokens)).abs().max() > 0.05 * model(tokens).std()


def test_loading_in_bfloat16_keeps_fp32_tensors() -> None:
    model = load_model(published("k3"), dtype=torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kept = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_export_does_not_round_fp32_tensors(tmp_path: Path) -> None:
    """fp32 tensors of a K3 export hold the model's fp32 values, not their bfloat16 rounding."""
    model = random_model(MINIATURES["k3"])
    write_published(ModelSource(model), tmp_path / "k3", LAYOUTS["k3"])
    stored = CheckpointDirectory.open(tmp_path / "k3").tensor("language_model.model.layers.0.self_attn.dt_bias")
    assert torch.equal(stored, model.get_parameter("model.layers.0.self_attn.dt_bias"))
    assert not torch.equal(stored, stored.bfloat16().float())
