"""SiTU, norms and short convolution in Triton's interpreter (kernels.md §8, §9)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same
from tercet.ops import gated_rms_norm, rms_norm, short_conv, sigmoid_gate, situ_glu, use_tier
from tercet.ops.conv import reference, triton_
from tercet.ops.glu import situ_glu_reference
from tercet.ops.gpu import INTERPRETED


def situ_formula(gate, up):
    return situ_glu_reference(gate, up, beta=4.0, linear_beta=25.0)


def test_situ():
    gate, up = 5 * torch.randn(40), 40 * torch.randn(40)
    gate[::5] *= 1e-4
    up[::3] *= 1e-5
    assert_same(situ_glu, situ_formula, [gate, up], 1e-6, "triton")


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_situ_in_bf16(scale):
    """On a GPU with its own tanh, whose error is relative and below that of the rounding."""
    gate, up = 5 * scale * torch.randn(999), 40 * scale * torch.randn(999)
    assert_same(situ_glu, situ_formula, [gate.bfloat16(), up.bfloat16()], 5e-3, "triton")


def test_situ_at_extremes():
    ends = [1e4, -1e4, float("inf"), float("-inf"), 0.0]
    gate = torch.tensor(ends).repeat_interleave(5).requires_grad_()
    up = torch.tensor(ends).repeat(5).requires_grad_()
    with use_tier("triton"):
        y = situ_glu(gate, up)
        grads = torch.autograd.grad(y.sum(), [gate, up])
    assert torch.allclose(y, situ_glu_reference(gate, up, beta=4.0, linear_beta=25.0))
    assert all(g.isfinite().all() for g in grads)


def test_situ_keeps_nan():
    """A saturating minimum must not turn NaN into a number."""
    gate, up = torch.tensor([torch.nan, 1.0, 1.0]), torch.tensor([1.0, torch.nan, 1.0])
    gate, up = gate.requires_grad_(), up.requires_grad_()
    with use_tier("triton"):
        y = situ_glu(gate, up)
        grads = torch.autograd.grad(y.sum(), [gate, up])
    for x in (y, *grads):
        assert x.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("shape", [(5, 3, 20), (1, 33)])
def test_norms(shape):
    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x, gate, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    assert_same(lambda x, w: rms_norm(x, w, eps=1e-5), norm, [x, weight], 1e-6, "triton")
    assert_same(
        lambda x, g, w: gated_rms_norm(x, g, w, eps=1e-5),
        lambda x, g, w: norm(x, w) * g.sigmoid(),
        [x, gate, weight],
        1e-6,
        "triton",
    )


def test_norm_rounds_before_the_weight():
    x, weight = torch.randn(3, 16).bfloat16(), torch.full((16,), 3.0).bfloat16()
    with use_tier("triton"):
        y = rms_norm(x, torch.ones(16).bfloat16(), eps=1e-5)
        assert torch.equal(rms_norm(x, weight, eps=1e-5).float(), rounded(3.0 * y.float()))


def rounded(x):
    """To bf16, as where the kernels run: the interpreter truncates."""
    return (x.view(torch.int32) & -65536).view(torch.float32) if INTERPRETED else x.bfloat16().float()


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("lengths", "taps"), [((20,), 4), ((5, 0, 1, 2, 12), 4), ((1, 1, 7), 2)])
def test_short_conv(carried, lengths, taps, monkeypatch):
    monkeypatch.setattr(triton_, "_FORWARD", (4, 4, 1))
    monkeypatch.setattr(triton_, "_BACKWARD", (8, 4, 1))
    state = torch.randn(len(lengths), taps - 1, 6) if carried else None
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    def ours(x, weight):
        return short_conv(x, weight, state=state, cu_seqlens=bounds)

    def formula(x, weight):
        before = None if state is None else state.double()
        return reference.short_conv(x, weight, state=before, lengths=lengths, tail=True)

    assert_same(ours, formula, [torch.randn(1, sum(lengths), 6), torch.randn(6, 1, taps)], 1e-6, "triton")


@pytest.mark.parametrize("lengths", [(5, 5, 5), (4, 6, 5)])
def test_short_conv_keeps_nan_in_its_sequence(lengths, monkeypatch):
    monkeypatch.setattr(triton_, "_FORWARD", (4, 4, 1))
    monkeypatch.setattr(triton_, "_BACKWARD", (4, 4, 1))
    x, weight = torch.randn(1, 15, 4), torch.randn(4, 1, 4)
    start, end = lengths[0], lengths[0] + lengths[1]
    x[:, start:end] = torch.nan
    x.requires_grad_()
    with use_tier("triton"):
        y, _ = short_conv(x, weight, cu_seqlens=torch.tensor((0, *lengths)).cumsum(0))
        (grad,) = torch.autograd.grad(y.sum(), x)
    for part in (y, grad):
        assert part[:, :start].isfinite().all() and part[:, end:].isfinite().all()


def test_sigmoid_gate():
    o, gate = torch.randn(2, 5, 3, 8), 5 * torch.randn(2, 5, 24)

    def ours(o, gate):
        return sigmoid_gate(o, gate, dtype=torch.float32)

    assert_same(ours, lambda o, gate: o / (1 + (-gate.view_as(o)).exp()), [o, gate], 1e-6, "triton")


def test_sigmoid_gate_at_extremes_and_other_strides():
    ends = torch.tensor([1e4, -1e4, float("inf"), float("-inf"), 0.0])
    wide = torch.stack([ends, torch.zeros(5)], dim=-1).view(1, 1, 10)[..., ::2].requires_grad_()
    o = torch.full((1, 1, 5, 1), 3.0, requires_grad=True)
    with use_tier("triton"):
        y = sigmoid_gate(o, wide, dtype=torch.float32)
        grads = torch.autograd.grad(y.sum(), [o, wide])
    assert torch.equal(y.flatten(), torch.tensor([3.0, 0.0, 3.0, 0.0, 1.5]))
    assert torch.equal(grads[0].flatten(), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5]))
    assert torch.equal(grads[1].flatten(), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.75]))


def test_sigmoid_gate_rounds_once():
    """The product is formed in fp32 and only the result is cut to bf16; so is the gate's gradient, o's is not."""
    o, gate = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 16).bfloat16().requires_grad_()
    with use_tier("triton"):
        y = sigmoid_gate(o, gate, dtype=torch.bfloat16)
        d_o, d_gate = torch.autograd.grad(y.float().sum(), [o, gate])
    s = gate.detach().double().view_as(o).sigmoid()
    assert y.dtype == d_gate.dtype == torch.bfloat16 and d_o.dtype == torch.float32
    assert ((y - o * s).abs() <= 2**-7 * (o * s).abs()).all()
    assert torch.allclose(d_o.double(), s, rtol=1e-6)
    assert torch.allclose(d_gate.double().view_as(o), (o * s * (1 - s)).double(), rtol=2**-7)


def test_an_empty_gate():
    with use_tier("triton"):
        assert sigmoid_gate(torch.ones(1, 0, 2, 4), torch.ones(1, 0, 8), dtype=torch.float32).shape == (1, 0, 2, 4)
