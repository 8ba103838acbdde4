"""The MXFP4 codec against the format's definition, the specification's worked examples and compressed arithmetic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.checkpoint.layouts import RULES
from tercet.checkpoint.mxfp4 import CODES, PackedWeight, decode, encode
from tercet.errors import CheckpointError, ConfigError, NumericsError, ShapeError

WORKED = """0.11 -0.02 0.30 -0.45 0.07 0 -0.16 0.75 0.05 -0.09 0.21 0.04 -0.33 0.12 -0.01 0.26 0.02 0.03 -0.04 0.055
-0.065 0.08 -0.1 0.14 -0.18 0.24 -0.28 0.35 -0.4 0.5 -0.6 0.65"""


def row(text: str) -> torch.Tensor:
    values = [float(word) for word in text.split()]
    return torch.tensor([values + [0.0] * (32 - len(values))])


def encode_by_definition(x: np.ndarray, rule: str) -> tuple[list[int], int]:
    """Quantise one block of fp64 values by trying every code: nearest, ties to the even code."""
    amax = np.abs(x).max()
    if amax == 0:
        return [8 if math.copysign(1, v) < 0 else 0 for v in x], 0
    e = math.floor(math.log2(amax))
    if rule == "floor":
        exponent = e - 2
    elif rule == "even":
        exponent = e - 2 + (amax / 2**e >= 1.75)
    else:
        exponent = math.ceil(math.log2(amax / 6))
    codes = []
    for value in x:
        distances = [abs(abs(value) / 2.0**exponent - code) for code in CODES]
        best = min(range(8), key=lambda n: (distances[n], n % 2))
        codes.append(best + 8 * (math.copysign(1, value) < 0))
    return codes, exponent + 127


def test_worked_decode() -> None:
    packed = torch.tensor([[0x2B, 0x70, 0x9E, 0x5F] + [0] * 12], dtype=torch.uint8)
    values = decode(packed, torch.tensor([[123]], dtype=torch.uint8))
    assert values[0, :8].tolist() == [-0.09375, 0.0625, 0, 0.375, -0.25, -0.03125, -0.375, 0.1875]
    assert values[0, 8:].abs().sum() == 0


def test_worked_encode() -> None:
    x = row(WORKED)
    result = encode(x)
    assert bytes(result.packed[0].tolist()) == bytes.fromhex("82E4017B91132D480019192A4B5C6D7E")
    assert result.scale.tolist() == [[124]]
    y = result.decode()
    assert y[0, :8].tolist() == [0.125, -0.0, 0.25, -0.5, 0.0625, 0, -0.1875, 0.75]
    assert torch.signbit(y[0, 1])
    assert ((y - x).norm() / x.norm()).item() == pytest.approx(0.116, abs=5e-4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("0 .25 -.25 .26 .75 -.75 1.25 1.26 1.75 2.5 2.51 3.5 5.0 5.01 6 -6", [(127, "0018a232446576f7")] * 3),
        ("3.6 -1.3 0.2", [(126, "d701"), (127, "b600"), (127, "b600")]),
        ("6.5 3.3 -0.8", [(127, "570a"), (128, "3509"), (127, "570a")]),
        ("7.2 3.3 -0.8", [(127, "570a"), (128, "3609"), (128, "3609")]),
        ("0", [(0, "")] * 3),
    ],
)
def test_golden_vectors(values: str, expected: list[tuple[int, str]]) -> None:
    for rule, (scale, codes) in zip(("floor", "rceil", "even"), expected):
        result = encode(row(values), rule)  # type: ignore[arg-type]
        assert result.scale.item() == scale
        assert bytes(result.packed[0].tolist()) == bytes.fromhex(codes).ljust(16, b"\0")


def test_every_byte_at_every_scale_decodes_exactly() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    got = decode(packed, scale, torch.float64)
    signed = [*CODES, *(-code for code in CODES)]
    expected = [
        [signed[nibble] * 2.0 ** (b - 127) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
        for b in range(255)
    ]
    assert torch.equal(got, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(torch.signbit(got), torch.signbit(torch.tensor(expected, dtype=torch.float64)))
    fits = slice(0, 252)  # beyond, 6 · 2^126 is larger than fp32
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decode(packed[fits], scale[fits], dtype).double(), got[fits])


def test_encode_after_decode_keeps_values_and_bytes() -> None:
    packed = torch.randint(0, 256, (200, 64), dtype=torch.uint8)
    scale = torch.randint(1, 250, (200, 4), dtype=torch.uint8)
    values = decode(packed, scale)
    for rule in RULES:
        again = encode(values, rule)
        assert torch.equal(again.decode(), values)
        assert torch.equal(torch.signbit(again.decode()), torch.signbit(values))
        assert torch.equal(encode(again.decode(), rule).decode(), values)
    for rule in ("floor", "even"):
        once = encode(torch.randn(200, 128), rule)
        twice = encode(once.decode(), rule)
        assert torch.equal(once.packed, twice.packed)
        assert torch.equal(once.scale, twice.scale)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_encode_is_nearest_with_ties_to_even(data: st.DataObject) -> None:
    halves = st.integers(-64, 64).map(lambda n: n / 8)
    element = st.one_of(halves, st.floats(-1e3, 1e3, width=32), st.floats(-(2**-10), 2**-10, width=32))
    values = data.draw(st.lists(element, min_size=32, max_size=32))
    shift = data.draw(st.integers(-60, 60))
    x = torch.tensor([values], dtype=torch.float64) * 2.0**shift
    for rule in RULES:
        result = encode(x, rule)
        codes, byte = encode_by_definition(x[0].numpy(), rule)
        assert result.scale.item() == byte
        unpacked = [nibble for b in result.packed[0].tolist() for nibble in (b & 15, b >> 4)]
        assert unpacked == codes


def test_keep_preserves_bytes_of_unchanged_blocks_only() -> None:
    packed = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    scale = torch.randint(100, 140, (8, 2), dtype=torch.uint8)
    packed[0], scale[0] = 0x88, 77  # a block of −0 under a scale no rule would choose
    packed[1, :16] = 0x11  # largest code 0.5: every rule would pick another scale
    original = PackedWeight(packed, scale)
    values = original.decode()
    kept = encode(values, keep=original)
    assert torch.equal(kept.packed, packed)
    assert torch.equal(kept.scale, scale)
    values[1, 40] += 1.0
    changed = encode(values, keep=original)
    fresh = encode(values)
    assert torch.equal(changed.packed[1, :16], packed[1, :16])
    assert torch.equal(changed.packed[1, 16:], fresh.packed[1, 16:])
    values = original.decode()
    values[0, 0] = 0.0
    assert encode(values, keep=original).packed[0, 0] == 0x80


def test_errors_have_stated_bounds() -> None:
    """Worst case: error over the block's largest magnitude; mean: squared error of Gaussian blocks, σ = 0.02."""
    generator = torch.Generator().manual_seed(1)
    x = 0.02 * torch.randn(20_000, 32, generator=generator)  # the figures depend on where σ lies between powers of 2
    sweep = torch.zeros(2**14, 32)
    sweep[:, 0] = torch.linspace(1, 2, 2**14)
    sweep[:, 1:] = torch.rand(2**14, 31, generator=generator) * sweep[:, :1]
    bounds = {"even": (1 / 5, 0.01256), "floor": (1 / 4, 0.01301), "rceil": (1 / 5, 0.01405)}
    for rule in RULES:
        worst, mean = bounds[rule]
        error = (encode(sweep, rule).decode() - sweep).abs().amax(-1) / sweep.abs().amax(-1)
        assert 0.9 * worst < error.max() <= worst + 1e-6
        y = encode(x, rule).decode()
        assert ((y - x).square().sum() / x.square().sum()).item() == pytest.approx(mean, rel=0.01)


def test_extremes_and_dtypes() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert encode(torch.ones(2, 32, dtype=dtype)).scale.tolist() == [[125], [125]]
    tiny = torch.full((1, 32), 2.0**-128)
    assert torch.equal(encode(tiny).decode(), tiny)
    assert encode(torch.full((1, 32), 1e-45)).decode().abs().max() == 0
    big = torch.full((1, 32), 1.5 * 2.0**127)
    assert torch.equal(encode(big).decode(torch.float64), big.double())
    assert encode(torch.zeros(0, 32)).packed.shape == (0, 16)


def test_refusals() -> None:
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="uint8"):
        decode(codes.int(), torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="exactly"):
        decode(codes, torch.zeros(2, 2, dtype=torch.uint8), torch.float16)
    with pytest.raises(CheckpointError, match="255"):
        decode(codes, torch.full((2, 2), 255, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="float64"):
        decode(codes + 0x77, torch.full((2, 2), 254, dtype=torch.uint8))
    with pytest.raises(NumericsError):
        encode(torch.full((1, 32), math.inf))
    with pytest.raises(ShapeError):
        encode(torch.zeros(1, 33))
    with pytest.raises(ConfigError, match="even"):
        encode(torch.zeros(1, 32), "nearest")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="earlier"):
        encode(torch.zeros(1, 32), keep=PackedWeight(codes, codes))


def test_M13_scales_of_another_group_size_are_refused() -> None:
    """Scales per 16 (twice as many) must not be read as scales per 32: at K = 3584 the stride would be doubled."""
    packed = torch.zeros(4, 3584 // 2, dtype=torch.uint8)
    assert decode(packed, torch.full((4, 112), 127, dtype=torch.uint8)).shape == (4, 3584)
    with pytest.raises(ShapeError, match="112"):
        decode(packed, torch.full((4, 224), 127, dtype=torch.uint8))


def test_M14_exponent_bias_is_127() -> None:
    """Byte 127 is scale 1; a bias of 125 would give four times every value."""
    one = torch.full((1, 16), 0x22, dtype=torch.uint8)
    assert decode(one, torch.tensor([[127]], dtype=torch.uint8)).unique().tolist() == [1.0]


def test_M12_values_are_e2m1_times_e8m0_not_affine() -> None:
    """The code points are not evenly spaced, so no affine 4-bit format can hold them."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76] + [0] * 12], dtype=torch.uint8)
    values = decode(packed, torch.tensor([[127]], dtype=torch.uint8))[0, :8]
    assert values.tolist() == list(CODES)
    assert values.diff().unique().numel() == 3
