"""Decay gate and SiTU-GLU: quoted anchors, formulas, bounds, extremes (model.md §4.2, §7.1; kernels.md §8; M1, M2)."""

import math

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import kda_gate, sigmoid_gate, situ_glu, swiglu, use_tier


def gate(z: float, A_log: float, lower_bound: float | None) -> float:
    z_tensor = torch.tensor([[[z]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return kda_gate(z_tensor, torch.tensor([A_log], dtype=torch.float64), zero, lower_bound=lower_bound).item()


@pytest.mark.parametrize(("z", "A_log", "expected"), [(0, 0, -2.5), (-2, 0, -0.5960), (3, 0.5, -4.9647)])
def test_bounded_gate_anchors(z, A_log, expected):
    assert gate(z, A_log, -5.0) == pytest.approx(expected, abs=5e-5)


def test_softplus_gate_anchor():
    assert gate(0, 0, None) == pytest.approx(-0.693147, abs=1e-6)
    assert gate(25, 0, None) == -25.0  # softplus(z) = z above 20


def test_bounded_is_not_a_clamp():
    """M2: max(−e^A softplus(z), −5) is another function."""
    z = torch.linspace(-6, 6, 49, dtype=torch.float64).view(-1, 1, 1)
    zero = torch.zeros(1, dtype=torch.float64)
    bounded = kda_gate(z, zero, zero[:, None])
    clamped = kda_gate(z, zero, zero[:, None], lower_bound=None).clamp(min=-5)
    assert (bounded - clamped).abs().max() > 1
    assert (bounded > -5).all() and (bounded < 0).all()


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, None])
def test_gate_formula(lower_bound):
    """M1: one slope per head; the bias is added before the slope multiplies."""

    def formula(z, A_log, bias):
        rows = []
        for h in range(3):
            y = z[:, h] + bias[h]
            slope = math.e ** A_log[h]
            rows.append(-slope * (1 + y.exp()).log() if lower_bound is None else lower_bound / (1 + (-slope * y).exp()))
        return torch.stack(rows, 1)

    tensors = [torch.randn(s, dtype=torch.float64) for s in ((7, 3, 4), (3,), (3, 4))]
    assert_same(lambda *x: kda_gate(*x, lower_bound=lower_bound), formula, tensors, 1e-13)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_at_extreme_logits(lower_bound):
    z = torch.tensor([-1e4, 1e4, -100.0, 100.0]).view(1, 1, 4).requires_grad_()
    A_log = torch.tensor([2.0], requires_grad=True)
    g = kda_gate(z, A_log, torch.zeros(1, 4), lower_bound=lower_bound)
    g.sum().backward()
    assert g.isfinite().all() and (g <= 0).all()
    assert z.grad.isfinite().all() and A_log.grad.isfinite().all()


def test_gate_is_fp32_from_bf16():
    z = torch.randn(5, 2, 4).bfloat16()
    g = kda_gate(z, torch.zeros(2), torch.zeros(2, 4))
    assert g.dtype is torch.float32
    assert relative_error(g, kda_gate(z.double(), torch.zeros(2).double(), torch.zeros(2, 4).double())) < 1e-6


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize(
    ("g", "u", "expected", "digits"),
    [(0.5, 1, 0.30945, 5e-6), (2, 3, 4.86107, 5e-6), (10, 100, 98.5908, 5e-5), (-10, 5, -8.8405e-4, 5e-9)],
)
def test_situ_anchors(tier, g, u, expected, digits):
    with use_tier(tier):
        y = situ_glu(torch.tensor([g], dtype=torch.float64), torch.tensor([u], dtype=torch.float64))
    assert y.item() == pytest.approx(expected, abs=digits)


def situ(g, u, b1=4.0, b2=25.0):
    return b1 * torch.tanh(g / b1) / (1 + (-g).exp()) * b2 * torch.tanh(u / b2)


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_situ_formula(tier, dtype, bound):
    tensors = [3 * torch.randn(5, 33).to(dtype), 30 * torch.randn(5, 33).to(dtype)]
    assert_same(situ_glu, situ, tensors, bound, tier)
    assert_same(
        lambda g, u: situ_glu(g, u, beta=2.0, linear_beta=7.0), lambda g, u: situ(g, u, 2.0, 7.0), tensors, bound, tier
    )


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_situ_gradcheck(tier):
    leaves = tuple(torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in "gu")
    with use_tier(tier):
        assert torch.autograd.gradcheck(situ_glu, leaves)


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_situ_is_bounded_and_flat_at_the_ends(tier):
    ends = torch.tensor([-torch.inf, -1e4, 1e4, torch.inf, 1e-40, 0.0])
    g, u = (x.flatten().contiguous().requires_grad_() for x in torch.meshgrid(ends, ends, indexing="ij"))
    with use_tier(tier):
        y = situ_glu(g, u)
    y.sum().backward()
    assert y.isfinite().all() and y.abs().max() <= 100
    large = (g.abs() >= 1e4) & (u.abs() >= 1e4)
    assert (g.grad[large] == 0).all() and (u.grad[large] == 0).all()
    assert g.grad.isfinite().all() and u.grad.isfinite().all()


def test_padded_rows_stay_exactly_zero():
    zero = torch.zeros(3, 8)
    assert torch.equal(situ_glu(zero, torch.randn(3, 8)), zero)


def test_swiglu_formula():
    tensors = [torch.randn(4, 6, dtype=torch.float64) for _ in "gu"]
    assert_same(swiglu, lambda g, u: g / (1 + (-g).exp()) * u, tensors, 1e-13)


def test_sigmoid_gate_formula():
    tensors = [torch.randn(2, 3, 4, 5).double(), 4 * torch.randn(2, 3, 20).double()]
    assert_same(
        lambda o, gate: sigmoid_gate(o, gate, dtype=torch.float64),
        lambda o, gate: o / (1 + (-gate.view_as(o)).exp()),
        tensors,
        1e-13,
    )


def test_sigmoid_gate_is_formed_in_the_type_of_o():
    o, gate = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 16).bfloat16()
    y = sigmoid_gate(o, gate, dtype=torch.bfloat16)
    assert torch.equal(y, (o * gate.float().view_as(o).sigmoid()).bfloat16())


def test_wrong_shapes():
    z = torch.zeros(2, 3, 4)
    for A_log, bias in (((4,), (3, 4)), ((1,), (3, 4)), ((3, 1), (3, 4)), ((3,), (12,)), ((3,), (1, 4))):
        with pytest.raises(ShapeError, match="kda_gate takes"):
            kda_gate(z, torch.zeros(A_log), torch.zeros(bias))
    for function in (situ_glu, swiglu):
        with pytest.raises(ShapeError, match="of one shape"):
            function(z, z[:1])
    with pytest.raises(ShapeError, match="sigmoid_gate takes"):
        sigmoid_gate(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), dtype=torch.float32)
