"""Short convolution against its sum (model.md §4.1, kernels.md §9)."""

import itertools

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import short_conv

CASES = [(1,), (2,), (3,), (4,), (5,), (40,), (0, 5, 0, 1, 2, 0), (7, 7, 7), (1, 1), (0,), (3, 0, 9)]


def formula(lengths, taps):
    """``SiLU(Σ_j w_j x_{t−J+1+j})``, one channel filter at a time, rows before the start taken from the state."""

    def run(x, weight, state):
        outputs, tails, start = [], [], 0
        for n, length in enumerate(lengths):
            rows = torch.cat([state[n], x[0, start : start + length]])
            for t in range(length):
                y = sum(weight[:, 0, j] * rows[t + j] for j in range(taps))
                outputs.append(y / (1 + (-y).exp()))
            tails.append(rows[length : length + taps - 1])
            start += length
        return (torch.stack(outputs)[None] if outputs else x), torch.stack(tails)

    return run


def bounds(lengths):
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_formula(lengths, tier, taps):
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64)
    weight = torch.randn(6, 1, taps, dtype=torch.float64)
    state = torch.randn(len(lengths), taps - 1, 6, dtype=torch.float64)

    def ours(x, weight, state):
        return short_conv(x, weight, state=state, cu_seqlens=bounds(lengths))

    assert_same(ours, formula(lengths, taps), (x, weight, state), 1e-13, tier)


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_last_tap_is_the_current_token(tier):
    x = torch.randn(1, 3, 2)
    weight = torch.zeros(2, 1, 4)
    weight[:, 0, 3] = 1
    y, tail = short_conv(x, weight)
    assert torch.allclose(y, torch.nn.functional.silu(x))
    assert torch.equal(tail[0], x[0])


@pytest.mark.parametrize("split", range(10))
def test_split_anywhere(split):
    x, weight = torch.randn(1, 9, 4, dtype=torch.float64), torch.randn(4, 1, 4, dtype=torch.float64)
    whole, tail = short_conv(x, weight)
    first, middle = short_conv(x[:, :split], weight)
    second, last = short_conv(x[:, split:], weight, state=middle)
    assert relative_error(torch.cat([first, second], 1), whole) < 1e-14
    assert torch.equal(last, tail)


def test_short_sequence_keeps_older_rows():
    state = torch.arange(6.0).view(1, 3, 2)
    _, tail = short_conv(torch.full((1, 1, 2), 9.0), torch.randn(2, 1, 4), state=state)
    assert tail[0].tolist() == [[2, 3], [4, 5], [9, 9]]


def test_batch_equals_packed():
    x, weight = torch.randn(3, 7, 4), torch.randn(4, 1, 4)
    batch, batch_tail = short_conv(x, weight)
    packed, packed_tail = short_conv(x.view(1, 21, 4), weight, cu_seqlens=bounds((7, 7, 7)))
    assert torch.equal(batch.view(1, 21, 4), packed) and torch.equal(batch_tail, packed_tail)


@pytest.mark.parametrize("lengths", [(5, 5, 5), (4, 6, 5)])
def test_nan_stays_in_its_sequence(lengths):
    x, weight = torch.randn(1, 15, 4), torch.randn(4, 1, 4)
    start, end = lengths[0], lengths[0] + lengths[1]
    x[:, start:end] = torch.nan
    y, tail = short_conv(x, weight, cu_seqlens=bounds(lengths))
    assert y[:, :start].isfinite().all() and y[:, end:].isfinite().all() and tail[[0, 2]].isfinite().all()


def test_bf16_in_bf16_out_fp32_weights():
    x, weight = torch.randn(1, 20, 4).bfloat16(), torch.randn(4, 1, 4)
    y, tail = short_conv(x, weight)
    exact, _ = short_conv(x.double(), weight.double())
    assert y.dtype is torch.bfloat16 and tail.dtype is torch.bfloat16
    assert relative_error(y, exact) < 2**-8


@pytest.mark.parametrize(
    ("x", "weight", "state", "message"),
    [
        ((5, 4), (4, 1, 4), None, "takes x"),
        ((1, 5, 4), (4, 4), None, "takes x"),
        ((1, 5, 4), (5, 1, 4), None, "takes x"),
        ((1, 5, 4), (4, 2, 4), None, "takes x"),
        ((1, 5, 4), (4, 1, 4), (1, 4, 3), "taps-1"),
        ((1, 5, 4), (4, 1, 4), (2, 3, 4), "taps-1"),
    ],
)
def test_wrong_shapes(x, weight, state, message):
    with pytest.raises(ShapeError, match=message):
        short_conv(torch.zeros(x), torch.zeros(weight), state=None if state is None else torch.zeros(state))
