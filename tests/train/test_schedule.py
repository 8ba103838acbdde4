"""Worked values of the learning-rate schedules (training.md §3)."""

import math

import pytest

from tercet.config import OptimConfig, ScheduleConfig
from tercet.errors import ConfigError
from tercet.train.schedule import learning_rate

OPTIM = OptimConfig(lr=2e-4)


def rates(steps: int, **settings) -> list[float]:
    return [learning_rate(step, steps, OPTIM, ScheduleConfig(**settings)) for step in range(steps)]


def test_cosine_worked_values():
    eta = rates(1000)
    assert eta[0] == pytest.approx(2e-5)  # t = 1 of 10 warm-up steps
    assert eta[4] == pytest.approx(1e-4)
    assert eta[9] == pytest.approx(2e-4)
    assert eta[504] == pytest.approx(1.1e-4)  # halfway between 10 and 1000: the mean of both ends
    assert eta[999] == pytest.approx(2e-5)
    assert eta[257] == pytest.approx(2e-5 + 9e-5 * (1 + math.cos(math.pi * 248 / 990)))
    assert eta == sorted(eta[:10]) + sorted(eta[10:], reverse=True)


def test_wsd_shapes():
    for shape, halfway in (("cosine", 1.1e-4), ("linear", 1.1e-4), ("1-sqrt", 2e-5 + 1.8e-4 * (1 - math.sqrt(0.5)))):
        eta = rates(1000, kind="wsd", decay_fraction=0.4, decay_shape=shape)
        assert eta[4] == pytest.approx(1e-4)
        assert eta[9:600] == [2e-4] * 591
        assert eta[600] < 2e-4
        assert eta[799] == pytest.approx(halfway)
        assert eta[999] == pytest.approx(2e-5)


def test_wsd_without_and_with_only_decay():
    assert rates(100, kind="wsd", decay_fraction=0.0)[1:] == [2e-4] * 99
    eta = rates(100, kind="wsd", decay_fraction=1.0, decay_shape="linear", warmup_fraction=0.1)
    assert eta[9] == pytest.approx(2e-4)
    assert eta[54] == pytest.approx(1.1e-4)


def test_constant():
    assert rates(200, kind="constant") == [1e-4] + [2e-4] * 199


def test_short_runs_have_no_division_by_zero():
    assert rates(1) == [2e-4]
    assert rates(2) == [2e-4, pytest.approx(2e-5)]
    assert rates(3, warmup_fraction=1.0) == pytest.approx([2e-4 / 3, 4e-4 / 3, 2e-4])
    assert rates(1, warmup_fraction=0.0, kind="wsd") == [2e-4]


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ConfigError, match="0 to 9"):
        learning_rate(step, 10, OPTIM, ScheduleConfig())
