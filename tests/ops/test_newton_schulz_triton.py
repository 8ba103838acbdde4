"""Newton–Schulz kernels in Triton's interpreter against the polynomial in fp64 (kernels.md §13)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import relative_error
from tercet.ops.newton_schulz import COEFFICIENTS, reference, triton_


def ours(blocks, method="quintic"):
    return triton_.call(blocks, coefficients=COEFFICIENTS[method], dtype=torch.bfloat16)


def error(blocks, method="quintic"):
    """Against the same polynomial of the same bf16 values, in fp64."""
    exact = blocks.bfloat16().double()
    expected = reference.newton_schulz(exact, coefficients=COEFFICIENTS[method], dtype=torch.float64)
    return relative_error(ours(blocks.bfloat16(), method), expected)


@pytest.mark.parametrize("shape", [(2, 24, 200), (1, 70, 16), (1, 1, 40)])
def test_random_blocks(shape):
    assert error(torch.randn(shape)) < 1e-2


def test_longer_schedule_restarts():
    assert error(torch.randn(1, 16, 64), "8+2") < 1e-2


def test_rank_deficient_and_dominated_blocks():
    """Where plain bf16 products are off by tens of percent."""
    low = torch.randn(1, 16, 3) @ torch.randn(1, 3, 64)
    spike = torch.randn(1, 16, 64) + 300 * torch.randn(1, 16, 1) @ torch.randn(1, 1, 64)
    assert error(torch.cat([low, spike])) < 1e-2


def test_zero_tiny_and_strided_blocks():
    assert ours(torch.zeros(1, 4, 20)).abs().max() == 0
    assert ours(torch.full((1, 4, 20), 1e-30)).isfinite().all()
    wide = torch.randn(64, 1, 16).permute(1, 2, 0)
    assert torch.equal(ours(wide), ours(wide.contiguous()))


def test_batch_equals_loop():
    blocks = torch.randn(2, 16, 32)
    assert torch.equal(ours(blocks), torch.cat([ours(b[None]) for b in blocks]))


@pytest.mark.parametrize("shape", [(2, 136, 264), (1, 264, 136), (1, 144, 144)])
def test_large_blocks(shape):
    """Two tiles a side, neither full; wide, tall and square: as exact as the plain loop in bf16.

    Triton's interpreter cuts bf16 values off where a GPU rounds them to nearest: twice the error.
    """
    blocks = torch.randn(shape)
    plain = reference.newton_schulz(blocks, coefficients=COEFFICIENTS["quintic"], dtype=torch.bfloat16)
    exact = reference.newton_schulz(blocks.double(), coefficients=COEFFICIENTS["quintic"], dtype=torch.float64)
    assert relative_error(ours(blocks), exact) < 2.0 * relative_error(plain, exact)


def test_large_blocks_do_not_meet():
    blocks = torch.randn(3, 136, 144)
    alone = torch.cat([ours(b[None]) for b in blocks])
    blocks[1] = float("nan")
    together = ours(blocks)
    assert torch.equal(together[::2], alone[::2])
    assert together[1].isnan().all()
    assert ours(torch.zeros(1, 136, 136)).abs().max() == 0
    assert ours(torch.full((1, 136, 136), 1e-30)).isfinite().all()


def test_declines_products_in_fp32():
    reason = triton_.declines(torch.randn(1, 4, 4), coefficients=COEFFICIENTS["quintic"], dtype=torch.float32)
    assert "float32 products were asked for" in reason
    reason = triton_.declines(torch.randn(1, 130, 260), coefficients=COEFFICIENTS["quintic"], dtype=torch.bfloat16)
    assert "multiples of 8, not 130 × 260" in reason
