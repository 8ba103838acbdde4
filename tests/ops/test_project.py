"""Several linear maps of the same rows, and their counterpart: values, shared gradients, unused outputs."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same
from tercet.errors import ShapeError, UnsupportedError
from tercet.ops import merge, project, use_tier


def formula(x, *weights):
    return tuple(torch.einsum("...i,oi->...o", x, w) for w in weights)


@pytest.mark.parametrize("tier", ["reference", "triton"])
@pytest.mark.parametrize("outputs", [(3,), (4, 1, 6)])
def test_values_and_gradients(tier, outputs):
    inputs = [torch.randn(2, 3, 5), *(torch.randn(n, 5) for n in outputs)]
    assert_same(lambda x, *w: project(x, w), formula, inputs, 1e-6, tier)


def test_an_unused_output_adds_nothing():
    x = torch.randn(4, 5, requires_grad=True)
    weights = [torch.randn(3, 5, requires_grad=True) for _ in range(2)]
    with use_tier("triton"):
        _, used = project(x, weights)
    d_x, d_unused, d_used = torch.autograd.grad(used.sum(), [x, *weights], allow_unused=True)
    assert torch.allclose(d_x, weights[1].sum(0).expand(4, 5), atol=1e-6)
    assert d_unused is None or not d_unused.any()
    assert torch.allclose(d_used, x.sum(0).expand(3, 5), atol=1e-6)


def test_wrong_width_and_mixed_types():
    with pytest.raises(ShapeError, match="cannot be projected"):
        project(torch.zeros(2, 5), [torch.zeros(3, 4)])
    with use_tier("triton"), pytest.raises(UnsupportedError, match="weights"):
        project(torch.zeros(2, 5), [torch.zeros(3, 5).bfloat16()])


@pytest.mark.parametrize("tier", ["reference", "triton"])
@pytest.mark.parametrize("widths", [(3,), (4, 1, 6)])
def test_merge(tier, widths):
    inputs = [*(torch.randn(2, 3, n) for n in widths), *(torch.randn(5, n) for n in widths)]

    def split(tensors):
        return tensors[: len(widths)], tensors[len(widths) :]

    def sums(*tensors):
        return sum(torch.einsum("...i,oi->...o", x, w) for x, w in zip(*split(tensors)))

    assert_same(lambda *tensors: merge(*split(tensors)), sums, inputs, 1e-6, tier)


def test_merge_of_wrong_shapes_and_mixed_types():
    x, w = torch.zeros(2, 5), torch.zeros(3, 5)
    for rows, weights in (([x], [w[:, :4]]), ([x, x[:1]], [w, w]), ([x], [w, w]), ([], [])):
        with pytest.raises(ShapeError, match="do not fit"):
            merge(rows, weights)
    with use_tier("triton"), pytest.raises(UnsupportedError, match="several types"):
        merge([x, x.bfloat16()], [w, w.bfloat16()])
