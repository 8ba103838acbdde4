"""Tiles of packed sequences: nothing lost, nothing shared (util of every packed operator)."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.errors import ShapeError
from tercet.ops.packing import from_tiles, positions, sequence_lengths, tiling, to_tiles

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(tuple)


@given(LENGTHS, st.sampled_from([1, 2, 16, 32]))
def test_tiles_hold_every_token_once(lengths, size):
    total = sum(lengths)
    plan = tiling(lengths, size, torch.device("cpu"))
    x = torch.arange(1, total + 1, dtype=torch.float64)[:, None]
    tiles = to_tiles(x, plan)
    assert tiles.shape == (plan.tiles, size, 1)
    assert torch.equal(from_tiles(tiles, plan), x)
    assert sorted(tiles[tiles > 0].tolist()) == x.flatten().tolist()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for tile in tiles[..., 0].long():
        tokens = tile[tile > 0] - 1
        assert len(set(owner[tokens].tolist())) == 1
        assert tokens.tolist() == list(range(tokens[0], tokens[0] + len(tokens)))


@given(LENGTHS)
def test_tiles_of_a_step_belong_to_the_first_sequences(lengths):
    plan = tiling(lengths, 16, torch.device("cpu"))
    assert list(plan.counts) == sorted(plan.counts, reverse=True)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    need = [-(-n // 16) for n in lengths]
    assert plan.tiles == sum(need)
    ranked = [need[n] for n in plan.order.tolist()]
    assert ranked == sorted(need, reverse=True)


@given(LENGTHS)
def test_positions(lengths):
    assert positions(lengths).tolist() == list(itertools.chain(*(range(n) for n in lengths)))


def test_lengths():
    assert sequence_lengths(3, 5, None) == (5, 5, 5)
    assert sequence_lengths(1, 5, torch.tensor([0, 2, 2, 5], dtype=torch.int32)) == (2, 0, 3)


@pytest.mark.parametrize(
    ("batch", "bounds", "message"),
    [
        (2, [0, 5], "flatten"),
        (1, [0, 4], "rise from 0 to the 5 tokens"),
        (1, [1, 5], "rise from 0"),
        (1, [0, 3, 2, 5], "rise from 0"),
        (1, [[0, 5]], "1-D integer"),
        (1, [5], "at least 2 bounds"),
        (1, [0.0, 5.0], "1-D integer"),
    ],
)
def test_wrong_bounds(batch, bounds, message):
    with pytest.raises(ShapeError, match=message):
        sequence_lengths(batch, 5, torch.tensor(bounds))
