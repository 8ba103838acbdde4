"""Routing kernels in Triton's interpreter; M35: any number of experts and choices, ungrouped."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same, outputs_and_gradients, relative_error
from tercet.errors import ShapeError, UnsupportedError
from tercet.ops import count_choices, count_needed, route, router_logits, use_tier


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


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(150, 70, 200), (1, 3, 17), (5, 896, 256), (2100, 5, 33)])
def test_logits_and_weight_gradient_are_fp32(tokens, experts, hidden):
    """Sizes that no tile divides, and more tokens than a slab. The rows' gradient errs by its cast to bf16."""
    x, w = torch.randn(tokens, hidden).bfloat16(), torch.randn(experts, hidden) / hidden**0.5
    logits, d_x, d_w = outputs_and_gradients(router_logits, [x, w], "triton")
    wanted = outputs_and_gradients(lambda x, w: x @ w.t(), [x.double(), w.double()])
    assert (logits.dtype, d_x.dtype, d_w.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for ours, formula, bound in zip((logits, d_x, d_w), wanted, (1e-6, 2.0**-8, 1e-6)):
        assert relative_error(ours, formula) <= bound
    assert ((d_x.double() - wanted[1]).abs() <= 2.0**-7 * wanted[1].abs() + 1e-4).all()


def test_logits_keep_every_bit_of_the_weight():
    """One-hot rows read the weight itself: huge, tiny and ordinary values come back exactly, parts added again."""
    w = torch.randn(40, 64) * 10.0 ** torch.randint(-20, 20, (40, 64))
    with use_tier("triton"):
        logits = router_logits(torch.eye(64).bfloat16(), w)
    assert torch.equal(logits, w.t())


def test_logits_repeat_take_any_layout_and_no_rows():
    x, w = torch.randn(48, 70).bfloat16().t(), torch.randn(48, 9).t()
    first, second = (outputs_and_gradients(router_logits, [x, w], "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert relative_error(first[0], x.double() @ w.double().t()) <= 1e-6
    logits, d_x, d_w = outputs_and_gradients(router_logits, [x[:0], w], "triton")
    assert (logits.shape, d_x.shape) == ((0, 9), (0, 48)) and not d_w.any()


def test_logits_with_a_bf16_weight():
    x, w = torch.randn(20, 40).bfloat16(), torch.randn(7, 40).bfloat16()
    logits, _, d_w = outputs_and_gradients(router_logits, [x, w], "triton")
    assert relative_error(logits, x.double() @ w.double().t()) <= 1e-6
    assert d_w.dtype is torch.bfloat16


def test_logits_decline_fp32_rows():
    with use_tier("triton"), pytest.raises(UnsupportedError, match="bf16"):
        router_logits(torch.randn(4, 8), torch.randn(3, 8))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k", "bins"), [(70, 11, 3, 40), (1, 3, 1, 2), (9, 896, 16, 1000)])
def test_counts_equal_counting_one_by_one(tokens, experts, k, bins, masked):
    scores, cutoff = torch.rand(tokens, experts), 0.5 + 0.3 * torch.randn(tokens)
    scores[0, 0] = cutoff[0] - 3.0  # beyond the last bin
    if tokens > 1:
        scores[1, 1], scores[1, 2] = float("nan"), float("inf")
    chosen = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    valid = torch.rand(tokens) > 0.4 if masked else None
    lowest, width = torch.tensor(-1.0), torch.tensor(2.5 / bins)
    histogram = torch.ones(experts, bins, dtype=torch.int32)
    loads = torch.full((experts,), 7)
    with use_tier("triton"):
        for _ in range(2):
            count_needed(histogram, scores, cutoff, lowest=lowest, width=width, valid_M=valid)
            count_choices(loads, chosen, valid)
    wanted, wanted_loads = torch.ones(experts, bins, dtype=torch.int32), torch.full((experts,), 7)
    for i in range(tokens):
        if valid is not None and not valid[i]:
            continue
        for j, place in enumerate(((cutoff[i] - scores[i] - lowest) / width).tolist()):
            slot = 0 if place != place else int(min(max(place, 0.0), bins - 1.0))
            wanted[j, slot] += 2
        for j in chosen[i].tolist():
            wanted_loads[j] += 2
    assert torch.equal(histogram, wanted)
    assert torch.equal(loads, wanted_loads)


def test_counts_of_nothing_and_wrong_shapes():
    histogram, loads, edge = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), torch.ones(())
    for tier in ("torch", "triton"):
        with use_tier(tier):
            count_needed(histogram, torch.zeros(0, 4), torch.zeros(0), lowest=edge, width=edge)
            count_choices(loads, torch.zeros(0, 2, dtype=torch.int64))
            assert not histogram.any() and not loads.any()
            with pytest.raises(ShapeError, match=r"cutoff \[3\]"):
                count_needed(histogram, torch.zeros(3, 4), torch.zeros(2), lowest=edge, width=edge)
            with pytest.raises(ShapeError, match="one flag for each of 3 tokens"):
                count_choices(loads, torch.zeros(3, 2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))
    with use_tier("triton"), pytest.raises(UnsupportedError, match="fp32 scores"):
        count_needed(histogram, torch.zeros(3, 4).double(), torch.zeros(3), lowest=edge, width=edge)
