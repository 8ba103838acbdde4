"""RMSNorm, gated RMSNorm and the L2 norm (model.md §3, §4.1, §4.6; M3, M19)."""

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import gated_rms_norm, l2_norm, rms_norm, use_tier

TIERS = pytest.mark.parametrize("tier", ["reference", "torch"])
SHAPES = pytest.mark.parametrize("shape", [(1, 3), (3, 48), (2, 5, 100), (0, 8)])


def rms(x, w, eps):
    return x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5 * w


@TIERS
@SHAPES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm(tier, shape, dtype, bound):
    tensors = [torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)]
    assert_same(lambda x, w: rms_norm(x, w, eps=1e-5), lambda x, w: rms(x, w, 1e-5), tensors, bound, tier)


@TIERS
def test_rms_norm_casts_before_the_weight(tier):
    """y is rounded to the input dtype, and only then multiplied (model.md §3)."""
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(32)
    exact = rms(x.double(), 1.0, 1e-5)
    with use_tier(tier):
        assert torch.equal(rms_norm(x, w, eps=1e-5), exact.float().bfloat16() * w.bfloat16())


@TIERS
def test_eps_matters_for_small_rows(tier):
    """M16: 1e-5 and 1e-6 differ."""
    x, w = torch.full((1, 4), 1e-3), torch.ones(4)
    with use_tier(tier):
        assert rms_norm(x, w, eps=1e-5)[0, 0].item() == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5)
        assert rms_norm(x, w, eps=1e-6)[0, 0].item() == pytest.approx(1e-3 / (2e-6) ** 0.5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_gated_rms_norm(dtype, bound):
    """M19: norm first, then a plain sigmoid (not SiLU)."""
    tensors = [torch.randn(s, dtype=torch.float64).to(dtype) for s in ((3, 2, 16), (3, 2, 16), (16,))]

    def formula(o, gate, w):
        return rms(o, w, 1e-5) / (1 + (-gate).exp())

    assert_same(lambda o, gate, w: gated_rms_norm(o, gate, w, eps=1e-5), formula, tensors, bound)


def test_gated_rms_norm_is_one_rounding_in_bf16():
    o, gate, w = torch.randn(50, 16).bfloat16(), torch.randn(50, 16).bfloat16(), torch.randn(16)
    exact = rms(o.double(), w.double(), 1e-5) * gate.double().sigmoid()
    error = (gated_rms_norm(o, gate, w, eps=1e-5).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 * 1.01).all()


@TIERS
@SHAPES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_l2_norm(tier, shape, dtype, bound):
    def formula(x):
        return x / ((x * x).sum(-1, keepdim=True) + 1e-6) ** 0.5

    assert_same(l2_norm, formula, [torch.randn(shape, dtype=torch.float64).to(dtype)], bound, tier)


@TIERS
def test_l2_epsilon_is_on_the_sum(tier):
    """M3: through an RMS norm with eps 1e-6 on the mean, small vectors come out up to 87 % too short."""
    x = torch.full((1, 128), 1e-4, dtype=torch.float64)
    with use_tier(tier):
        ours = l2_norm(x)
    expected = 1e-4 / (128 * 1e-8 + 1e-6) ** 0.5
    assert ours[0, 0].item() == pytest.approx(expected, rel=1e-12)
    through_rms = rms(x, 1.0, 1e-6) * 128**-0.5
    assert relative_error(through_rms, ours) > 0.8


@TIERS
def test_zero_and_tiny_rows(tier):
    for value in (0.0, 1e-30, 1e-20, 1e15):
        x = torch.full((2, 16), value, requires_grad=True)
        with use_tier(tier):
            y = l2_norm(x).sum() + rms_norm(x, torch.ones(16), eps=1e-5).sum()
        y.backward()
        assert y.isfinite() and x.grad.isfinite().all()


@TIERS
def test_gradcheck(tier):
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    with use_tier(tier):
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=1e-5), (x, w))
        assert torch.autograd.gradcheck(l2_norm, (x,))


def test_wrong_shapes():
    x = torch.zeros(3, 4)
    for weight in (torch.zeros(1), torch.zeros(3), torch.zeros(1, 4)):
        with pytest.raises(ShapeError, match="as wide as the rows"):
            rms_norm(x, weight, eps=1e-5)
        with pytest.raises(ShapeError, match="as wide as the rows"):
            gated_rms_norm(x, x, weight, eps=1e-5)
    with pytest.raises(ShapeError, match="of one shape"):
        gated_rms_norm(x, x[:1], torch.zeros(4), eps=1e-5)
