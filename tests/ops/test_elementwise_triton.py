"""SiTU, norms and short convolution in Triton's interpreter (kernels.md §8, §9)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same
from tercet.ops import gated_rms_norm, rms_norm, short_conv, situ_glu, use_tier
from tercet.ops.conv import reference, triton_
from tercet.ops.glu import situ_glu_reference


def test_situ():
    gate, up = 5 * torch.randn(40), 40 * torch.randn(40)
    gate[::5] *= 1e-4
    up[::3] *= 1e-5

    def formula(gate, up):
        return situ_glu_reference(gate, up, beta=4.0, linear_beta=25.0)

    assert_same(situ_glu, formula, [gate, up], 1e-6, "triton")


def test_situ_at_extremes():
    ends = [1e4, -1e4, float("inf"), float("-inf"), 0.0]
    gate = torch.tensor(ends).repeat_interleave(5).requires_grad_()
    up = torch.tensor(ends).repeat(5).requires_grad_()
    with use_tier("triton"):
        y = situ_glu(gate, up)
        grads = torch.autograd.grad(y.sum(), [gate, up])
    assert torch.allclose(y, situ_glu_reference(gate, up, beta=4.0, linear_beta=25.0))
    assert all(g.isfinite().all() for g in grads)


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
        assert torch.equal(rms_norm(x, weight, eps=1e-5).float(), truncated(3.0 * y.float()))


def truncated(x):
    """The interpreter's rounding to bf16."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("lengths", "taps"), [((20,), 4), ((5, 0, 1, 2, 12), 4), ((1, 1, 7), 2)])
def test_short_conv(carried, lengths, taps, monkeypatch):
    monkeypatch.setattr(triton_, "_SPAN", 4)
    monkeypatch.setattr(triton_, "_SEGMENTS", 2)
    monkeypatch.setattr(triton_, "_CHANNELS", 4)
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
    monkeypatch.setattr(triton_, "_SPAN", 4)
    x, weight = torch.randn(1, 15, 4), torch.randn(4, 1, 4)
    start, end = lengths[0], lengths[0] + lengths[1]
    x[:, start:end] = torch.nan
    x.requires_grad_()
    with use_tier("triton"):
        y, _ = short_conv(x, weight, cu_seqlens=torch.tensor((0, *lengths)).cumsum(0))
        (grad,) = torch.autograd.grad(y.sum(), x)
    for part in (y, grad):
        assert part[:, :start].isfinite().all() and part[:, end:].isfinite().all()
