"""Who takes part, what they exchange, and how they fail together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.errors import ConfigError, PeerError
from tercet.model import CausalLM
from tercet.parallel import Ranks, assign_owners, join
from tercet.presets import preset
from tercet.train.groups import assign
from tercet.train.optimizer import _work
from tests.parallel import jobs
from tests.parallel.gang import Gang

COMPLETE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 10**15).map(float), max_size=30),
    st.integers(1, 6),
)
def test_owners_cover_everything_and_nobody_has_much_more(costs: dict[str, float], world: int) -> None:
    owners = assign_owners(costs, world)
    assert owners.keys() == costs.keys()
    assert set(owners.values()) <= set(range(world))
    loads = [sum(costs[name] for name in owners if owners[name] == rank) for rank in range(world)]
    mean, largest = sum(costs.values()) / world, max(costs.values(), default=0.0)
    assert max(loads) <= (mean + largest * (1 - 1 / world)) * (1 + 1e-9)
    assert assign_owners(dict(reversed(costs.items())), world) == owners


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_update_of_the_base_preset_is_spread_evenly(world: int) -> None:
    """parallel.md §6: the most loaded rank within a tenth of the mean."""
    config = preset("base").model
    with torch.device("meta"):
        model = CausalLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    costs = {name: _work(shape, assign(name, shape, config)) for name, shape in shapes.items()}
    owners = assign_owners(costs, world)
    loads = [sum(costs[name] for name in owners if owners[name] == rank) for rank in range(world)]
    assert max(loads) < 1.1 * sum(loads) / world


def test_alone_without_an_environment_or_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)
    assert type(join("cpu")) is Ranks
    for name, value in (COMPLETE | {"WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert type(join("cpu")) is Ranks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": "", "LOCAL_RANK": ""}, "LOCAL_RANK, MASTER_ADDR are not"),
        ({"RANK": ""}, "RANK are not"),
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is -2"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_a_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str) -> None:
    for name, value in (COMPLETE | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join("cpu")


def test_peers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (COMPLETE | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerError, match="rank 0 of 2 could not meet the others"):
        join("cpu", timeout_seconds=1.0)


def test_every_exchange(gang: Gang) -> None:
    found = gang.results(2, jobs.exchange)
    for rank, each in enumerate(found):
        assert each["sum"].tolist() == [3.0, 2.0]
        assert each["integers"].tolist() == [2**41 + 1]
        assert each["max"].tolist() == [2.0, -1.0]
        assert each["any"] == [True, False, True]
        assert each["first"] == "rank 0"
        assert each["all"] == rank
        assert [float(t.sum()) for t in each["spread"]] == [9.0, 120.0, 300.0, 60_000.0, 0.0, 1_500_000.0]
        assert each["spread"][5].dtype == torch.float64
    owned = [[float(tensor.sum()) for tensor in each["owned"]] for each in found]
    assert owned == [[9.0, 300.0, 1_500_000.0], [120.0, 60_000.0, 0.0]]


def test_what_fails_on_one_rank_fails_on_all(gang: Gang) -> None:
    for error in gang.run(2, jobs.disagree, "value"):
        assert isinstance(error, ConfigError)
        assert "rank 1 has another hat than rank 0" in str(error)
    for how in ("first", "all"):
        for error in gang.run(2, jobs.disagree, how):
            assert isinstance(error, ValueError)
            assert "'one'" in str(error)


def test_a_rank_that_leaves_is_named(gang: Gang) -> None:
    lost, none = gang.run(2, jobs.leave)
    assert none is None
    assert isinstance(lost, PeerError)
    assert "rank 1 has died or hangs" in str(lost)
    assert "adding up over ranks" in str(lost)


def test_a_rank_that_hangs_is_named_when_patience_ends(gang: Gang) -> None:
    waited, late = gang.run(2, jobs.hang, patience=4.0)
    assert isinstance(waited, PeerError)
    assert "rank 1 has died or hangs" in str(waited)
    assert isinstance(late, PeerError)  # it finds nobody any more
