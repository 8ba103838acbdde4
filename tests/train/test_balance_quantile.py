"""The maths of Quantile Balancing: worked example, oracle, histogram (model.md §8; training.md §2.2, §2.3)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.ops import count_needed
from tercet.train.balance.quantile import Grid, exact_quantile, needed_bias, solve_histogram
from tests.train.balance_models import make_balancer, routed, step

SCORES = torch.tensor(
    [
        [0.63, 0.43, 0.32],
        [0.16, 0.84, 0.13],
        [0.73, 0.32, 0.68],
        [0.75, 0.50, 0.37],
        [0.80, 0.33, 0.70],
        [0.72, 0.78, 0.66],
    ]
)


def loads(scores: torch.Tensor, bias: torch.Tensor) -> list[int]:
    return torch.bincount((scores + bias).argmax(1), minlength=scores.shape[1]).tolist()


def test_worked_example():
    balancer = make_balancer(3, 1)
    routing = routed(balancer, SCORES)
    assert loads(SCORES, torch.zeros(3)) == [4, 2, 0]
    torch.testing.assert_close(routing.cutoff, torch.tensor([0.43, 0.16, 0.68, 0.50, 0.70, 0.72]))
    needed = needed_bias(SCORES, routing.cutoff)
    columns = [[-0.20, 0, -0.05, -0.25, -0.10, 0], [0, -0.68, 0.36, 0, 0.37, -0.06], [0.11, 0.03, 0, 0.13, 0, 0.06]]
    torch.testing.assert_close(needed, torch.tensor(columns).T, atol=1e-6, rtol=0)
    quantile = exact_quantile(needed, 1)
    torch.testing.assert_close(quantile, torch.tensor([-0.10, 0.0, 0.03]), atol=1e-6, rtol=0)
    bias = quantile - quantile.mean()
    torch.testing.assert_close(bias, torch.tensor([-0.0767, 0.0233, 0.0533]), atol=5e-5, rtol=0)
    assert loads(SCORES, bias) == [2, 2, 2]
    assert loads(SCORES, -bias) == [5, 1, 0]


def test_worked_example_through_the_histogram():
    balancer = make_balancer(3, 1)
    report = step(balancer, SCORES)
    assert report.loads == (4, 2, 0)
    assert loads(SCORES, balancer.bias(0)) == [2, 2, 2]
    assert float(balancer.bias(0).mean()) == pytest.approx(0.0, abs=1e-7)


def oracle(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> list[tuple[float, float]]:
    """For each expert the interval of exact minimisers, written from the definition without tensors."""
    s, b = scores.double().tolist(), bias.double().tolist()
    tokens, experts = len(s), len(b)
    needed = [[] for _ in b]
    for row in s:
        cutoff = sorted((x + y for x, y in zip(row, b)), reverse=True)[top_k]
        for j, score in enumerate(row):
            needed[j].append(cutoff - score)
    q = tokens * top_k / experts
    return [(sorted(r)[math.ceil(q) - 1], sorted(r)[math.floor(q)]) for r in needed]


def rebuilt_quantile(balancer, scores, bins: int) -> tuple[torch.Tensor, Grid]:
    """The histogram's quantile before centring."""
    bias = balancer.bias(0)
    grid = Grid.around(bias, bins)
    histogram = torch.zeros(len(bias), bins, dtype=torch.int32)
    count_needed(histogram, scores, routed(balancer, scores).cutoff, **grid._asdict())
    return solve_histogram(histogram, grid, balancer.top_k).quantile, grid


@given(
    st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 80),
    st.integers(2, 600),
    st.floats(0.0, 2.0),
    st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_histogram_is_within_one_bin_of_the_oracle(shape, tokens, bins, spread, seed):
    experts, top_k = shape
    generator = torch.Generator().manual_seed(seed)
    bias = 0.3 * spread * torch.randn(experts, generator=generator)
    scores = (spread * torch.randn(tokens, experts, generator=generator)).sigmoid()
    balancer = make_balancer(experts, top_k, bias=bias)
    quantile, grid = rebuilt_quantile(balancer, scores, bins)
    width = float(grid.width) * (1 + 1e-4) + 1e-6
    for estimate, (low, high) in zip(quantile.tolist(), oracle(scores, bias, top_k)):
        assert low - width <= estimate <= high + width


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_exact_quantile_is_the_oracle(seed):
    generator = torch.Generator().manual_seed(seed)
    scores, bias = torch.rand(37, 9, generator=generator), 0.2 * torch.randn(9, generator=generator)
    balancer = make_balancer(9, 4, bias=bias)
    exact = exact_quantile(needed_bias(scores, routed(balancer, scores).cutoff), 4)
    expected = torch.tensor([high for _, high in oracle(scores, bias, 4)])
    torch.testing.assert_close(exact, expected, atol=1e-6, rtol=0)


def test_cutoff_is_biased_and_margin_is_raw():
    """With a bias in force, either mix-up moves the answer by more than a bin."""
    scores = torch.rand(500, 6)
    bias = torch.tensor([0.4, -0.3, 0.2, 0.0, -0.2, -0.1])
    balancer = make_balancer(6, 2, bias=bias)
    quantile, grid = rebuilt_quantile(balancer, scores, 1000)
    expected = torch.tensor([low for low, _ in oracle(scores, bias, 2)]).double()
    width = 1.01 * float(grid.width)
    assert float((quantile - expected).abs().max()) <= width + 1e-2 * width
    biased = scores + bias
    raw_cutoff = exact_quantile(needed_bias(scores, scores.topk(3).values[:, 2]), 2)
    biased_margin = exact_quantile(needed_bias(biased, biased.topk(3).values[:, 2]), 2)
    for wrong in (raw_cutoff, biased_margin):
        assert float((wrong - expected).abs().max()) > 5 * width


def test_every_needed_bias_lies_on_the_grid():
    bias = torch.tensor([2.0, -3.0, 0.5, 0.0])
    scores = torch.tensor([[1e-6, 1 - 1e-6, 0.5, 0.5], [1 - 1e-6, 1e-6, 0.1, 0.9]])
    needed = needed_bias(scores, routed(make_balancer(4, 2, bias=bias), scores).cutoff)
    grid = Grid.around(bias, 1000)
    assert float(grid.lowest) == -4.0
    assert float(needed.min()) >= -4.0
    assert float(needed.max()) <= 3.0


def test_two_bins_are_enough_to_work():
    balancer = make_balancer(3, 1, bins=2)
    report = step(balancer, SCORES)
    assert report.occupancy > 1.0  # as coarse as it gets
    assert bool(balancer.bias(0).isfinite().all())
    assert float(balancer.bias(0).mean()) == pytest.approx(0.0, abs=1e-6)


def test_nothing_counted_gives_no_estimate():
    grid = Grid.around(torch.zeros(3), 10)
    assert not solve_histogram(torch.zeros(3, 10, dtype=torch.int32), grid, 1).tokens.any()
    balancer = make_balancer(3, 1, bias=torch.tensor([0.5, -0.5, 0.0]))
    balancer.begin_step()
    assert balancer.finish(accepted=True) == {}
    assert balancer.bias(0).tolist() == [0.5, -0.5, 0.0]


def test_not_a_number_is_counted_somewhere_and_never_crashes():
    histogram = torch.zeros(3, 10, dtype=torch.int32)
    needed = torch.tensor([[float("nan"), float("inf"), 0.0], [-float("inf"), 0.0, 0.0]])
    count_needed(histogram, -needed, torch.zeros(2), **Grid.around(torch.zeros(3), 10)._asdict())
    assert histogram.sum(1).tolist() == [2, 2, 2]
