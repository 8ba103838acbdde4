"""Sums of gradients: the kernel is PyTorch's addition; scaled, up to one rounding."""

import pytest
import torch

pytest.importorskip("triton")

from tercet.errors import ShapeError, UnsupportedError
from tercet.ops import accumulate, use_tier

SHAPES = [(3, 2500), (1,), (0,), (4096,), (2, 3, 5)]


def strided(x):
    return torch.stack([x, x], dim=-1)[..., 0]


@pytest.mark.parametrize("change", [lambda x: x, strided, lambda x: torch.cat([x[:1], x])[1:]])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.bfloat16, torch.float32, torch.float16)])
def test_is_addition(dtypes, change):
    """Empty and odd sizes, more than a block, layouts and offsets that the kernel leaves to PyTorch, mixed types."""
    totals = [torch.randn(s) for s in SHAPES]
    parts = [change(torch.randn(s)).to(dtypes[n % len(dtypes)]) for n, s in enumerate(SHAPES)]
    expected = [total + part for total, part in zip(totals, parts)]
    with use_tier("triton"):
        accumulate(totals, parts)
        assert all(torch.equal(a, b) for a, b in zip(totals, expected))
        accumulate(totals, parts, scale=-0.3)
        accumulate([], [])
    for total, part, before in zip(totals, parts, expected):
        torch.testing.assert_close(total, before - 0.3 * part.float(), atol=1e-6, rtol=3e-7)


def test_wrong_shapes_and_sums_in_another_type():
    with pytest.raises(ShapeError, match=r"\(3,\) cannot take a part \(2,\)"):
        accumulate([torch.zeros(3)], [torch.zeros(2)])
    with pytest.raises(ShapeError, match="1 sums cannot take 2 parts"):
        accumulate([torch.zeros(3)], [torch.zeros(3)] * 2)
    with use_tier("triton"), pytest.raises(UnsupportedError, match="float64"):
        accumulate([torch.zeros(3, dtype=torch.float64)], [torch.zeros(3)])
