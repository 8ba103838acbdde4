"""Claims C1 and C2 on simulated scores: how fast balance comes, and what the histogram costs (training.md §2.8)."""

import pytest
import torch

from tercet.ops import count_needed
from tercet.train.balance.quantile import Grid, exact_quantile, needed_bias, solve_histogram
from tests.train.balance_models import Skewed, make_balancer, noise_floor, routed, step

# From a collapsed router the first histograms are coarse; the guard's warning has a test of its own.
pytestmark = pytest.mark.filterwarnings("ignore::tercet.errors.TercetWarning")


def violations(kind: str, stream: Skewed, top_k: int, steps: int, **settings) -> list[float]:
    balancer = make_balancer(len(stream.offsets), top_k, kind=kind, **settings)
    return [step(balancer, stream.batch()).max_violation for _ in range(steps)]


def test_896_experts_reach_the_sampling_floor_within_five_steps():
    tokens, floor = 8192, noise_floor(896, 16, 8192)
    maxvio = violations("qb", Skewed(896, tokens, 1.0), 16, 5)
    assert maxvio[0] > 20
    # A bias estimated on one batch and used on another settles near √2 × floor.
    assert all(value < 2 * floor for value in maxvio[2:]), maxvio


def test_the_sign_rule_is_far_away_after_sixty_steps():
    tokens, floor = 2048, noise_floor(256, 8, 2048)
    assert violations("qb", Skewed(256, tokens, 1.0), 8, 4)[-1] < 2 * floor
    assert violations("sign", Skewed(256, tokens, 1.0), 8, 61, sign_rate=1e-3)[-1] > 5 * floor


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "top_k", "steady"), [(256, 8, 0.18), (896, 16, 0.26)])
def test_the_table_of_training_md(experts, top_k, steady):
    maxvio = violations("qb", Skewed(experts, 16384, 1.0), top_k, 12)
    assert maxvio[0] > 15  # the offset of the hottest expert decides
    assert sum(maxvio[6:]) / 6 == pytest.approx(steady, rel=0.35)


def test_histogram_and_exact_quantile_agree_up_to_a_bin():
    stream = Skewed(64, 4096, 1.0)
    balancer = make_balancer(64, 4)
    for _ in range(3):
        scores = stream.batch()
        cutoff = routed(balancer, scores).cutoff
        needed = needed_bias(scores, cutoff)
        exact = exact_quantile(needed, 4).double()
        for bins in (50, 200, 1000, 4000):
            grid = Grid.around(balancer.bias(0), bins)
            histogram = torch.zeros(64, bins, dtype=torch.int32)
            count_needed(histogram, scores, cutoff, **grid._asdict())
            error = (solve_histogram(histogram, grid, 4).quantile - exact).abs()
            # 4096 · 4 / 64 is whole, so anything up to the next order statistic is exact as well.
            below = needed.sort(dim=0).values[4096 * 4 // 64 - 1].double()
            assert bool((error <= float(grid.width) * 1.001 + (exact - below)).all())
        step(balancer, scores)


def test_where_a_thousand_bins_stop_being_enough():
    """With extreme scores a bin holds more than a target load; more bins help, and the guard says so."""
    stream = Skewed(64, 4096, 3.0)
    occupancies = {}
    for bins in (200, 4000):
        balancer = make_balancer(64, 4, bins=bins)
        occupancies[bins] = [step(balancer, stream.batch()).occupancy for _ in range(4)][-1]
    assert occupancies[200] > 1.0
    assert occupancies[4000] < 0.5 * occupancies[200]


def test_clipping_the_duals_is_slower_and_leaves_cold_experts():
    """Claim C7."""
    floor = noise_floor(64, 4, 4096)
    reports = {}
    for kind in ("qb", "bip"):
        stream, balancer = Skewed(64, 4096, 1.5), make_balancer(64, 4, kind=kind, bins=4000)
        reports[kind] = [step(balancer, stream.batch()) for _ in range(12)]
    reached = next(n for n, report in enumerate(reports["qb"]) if report.max_violation < 2 * floor)
    assert reached <= 3
    assert all(report.max_violation > 2 * floor for report in reports["bip"][: 3 * reached])
    assert reports["qb"][-1].dead == 0
    assert reports["bip"][-1].dead > 5
