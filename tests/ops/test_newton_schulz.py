"""Newton–Schulz: the polynomial acts on singular values alone (kernels.md §13)."""

import pytest
import torch

from numerics import relative_error
from tercet.errors import ShapeError
from tercet.ops import newton_schulz
from tercet.ops.newton_schulz import COEFFICIENTS

METHODS = pytest.mark.parametrize("method", COEFFICIENTS)


def formula(block, method):
    """U p(Σ/‖Σ‖) Vᵀ with the scalar odd polynomial p of every step applied to the singular values."""
    U, S, V = torch.linalg.svd(block.double(), full_matrices=False)
    s = S / (S.square().sum().sqrt() + 1e-7)
    for a, b, c in COEFFICIENTS[method]:
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ V


@METHODS
@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (8, 8), (5, 20), (20, 5), (1, 1)])
def test_equals_scalar_polynomial(method, shape):
    blocks = torch.randn(3, *shape, dtype=torch.float64)
    out = newton_schulz(blocks, method=method)
    for block, got in zip(blocks, out):
        assert relative_error(got, formula(block, method)) < 1e-10


@METHODS
def test_transfer_of_a_singular_value(method):
    """One block with known singular values: what comes out is p of what went in, in the same bases."""
    values = torch.tensor([1.0, 0.5, 0.1, 0.02, 0.0], dtype=torch.float64)
    U, V = (torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q for _ in "UV")
    out = U.mT @ newton_schulz((U @ torch.diag(values) @ V.mT)[None], method=method)[0] @ V
    s = values / values.norm()
    for a, b, c in COEFFICIENTS[method]:
        s = a * s + b * s**3 + c * s**5
    assert torch.allclose(out, torch.diag(s), atol=1e-9)


def test_published_coefficients():
    assert COEFFICIENTS["quintic"] == ((3.4445, -4.7750, 2.0315),) * 5
    assert len(COEFFICIENTS["8+2"]) == 10 and COEFFICIENTS["8+2"][-1] == (2.0, -1.5, 0.5)


@pytest.mark.parametrize(("method", "spread"), [("quintic", 0.35), ("polar_express", 0.35), ("8+2", 1e-2)])
def test_singular_values_end_near_one(method, spread):
    out = newton_schulz(torch.randn(2, 16, 64, dtype=torch.float64), method=method)
    assert (torch.linalg.svdvals(out) - 1).abs().max() < spread


@METHODS
def test_batch_equals_loop(method):
    blocks = torch.randn(6, 8, 12)
    together = newton_schulz(blocks, method=method)
    alone = torch.cat([newton_schulz(b[None], method=method) for b in blocks])
    assert relative_error(together, alone) < 1e-5


@METHODS
def test_scale_of_the_input_does_not_matter(method):
    """The norm is taken before any cast, so tiny gradients survive."""
    blocks = torch.randn(2, 6, 9)
    expected = newton_schulz(blocks, method=method)
    for factor in (1e4, 1e-2):
        assert relative_error(newton_schulz(factor * blocks, method=method), expected) < 2e-3
    tiny = newton_schulz((1e-3 * blocks).bfloat16(), method=method)
    assert relative_error(tiny, expected) < 0.1


@METHODS
def test_zero_rank_deficient_and_dominated(method):
    assert torch.equal(newton_schulz(torch.zeros(2, 4, 6), method=method), torch.zeros(2, 4, 6))
    low_rank = torch.randn(1, 8, 2, dtype=torch.float64) @ torch.randn(1, 2, 12, dtype=torch.float64)
    assert relative_error(newton_schulz(low_rank, method=method)[0], formula(low_rank[0], method)) < 1e-9
    U, _, V = torch.linalg.svd(torch.randn(6, 10, dtype=torch.float64), full_matrices=False)
    dominated = U @ torch.diag(torch.tensor([1e4, 1, 1, 1, 1, 1], dtype=torch.float64)) @ V
    assert relative_error(newton_schulz(dominated[None], method=method)[0], formula(dominated, method)) < 1e-9


def test_fp32_bound():
    blocks = torch.randn(4, 32, 96)
    for block, got in zip(blocks, newton_schulz(blocks)):
        assert relative_error(got, formula(block, "quintic")) < 1e-5


def test_empty_and_wrong_shapes():
    assert newton_schulz(torch.zeros(0, 4, 5)).shape == (0, 4, 5)
    for shape in ((4, 5), (1, 2, 3, 4), (4,)):
        with pytest.raises(ShapeError, match="stack of matrices"):
            newton_schulz(torch.zeros(shape))
