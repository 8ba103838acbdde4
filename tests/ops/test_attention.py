"""Causal attention over packed sequences against softmax written out (model.md §5)."""

import itertools

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import attention_logit_max, mla_attention, use_tier

CASES = [(1,), (2,), (17,), (0, 5, 0, 1, 2, 0), (7, 7, 7), (1, 1), (0, 0), (3, 12, 9, 4, 33), (65, 64)]


def bounds(lengths):
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def formula(lengths, scale):
    """One query at a time: exp, divide, add up."""

    def run(q, kv, k_pe):
        content = q.shape[-1] - k_pe.shape[-1]
        shared = k_pe[:, :, None].expand(*kv.shape[:3], k_pe.shape[-1])
        k, v = torch.cat([kv[..., :content], shared], dim=-1), kv[..., content:]
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


def inputs(tokens, dtype=torch.float64, D=8, R=4, V=8):
    shapes = ((2, D + R), (2, D + V), (R,))
    return [torch.randn(1, tokens, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


def attention(lengths, scale=0.3):
    return lambda q, kv, k_pe: mla_attention(q, kv, k_pe, scale=scale, cu_seqlens=bounds(lengths))[0]


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_formula(lengths, tier):
    assert_same(attention(lengths), formula(lengths, 0.3), inputs(sum(lengths)), 1e-12, tier)


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize(("D", "R", "V"), [(8, 0, 8), (8, 3, 12), (8, 4, 16), (128, 64, 128)])
def test_widths(tier, D, R, V):
    scale = (D + R) ** -0.5
    assert_same(attention((5, 9), scale), formula((5, 9), scale), inputs(14, D=D, R=R, V=V), 1e-12, tier)


def test_fp32_bound():
    assert_same(attention((40, 23)), formula((40, 23), 0.3), inputs(63, torch.float32), 2e-6, "torch")


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_output_is_at_least_fp32(tier):
    with use_tier(tier):
        assert attention((5,))(*inputs(5, torch.bfloat16)).dtype == torch.float32
        assert attention((5,))(*inputs(5)).dtype == torch.float64


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_batch_equals_packed(tier):
    tensors = inputs(27)
    with use_tier(tier):
        batch = mla_attention(*(x.view(3, 9, *x.shape[2:]) for x in tensors), scale=0.3)[0]
        packed = attention((9, 9, 9))(*tensors)
    assert relative_error(batch.view(1, 27, 2, -1), packed) < 1e-14


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(6, 6, 6), (5, 7, 6), (4, 7, 40)])
def test_nan_stays_in_its_sequence(tier, poisoned, lengths):
    """Also where a short row is padded beside a longer one: the padding must not be another document's token."""
    edges = bounds(lengths).tolist()
    start, end = edges[poisoned], edges[poisoned + 1]
    tensors = inputs(sum(lengths), torch.float32)
    with use_tier(tier):
        clean = attention(lengths)(*tensors)
        for x in tensors:
            x[:, start:end] = torch.nan
        leaves = [x.requires_grad_() for x in tensors]
        y = attention(lengths)(*leaves)
    keep = [t for t in range(sum(lengths)) if not start <= t < end]
    assert y[:, start:end].isnan().all()
    assert relative_error(y[:, keep], clean[:, keep]) < 1e-6
    y[:, keep].sum().backward()
    assert all(x.grad[:, keep].isfinite().all() for x in leaves)


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_large_logits_do_not_overflow(tier):
    q, kv, k_pe = inputs(20, torch.float32)
    tensors = [100 * q, kv * torch.tensor([100.0] * 8 + [1.0] * 8), 100 * k_pe]
    with use_tier(tier):
        y = attention((20,), 1.0)(*tensors)
    assert relative_error(y, formula((20,), 1.0)(*(x.double() for x in tensors))) < 1e-3


@pytest.mark.parametrize("lengths", [(30,), (7, 0, 23), (600, 5)])
def test_logit_max(lengths):
    q, kv, k_pe = inputs(sum(lengths))
    k_content = kv[..., :8]
    k = torch.cat([k_content, k_pe[:, :, None].expand(-1, -1, 2, -1)], dim=-1)
    expected = torch.full((2,), -torch.inf, dtype=torch.float64)
    for a, b in itertools.pairwise(bounds(lengths).tolist()):
        logits = 0.3 * torch.einsum("qhd,khd->hqk", q[0, a:b], k[0, a:b])
        logits = logits.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        if b > a:
            expected = torch.maximum(expected, logits.amax((1, 2)))
    exact = attention_logit_max(q, k_content, k_pe, scale=0.3, threshold=-1e9, cu_seqlens=bounds(lengths))
    assert torch.allclose(exact.double(), expected, rtol=1e-5)
    bound = attention_logit_max(q, k_content, k_pe, scale=0.3, threshold=1e9, cu_seqlens=bounds(lengths))
    assert (bound >= exact).all() and (bound < 1e9).all()


def test_logit_max_of_nothing():
    q, kv, k_pe = inputs(0)
    assert attention_logit_max(q, kv[..., :8], k_pe, scale=1.0, threshold=1.0).tolist() == [-torch.inf] * 2


def test_wrong_shapes():
    q, kv, k_pe = inputs(6)
    for bad in (
        (q[0], kv[0], k_pe[0]),
        (q[..., :4], kv, k_pe),
        (q, kv[..., :8], k_pe),
        (q, kv[:, :5], k_pe),
        (q, kv, k_pe[:, :5]),
        (q, kv[:, :, :1], k_pe),
        (q, kv, k_pe[:, :, None]),
    ):
        with pytest.raises(ShapeError, match="attention takes"):
            mla_attention(*bad, scale=1.0)
    with pytest.raises(ShapeError, match="flatten"):
        mla_attention(*(x.view(2, 3, *x.shape[2:]) for x in (q, kv, k_pe)), scale=1.0, cu_seqlens=bounds((3,)))
