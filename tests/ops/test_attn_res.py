"""Attention Residuals: formula, gradients, two-phase form (model.md §6, kernels.md §7, claim B7, M8)."""

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import attn_res, attn_res_bank, attn_res_merge, attn_res_weights, use_tier

TIERS = pytest.mark.parametrize("tier", ["reference", "torch"])


def formula(norm_weight, query, *sources):
    """Token by token over the sources: k = v / rms, s = k · (a w), softmax, sum."""
    keys = [v / ((v * v).mean(-1, keepdim=True) + 1e-5) ** 0.5 for v in sources]
    scores = [(k * norm_weight * query).sum(-1) for k in keys]
    total = sum(s.exp() for s in scores)
    return sum((s.exp() / total)[..., None] * v for s, v in zip(scores, sources))


def ours(norm_weight, query, *sources):
    return attn_res(sources, norm_weight, query)


def tensors(n, dim=24, lead=(2, 5), dtype=torch.float64):
    shapes = [(dim,), (dim,), *[(*lead, dim)] * n]
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


@TIERS
@pytest.mark.parametrize("n", range(2, 14))
def test_formula(tier, n):
    assert_same(ours, formula, tensors(n), 1e-12, tier)


@TIERS
def test_one_source_is_returned(tier):
    leaves = [x.requires_grad_() for x in tensors(1)]
    out = outputs(leaves, tier)
    assert torch.equal(out, leaves[2])
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert grads[0].abs().max() < 1e-13 and grads[1].abs().max() < 1e-13
    assert relative_error(grads[2], torch.ones_like(out)) < 1e-13


@TIERS
@pytest.mark.parametrize("dim", [1, 7, 100, 7168])
def test_widths(tier, dim):
    drawn = tensors(3, dim, (2,))
    drawn[1] /= dim**0.5
    assert_same(ours, formula, drawn, 1e-11 if dim > 1 else 1e-6, tier)


@TIERS
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_low_precision(tier, dtype, bound):
    drawn = tensors(4, dtype=dtype)
    actual = outputs(drawn, tier)
    assert actual.dtype is dtype
    assert relative_error(actual, formula(*(x.double() for x in drawn))) < bound


def outputs(drawn, tier):
    with use_tier(tier):
        return ours(*drawn)


def test_one_cast_at_the_end():
    """M8: everything fp32, one rounding: bf16 output equals the rounded exact mixture but for ties."""
    drawn = tensors(5, 64, (400,), torch.bfloat16)
    exact = formula(*(x.double() for x in drawn))
    assert ((outputs(drawn, "torch").double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.01 + 1e-6).all()


@TIERS
def test_zero_query_is_the_average(tier):
    drawn = tensors(4)
    drawn[1].zero_()
    assert relative_error(outputs(drawn, tier), torch.stack(drawn[2:]).mean(0)) < 1e-14
    assert_same(ours, formula, drawn, 1e-12, tier)


@TIERS
def test_identical_sources(tier):
    drawn = tensors(1)
    assert relative_error(outputs([*drawn, drawn[2], drawn[2]], tier), drawn[2]) < 1e-14


@TIERS
def test_one_source_much_larger(tier):
    drawn = tensors(4, dtype=torch.float32)
    drawn[3] *= 1e4
    expected = formula(*(x.double() for x in drawn))
    assert relative_error(outputs(drawn, tier), expected) < 1e-5


@TIERS
def test_strided_sources(tier):
    """Slots of one bank tensor and separate tensors give the same."""
    drawn = tensors(3)
    bank = torch.stack(drawn[2:], dim=2)
    views = [*drawn[:2], *bank.unbind(2)]
    assert not views[2].is_contiguous()
    assert torch.equal(outputs(views, tier), outputs(drawn, tier))


@TIERS
def test_gradcheck(tier):
    leaves = tuple(x.requires_grad_() for x in tensors(3, 4, (2,)))
    with use_tier(tier):
        assert torch.autograd.gradcheck(ours, leaves)


def test_gradients_by_hand():
    """dℓ = p (δ·v − δ·out), dv = p δ + dℓ r (w̃ − ℓ r v / D) (kernels.md §7)."""
    drawn = [x.requires_grad_() for x in tensors(3, 16, (6,))]
    with use_tier("reference"):
        out = ours(*drawn)
    delta = torch.randn_like(out)
    grads = torch.autograd.grad(out, drawn, delta)
    a, w, *v = (x.detach() for x in drawn)
    p = attn_res_weights(v, a, w)
    d_folded = torch.zeros_like(w)
    for i in range(3):
        r = (v[i].square().mean(-1) + 1e-5) ** -0.5
        score = r * (v[i] @ (a * w))
        d_score = p[i] * ((delta * v[i]).sum(-1) - (delta * out.detach()).sum(-1))
        d_v = p[i][:, None] * delta + (d_score * r)[:, None] * (a * w - (score * r)[:, None] * v[i] / 16)
        d_folded += ((d_score * r)[:, None] * v[i]).sum(0)
        assert relative_error(grads[2 + i], d_v) < 1e-12
    assert relative_error(grads[0], d_folded * w) < 1e-12
    assert relative_error(grads[1], d_folded * a) < 1e-12


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_two_phase_equals_direct(slots):
    """B7: reading the bank once for all queries of a block, then merging the running sum, is exact."""
    bank = [torch.randn(3, 5, 32, dtype=torch.float64) * 10.0**i for i in range(-slots // 2, slots - slots // 2)]
    weights, queries = (torch.randn(24, 32, dtype=torch.float64) for _ in "aw")
    partial = attn_res_bank(bank, weights * queries)
    for j in range(24):
        prefix = torch.randn(3, 5, 32, dtype=torch.float64)
        merged = attn_res_merge(partial, j, prefix, weights[j] * queries[j])
        direct = formula(weights[j], queries[j], *bank, prefix)
        assert (merged - direct).abs().max() <= 1e-12 * direct.abs().max()


def test_two_phase_survives_large_scores():
    bank = [torch.randn(4, 16) for _ in range(3)]
    folded = 1e3 * torch.randn(2, 16)
    partial = attn_res_bank(bank, folded)
    prefix = torch.randn(4, 16)
    merged = attn_res_merge(partial, 1, prefix, folded[1])
    assert merged.isfinite().all()
    assert relative_error(merged, attn_res([*bank, prefix], torch.ones(16), folded[1])) < 1e-3


def test_weights_sum_to_one():
    a, w, *sources = tensors(6)
    p = attn_res_weights(sources, a, w)
    assert p.shape == (6, 2, 5) and (p >= 0).all()
    assert torch.allclose(p.sum(0), torch.ones(2, 5, dtype=torch.float64))
    assert relative_error((p[..., None] * torch.stack(sources)).sum(0), formula(a, w, *sources)) < 1e-12


@TIERS
def test_nan_stays_in_its_token(tier):
    drawn = tensors(3)
    drawn[3][0, 2] = torch.nan
    out = outputs(drawn, tier)
    assert out[0, 2].isnan().all() and int(out.isnan().any(-1).sum()) == 1


def test_wrong_shapes():
    a, w, first, second = tensors(2)
    with pytest.raises(ShapeError, match="at least one"):
        attn_res([], a, w)
    for bad in (([first, second[:1]], a, w), ([first], a[:5], w), ([first], a, w[:5]), ([first], a, w[None])):
        with pytest.raises(ShapeError, match="one shape"):
            attn_res(*bad)
