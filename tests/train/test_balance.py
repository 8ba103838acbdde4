"""What counts and when: the state machine, its baselines and their state (training.md §2.4–§2.7, §2.10, §12.1–12.3)."""

import io
import itertools
from collections import defaultdict

import pytest
import torch

from tercet.config import BalanceConfig
from tercet.errors import CheckpointError, ShapeError, TercetWarning
from tercet.model import Context
from tercet.ops import IGNORE, Routing
from tercet.train.balance import BALANCERS, balancer_for
from tercet.train.balance.rules import CROWDED_STEPS
from tests.train.balance_models import Skewed, make_balancer, routed, step
from tests.train.train_models import small_config, small_model

COARSE = pytest.mark.filterwarnings("ignore::tercet.errors.TercetWarning")
"""These tests have too few tokens a bin for the resolution guard to be quiet."""


def tokens_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 48, shape, generator=torch.Generator().manual_seed(seed))


def histograms(balancer) -> dict[int, torch.Tensor]:
    return {layer: histogram.clone() for layer, histogram in balancer.histograms.items()}


def same(x: dict[int, torch.Tensor], y: dict[int, torch.Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)


def bias_over_ranks(kind: str, scores: torch.Tensor, ranks: int, micro_batches: int, repeat: bool) -> torch.Tensor:
    """Split the tokens over simulated ranks and micro-batches; sums travel through the `reduce` hook."""
    start = torch.linspace(-0.2, 0.3, scores.shape[1])
    sent: dict[int, list[torch.Tensor]] = defaultdict(list)

    def count(balancer, share: torch.Tensor) -> None:
        balancer.begin_step()
        for index, part in enumerate(share.chunk(micro_batches)):
            observer = balancer.begin_micro_batch(index)
            for _ in range(2 if repeat else 1):
                observer.routing(0, routed(balancer, part))
        balancer.finish(accepted=True)

    shares = scores.chunk(ranks)
    for share in shares[1:]:
        calls = itertools.count()
        other = make_balancer(
            scores.shape[1], 4, kind=kind, bias=start, reduce=lambda t, calls=calls: sent[next(calls)].append(t) or t
        )
        count(other, share)
    calls = itertools.count()
    first = make_balancer(
        scores.shape[1], 4, kind=kind, bias=start, reduce=lambda t: sum(sent[next(calls)], start=t.clone())
    )
    count(first, shares[0])
    return first.bias(0).clone()


@COARSE
@pytest.mark.parametrize("kind", ["qb", "bip", "sign", "sign_centred"])
def test_bias_is_bit_identical_over_ranks_micro_batches_and_recomputation(kind):
    scores = Skewed(64, 500, 1.0).batch()
    expected = bias_over_ranks(kind, scores, 1, 1, repeat=False)
    for ranks, micro_batches, repeat in itertools.product((1, 2, 4), (1, 3, 8), (False, True)):
        assert torch.equal(bias_over_ranks(kind, scores, ranks, micro_batches, repeat), expected)
    assert torch.equal(bias_over_ranks(kind, scores[torch.randperm(500)], 2, 3, repeat=False), expected)


@COARSE
def test_averaging_quantiles_is_not_the_pooled_quantile():
    """Claim C3: `qb_micro` depends on the split, `qb` does not."""
    scores = Skewed(64, 500, 1.0).batch()
    whole = bias_over_ranks("qb_micro", scores, 1, 1, repeat=False)
    assert torch.equal(whole, bias_over_ranks("qb_micro", scores, 1, 1, repeat=True))
    assert float((whole - bias_over_ranks("qb_micro", scores, 1, 8, repeat=False)).abs().max()) > 1e-3


@pytest.mark.parametrize("mtp", [False, True])
def test_recomputed_forwards_count_once(mtp):
    model = small_model(torch.float32, mtp=mtp)
    balancer = balancer_for(model, BalanceConfig(bins=50))
    parts = [tokens_of(2, 7, seed=seed) for seed in range(3)]

    def run(recompute: bool) -> dict[int, torch.Tensor]:
        balancer.begin_step()
        for index, tokens in enumerate(parts):
            context = Context(observer=balancer.begin_micro_batch(index), recompute=recompute)
            features = model.features(tokens, context)
            loss = features.hidden.sum()
            if mtp:
                loss = loss + model.mtp_hidden(features.mixture, tokens.roll(-1, 1), context).sum()
            loss.backward()
        return histograms(balancer)

    counted = run(recompute=False)
    assert set(counted) == {1, 2, 3} if mtp else {1, 2}
    assert all(histogram.sum(1).tolist() == [42] * 6 for histogram in counted.values())
    assert same(counted, run(recompute=True))


def test_interleaved_micro_batches_count_once():
    """As in a pipeline: the backward pass of one micro-batch recomputes after the forward pass of the next."""
    model = small_model(torch.float32, mtp=False)
    balancer = balancer_for(model, BalanceConfig(bins=50))
    results = []
    for interleaved in (False, True):
        balancer.begin_step()
        waiting = []
        for index in range(3):
            context = Context(observer=balancer.begin_micro_batch(index), recompute=True)
            waiting.append(model.features(tokens_of(2, 7, seed=index), context).hidden.sum())
            if not interleaved:
                waiting.pop().backward()
        for loss in waiting:
            loss.backward()
        results.append(histograms(balancer))
    assert same(*results)


@COARSE
def test_evaluation_counts_nothing():
    model = small_model(torch.float32, mtp=False)
    balancer = balancer_for(model, BalanceConfig(bins=50))
    observer = balancer.begin_micro_batch(0)
    model.features(tokens_of(2, 7), Context(observer=observer))  # before the step
    balancer.begin_step()
    assert all(not histogram.any() for histogram in balancer.histograms.values())
    model.features(tokens_of(2, 7), Context(observer=balancer.begin_micro_batch(0)))
    before = histograms(balancer)
    with torch.no_grad():
        model.eval()
        model.features(tokens_of(3, 9))
        model.train()
    assert same(before, histograms(balancer))
    balancer.finish(accepted=True)
    model.features(tokens_of(2, 7), Context(observer=balancer.begin_micro_batch(1)))  # after it
    assert all(not histogram.any() for histogram in balancer.histograms.values())


def test_padding_is_not_counted():
    scores = torch.rand(40, 6)
    valid = torch.rand(40) > 0.4
    padded, clean = make_balancer(6, 2), make_balancer(6, 2)
    padded.begin_step()
    padded.begin_micro_batch(0, valid=valid).routing(0, routed(padded, scores))
    report = padded.finish(accepted=True)[0]
    assert report == step(clean, scores[valid])
    assert sum(report.loads) == 2 * int(valid.sum())
    assert torch.equal(padded.bias(0), clean.bias(0))


def test_a_mask_of_the_wrong_length_is_refused():
    balancer = make_balancer(6, 2)
    balancer.begin_step()
    with pytest.raises(ShapeError, match="40 tokens"):
        balancer.begin_micro_batch(0, valid=torch.ones(39, dtype=torch.bool)).routing(
            0, routed(balancer, torch.rand(40, 6))
        )


def test_a_layer_may_have_its_own_mask():
    model = small_model(torch.float32)
    layer = small_config().num_layers
    balancer = balancer_for(model, BalanceConfig(bins=50))
    tokens = tokens_of(1, 10)
    targets = torch.cat([tokens[0, 2:], torch.tensor([IGNORE, IGNORE])])
    balancer.begin_step()
    observer = balancer.begin_micro_batch(0, valid_by_layer={layer: targets != IGNORE})
    context = Context(observer=observer)
    model.mtp_hidden(model.features(tokens, context).mixture, tokens.roll(-1, 1), context)
    totals = {n: int(histogram[0].sum()) for n, histogram in balancer.histograms.items()}
    assert totals == {1: 10, 2: 10, layer: 8}


def test_a_step_without_tokens_keeps_the_bias():
    bias = torch.tensor([0.1, -0.1, 0.0])
    for kind in BALANCERS:
        balancer = make_balancer(3, 1, kind=kind, bias=bias)
        balancer.begin_step()
        nothing = torch.zeros(4, dtype=torch.bool)
        balancer.begin_micro_batch(0, valid=nothing).routing(0, routed(balancer, torch.rand(4, 3)))
        assert balancer.finish(accepted=True) == {}
        assert torch.equal(balancer.bias(0), bias), kind


def test_raw_logits_are_refused():
    balancer = make_balancer(3, 1)
    balancer.begin_step()
    logits = torch.randn(5, 3) * 3
    fake = Routing(torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.long), logits, torch.zeros(5))
    with pytest.raises(ShapeError, match="sigmoid outputs"):
        balancer.begin_micro_batch(0).routing(0, fake)


def test_the_new_bias_acts_from_the_next_step():
    model = small_model(torch.float32, mtp=False)
    balancer = balancer_for(model, BalanceConfig())
    start = {layer: balancer.bias(layer).clone() for layer in balancer.routers}
    balancer.begin_step()
    for index in range(3):
        model.features(tokens_of(4, 16, seed=index), Context(observer=balancer.begin_micro_batch(index)))
        assert all(torch.equal(balancer.bias(layer), start[layer]) for layer in start)
    balancer.finish(accepted=True)
    for layer in start:
        bias = balancer.bias(layer)
        assert not torch.equal(bias, start[layer])
        assert bias is model.model.layers[layer].block_sparse_moe.gate.e_score_correction_bias
        assert bias.dtype == torch.float32
        assert float(bias.mean()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", sorted(BALANCERS))
def test_a_skipped_step_changes_nothing(kind):
    stream = Skewed(16, 300, 1.0)
    balancer = make_balancer(16, 2, kind=kind, bins=4000, ema=0.5)
    step(balancer, stream.batch())
    bias, state = balancer.bias(0).clone(), repr(balancer.state_dict())
    report = step(balancer, stream.batch(), accepted=False)
    assert sum(report.loads) == 600
    assert torch.equal(balancer.bias(0), bias)
    assert repr(balancer.state_dict()) == state


def test_moving_average():
    batches = [torch.rand(200, 6) ** power for power in (1, 2, 3)]
    balancer, average = make_balancer(6, 2, ema=0.5, bins=4000), None
    for batch in batches:
        twin = make_balancer(6, 2, bias=balancer.bias(0), bins=4000, kind="qb")
        quantiles = []
        twin._write = lambda layer, quantile_N, seen=quantiles: seen.append(quantile_N)
        step(twin, batch)
        average = quantiles[0] if average is None else 0.5 * average + 0.5 * quantiles[0]
        step(balancer, batch)
        expected = (average - average.mean()).float()
        torch.testing.assert_close(balancer.bias(0), expected, rtol=0, atol=0)


@COARSE
def test_resume_is_bit_identical():
    def run(balancer, steps):
        for n in steps:
            step(balancer, Skewed(16, 300, 1.0, seed=n).batch())

    straight, stopped = (make_balancer(16, 2, ema=0.7, bins=4000) for _ in range(2))
    run(straight, range(6))
    run(stopped, range(3))
    file = io.BytesIO()
    torch.save((stopped.bias(0), stopped.state_dict()), file)
    file.seek(0)
    bias, state = torch.load(file)
    resumed = make_balancer(16, 2, ema=0.7, bins=4000, bias=bias)
    resumed.load_state_dict(state)
    run(resumed, range(3, 6))
    assert torch.equal(resumed.bias(0), straight.bias(0))


def test_state_is_refused_in_the_middle_of_a_step_and_from_another_rule():
    balancer = make_balancer(6, 2)
    balancer.begin_step()
    with pytest.raises(CheckpointError, match="between steps"):
        balancer.state_dict()
    balancer.finish(accepted=False)
    with pytest.raises(CheckpointError, match=r"balance\.kind"):
        make_balancer(6, 2, kind="sign").load_state_dict(balancer.state_dict())
    with pytest.raises(CheckpointError, match="fits no router"):
        balancer.load_state_dict({"kind": "qb", "averages": {"0": torch.zeros(7)}})


def test_report():
    scores = torch.full((8, 4), 0.1)
    for row, expert in enumerate([0, 0, 0, 0, 0, 1, 1, 2]):
        scores[row, expert] = 0.9
    balancer = make_balancer(4, 1, kind="none")
    report = step(balancer, scores[:3], scores[3:])
    assert report.loads == (5, 2, 1, 0)
    assert report.max_violation == pytest.approx(5 / 2 - 1)
    assert report.load_cv == pytest.approx((3.5**0.5) / 2)  # deviations 3, 0, −1, −2: variance 14 / 4
    assert report.dead == 1
    assert report.bias_range == 0.0
    assert report.occupancy is None


def test_bins_that_stay_full_are_told_once():
    scores = torch.full((100, 4), 0.5) + 1e-4 * torch.rand(100, 4)
    balancer = make_balancer(4, 1, bins=10)
    for _ in range(CROWDED_STEPS - 1):  # a warning before its time would be an error here
        report = step(balancer, scores)
    assert report.occupancy > 1.0
    with pytest.warns(TercetWarning, match=r"balance\.bins is 10, try 40"):
        step(balancer, scores)
    step(balancer, scores)  # and so would a second one


def test_sign_rules():
    scores = torch.full((8, 4), 0.1)
    for row, expert in enumerate([0, 0, 0, 0, 0, 1, 1, 2]):
        scores[row, expert] = 0.9
    plain, centred = (make_balancer(4, 1, kind=kind, sign_rate=0.01) for kind in ("sign", "sign_centred"))
    step(plain, scores)
    step(centred, scores)
    torch.testing.assert_close(plain.bias(0), torch.tensor([-0.01, 0.0, 0.01, 0.01]))
    torch.testing.assert_close(centred.bias(0), torch.tensor([-0.0125, -0.0025, 0.0075, 0.0075]))


def test_bip_never_raises_a_bias():
    stream = Skewed(16, 500, 1.5)
    balancer = make_balancer(16, 2, kind="bip", bins=4000)
    for _ in range(5):
        step(balancer, stream.batch())
    assert float(balancer.bias(0).max()) <= 0.0
    assert float(balancer.bias(0).min()) < -0.1


def test_auxiliary_loss_is_the_formula_and_reaches_the_router():
    balancer = make_balancer(6, 2, kind="aux", aux_weight=0.5)
    logits = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    balancer.begin_step()
    scores = logits.sigmoid()
    routing = routed(balancer, scores)._replace(scores=scores)
    balancer.begin_micro_batch(0).routing(0, routing)
    loss = balancer.auxiliary_loss()
    probability = (scores / scores.sum(1, keepdim=True)).mean(0)
    share = torch.bincount(routing.experts.flatten(), minlength=6) / 60
    torch.testing.assert_close(loss, 0.5 * 6 * (share * probability).sum())
    loss.backward()
    # Descending lowers the scores of experts with more than their share.
    pressure = logits.grad.mean(0)
    assert int(pressure.argmax()) == int(share.argmax())
    assert balancer.auxiliary_loss() is None
    before = balancer.bias(0).clone()
    balancer.finish(accepted=True)
    assert torch.equal(balancer.bias(0), before)


def test_auxiliary_loss_of_uniform_routing_is_its_weight():
    balancer = make_balancer(4, 1, kind="aux", aux_weight=0.25)
    balancer.begin_step()
    routing = Routing(torch.ones(4, 1), torch.arange(4)[:, None], torch.full((4, 4), 0.5), torch.full((4,), 0.5))
    balancer.begin_micro_batch(0).routing(0, routing)
    assert float(balancer.auxiliary_loss()) == pytest.approx(0.25)


def test_auxiliary_loss_survives_recomputation():
    gradients = []
    for recompute in (False, True):
        model = small_model(torch.float64, mtp=False)
        balancer = balancer_for(model, BalanceConfig(kind="aux"))
        balancer.begin_step()
        for index in range(2):
            context = Context(observer=balancer.begin_micro_batch(index), recompute=recompute)
            features = model.features(tokens_of(2, 7, seed=index), context)
            (features.hidden.square().mean() + balancer.auxiliary_loss()).backward()
        balancer.finish(accepted=True)
        gradients.append(model.model.layers[1].block_sparse_moe.gate.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


def test_only_the_auxiliary_rule_has_a_loss():
    for kind in BALANCERS:
        balancer = make_balancer(6, 2, kind=kind)
        balancer.begin_step()
        balancer.begin_micro_batch(0).routing(0, routed(balancer, torch.rand(9, 6)))
        assert (balancer.auxiliary_loss() is not None) == (kind == "aux")
