"""Routing kernels in Triton's interpreter; M35: any number of experts and choices, ungrouped."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same
from tercet.ops import route, use_tier


@pytest.mark.parametrize(("tokens", "experts", "k"), [(3, 896, 16), (2, 896, 17), (5, 6, 2), (1, 3, 1)])
def test_m35_choice_and_cutoff(tokens, experts, k):
    logits, bias = torch.randn(tokens, experts), 0.1 * torch.randn(experts)
    with use_tier("triton"):
        ours = route(logits, bias, top_k=k)
    best, chosen = (logits.double().sigmoid() + bias.double()).topk(k + 1, dim=-1)
    assert torch.equal(ours.experts, chosen[:, :k])
    assert torch.allclose(ours.cutoff, best[:, k].float(), atol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_scores_and_gradients(renormalize):
    bias = 0.3 * torch.randn(11)

    def ours(logits):
        routing = route(logits, bias, top_k=3, renormalize=renormalize, scaling_factor=2.5)
        return routing.weights, routing.scores

    def formula(logits):
        scores = logits.sigmoid()
        weights = scores.gather(1, (scores + bias).topk(3, dim=-1).indices)
        return 2.5 * (weights / weights.sum(-1, keepdim=True) if renormalize else weights), scores

    assert_same(ours, formula, [torch.randn(7, 11)], 1e-6, "triton")


def test_nan_stays_in_its_row():
    logits = torch.randn(3, 8)
    logits[1, ::2] = float("nan")
    with use_tier("triton"):
        broken, clean = route(logits, torch.zeros(8), top_k=6), route(logits[::2], torch.zeros(8), top_k=6)
    assert torch.equal(broken.weights[::2], clean.weights)
    assert broken.weights[1].isnan().all()
    assert sorted(set(broken.experts[1].tolist())) == sorted(broken.experts[1].tolist())
    assert int(broken.experts.max()) < 8
