"""Causal attention over packed sequences against softmax written out (model.md §5)."""

import itertools

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import attention_logit_max, causal_attention, use_tier

CASES = [(1,), (2,), (17,), (0, 5, 0, 1, 2, 0), (7, 7, 7), (1, 1), (0, 0), (3, 12, 9, 4, 33), (65, 64)]


def bounds(lengths):
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def formula(lengths, scale):
    """One query at a time: exp, divide, add up."""

    def run(q, k, v):
        rows, start = [], 0
        for length in lengths:
            for t in range(length):
                seen = slice(start, start + t + 1)
                logits = scale * (k[0, seen] * q[0, start + t]).sum(-1)
                p = (logits - logits.max(0).values).exp()
                rows.append((p[..., None] * v[0, seen]).sum(0) / p.sum(0)[:, None])
            start += length
        return torch.stack(rows)[None] if rows else v

    return run


def qkv(tokens, dtype=torch.float64, D=12, V=8):
    return [torch.randn(1, tokens, 2, width, dtype=torch.float64).to(dtype) for width in (D, D, V)]


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_formula(lengths, tier):
    def ours(q, k, v):
        return causal_attention(q, k, v, scale=0.3, cu_seqlens=bounds(lengths))

    assert_same(ours, formula(lengths, 0.3), qkv(sum(lengths)), 1e-12, tier)


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize(("D", "V"), [(8, 8), (8, 12), (192, 128)])
def test_widths(tier, D, V):
    def ours(q, k, v):
        return causal_attention(q, k, v, scale=D**-0.5, cu_seqlens=bounds((5, 9)))

    assert_same(ours, formula((5, 9), D**-0.5), qkv(14, D=D, V=V), 1e-12, tier)


def test_fp32_bound():
    def ours(q, k, v):
        return causal_attention(q, k, v, scale=0.3, cu_seqlens=bounds((40, 23)))

    assert_same(ours, formula((40, 23), 0.3), qkv(63, torch.float32), 2e-6, "torch")


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_batch_equals_packed(tier):
    q, k, v = (x.view(3, 9, 2, -1) for x in qkv(27))
    with use_tier(tier):
        batch = causal_attention(q, k, v, scale=0.3)
        packed = causal_attention(*(x.view(1, 27, 2, -1) for x in (q, k, v)), scale=0.3, cu_seqlens=bounds((9, 9, 9)))
    assert relative_error(batch.view(1, 27, 2, -1), packed) < 1e-14


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(6, 6, 6), (5, 7, 6), (4, 7, 40)])
def test_nan_stays_in_its_sequence(tier, poisoned, lengths):
    """Also where a short row is padded beside a longer one: the padding must not be another document's token."""
    edges = bounds(lengths).tolist()
    start, end = edges[poisoned], edges[poisoned + 1]
    q, k, v = qkv(sum(lengths), torch.float32)
    with use_tier(tier):
        clean = causal_attention(q, k, v, scale=0.3, cu_seqlens=bounds(lengths))
        for x in (q, k, v):
            x[:, start:end] = torch.nan
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y = causal_attention(*leaves, scale=0.3, cu_seqlens=bounds(lengths))
    keep = [t for t in range(sum(lengths)) if not start <= t < end]
    assert y[:, start:end].isnan().all()
    assert relative_error(y[:, keep], clean[:, keep]) < 1e-6
    y[:, keep].sum().backward()
    assert all(x.grad[:, keep].isfinite().all() for x in leaves)


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_large_logits_do_not_overflow(tier):
    q, k, v = qkv(20, torch.float32)
    with use_tier(tier):
        y = causal_attention(100 * q, 100 * k, v, scale=1.0)
    assert relative_error(y, formula((20,), 1.0)(100 * q.double(), 100 * k.double(), v.double())) < 1e-3


@pytest.mark.parametrize("lengths", [(30,), (7, 0, 23), (600, 5)])
def test_logit_max(lengths):
    q, k, _ = qkv(sum(lengths))
    expected = torch.full((2,), -torch.inf, dtype=torch.float64)
    for a, b in itertools.pairwise(bounds(lengths).tolist()):
        logits = 0.3 * torch.einsum("qhd,khd->hqk", q[0, a:b], k[0, a:b])
        logits = logits.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        if b > a:
            expected = torch.maximum(expected, logits.amax((1, 2)))
    exact = attention_logit_max(q, k, scale=0.3, threshold=-1e9, cu_seqlens=bounds(lengths))
    assert torch.allclose(exact.double(), expected, rtol=1e-5)
    bound = attention_logit_max(q, k, scale=0.3, threshold=1e9, cu_seqlens=bounds(lengths))
    assert (bound >= exact).all() and (bound < 1e9).all()


def test_wrong_shapes():
    q, k, v = qkv(6)
    for bad in ((q[0], k[0], v[0]), (q, k[..., :4], v), (q, k, v[:, :5]), (q, k[:, :5], v), (q, k, v[:, :, :1])):
        with pytest.raises(ShapeError, match="attention takes"):
            causal_attention(*bad, scale=1.0)
    with pytest.raises(ShapeError, match="flatten"):
        causal_attention(*(x.view(2, 3, 2, -1) for x in (q, k, v)), scale=1.0, cu_seqlens=bounds((3,)))
