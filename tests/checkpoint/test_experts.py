"""Cutting experts over ranks and down to a subset."""

from pathlib import Path

import pytest
import torch

from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.experts import ExpertSubset, split_packed
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import random_model
from tercet.checkpoint.mxfp4 import encode
from tercet.errors import ConfigError, ShapeError
from tercet.model import CausalLM
from tercet.model.moe import LatentMoE
from tercet.ops import situ_glu
from tests.checkpoint.miniatures import MINIATURE, published


@pytest.mark.parametrize("ranks", [4, 16, 32])
def test_M34_narrow_ranks_are_padded_with_exact_zeros(ranks: int) -> None:
    """3072/16 and 3072/32 lie below a kernel's 256: each rank is padded, and the ranks still add up to the whole."""
    inner, latent, at_least = 3072, 32, 256
    w1, w3 = (encode(torch.randn(inner, latent)) for _ in range(2))
    w2 = encode(torch.randn(latent, inner))
    z = torch.randn(5, latent, dtype=torch.float64)

    def expert(w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        hidden = situ_glu(z @ w1.T, z @ w3.T, beta=4.0, linear_beta=25.0)
        return hidden @ w2.T

    whole = expert(*(w.decode(torch.float64) for w in (w1, w2, w3)))
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        parts = [
            split_packed(w1, "outputs", rank, ranks, at_least=at_least),
            split_packed(w2, "inputs", rank, ranks, at_least=at_least),
            split_packed(w3, "outputs", rank, ranks, at_least=at_least),
        ]
        width = max(at_least, inner // ranks)
        assert [part.shape for part in parts] == [(width, latent), (latent, width), (width, latent)]
        one, two, three = (part.decode(torch.float64) for part in parts)
        assert one[inner // ranks :].abs().sum() == 0
        assert two[:, inner // ranks :].abs().sum() == 0
        total += expert(one, two, three)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-10)


def test_ranks_must_not_cut_scale_groups() -> None:
    with pytest.raises(ShapeError, match="whole groups of 32"):
        split_packed(encode(torch.randn(3072, 64)), "outputs", 0, 64)
    with pytest.raises(ShapeError, match="5 parts"):
        split_packed(encode(torch.randn(64, 3072)), "inputs", 0, 5)


def test_M36_pruned_experts_take_their_router_rows_and_biases_along(tmp_path: Path) -> None:
    """Experts that are never chosen can go without changing a logit — if gate rows and biases go with them."""
    model = random_model(MINIATURE)
    kept = [5, 0, 3, 2]
    for module in model.modules():
        if isinstance(module, LatentMoE):
            bias = module.gate.e_score_correction_bias
            bias[[n for n in range(6) if n not in kept]] = -10.0
    tokens = torch.randint(0, 320, (2, 17))
    write_published(ExpertSubset(ModelSource(model), kept), tmp_path / "pruned", LAYOUTS["k3"], experts="plain")
    pruned = load_model(tmp_path / "pruned")
    assert isinstance(pruned, CausalLM)
    assert pruned.config.moe.num_experts == 4
    torch.testing.assert_close(pruned(tokens), model(tokens), rtol=0, atol=1e-5)


def test_pruning_keeps_packed_bytes(tmp_path: Path) -> None:
    source = CheckpointDirectory.open(published("k3"))
    write_published(ExpertSubset(source, [4, 1, 2]), tmp_path / "pruned", LAYOUTS["k3"])
    pruned = CheckpointDirectory.open(tmp_path / "pruned")
    stem = "language_model.model.layers.2.block_sparse_moe."
    for new, old in enumerate([4, 1, 2]):
        for part in ("w1.weight_packed", "w2.weight_scale"):
            assert torch.equal(
                pruned.tensor(f"{stem}experts.{new}.{part}"), source.tensor(f"{stem}experts.{old}.{part}")
            )
    gate = source.tensor(f"{stem}gate.weight")
    assert torch.equal(pruned.tensor(f"{stem}gate.weight"), gate[[4, 1, 2]])


def test_bad_selections() -> None:
    source = CheckpointDirectory.open(published("k3"))
    for experts in ([0, 0, 1], [0, 1, 6], [-1, 0, 1], [0, 1]):
        with pytest.raises(ConfigError):
            ExpertSubset(source, experts)
