"""AttnRes kernels in Triton's interpreter against the formula in fp64 (kernels.md §7, M8)."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from numerics import assert_same, relative_error
from tercet.errors import UnsupportedError
from tercet.ops import attn_res, attn_res_bank, attn_res_merge, attn_res_read, use_tier
from tercet.ops.attn_res import reference, triton_, triton_backward, triton_inference


def ours(norm_weight, query, *sources):
    return attn_res(sources, norm_weight, query)


def formula(norm_weight, query, *sources):
    return reference.attn_res(*sources, norm_weight=norm_weight, query=query, eps=1e-5)


@pytest.fixture(params=["narrow", "wide"])
def width(request, monkeypatch):
    """Run every test with the kernels for rows that one warp owns, and with those for wider ones, on few programs."""
    if request.param == "wide":
        monkeypatch.setattr(triton_backward, "WARP_ROW", 0)
        monkeypatch.setattr(triton_, "_RESIDENT", 1)
    monkeypatch.setattr(triton_backward, "_RESIDENT", 1)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize(("n", "dim", "tokens"), [(2, 24, 1), (5, 33, 2), (2, 8, 9)])
def test_values_and_gradients(n, dim, tokens):
    query = torch.randn(dim) / dim**0.5  # a saturated softmax would leave differences of equal numbers
    assert_same(ours, formula, [torch.randn(dim), query, *torch.randn(n, tokens, dim)], 1e-5, "triton")


def ours_normed(norm_weight, query, next_weight, *sources):
    return attn_res_read(sources, norm_weight, query, next_weight, next_eps=1e-3)[0]


def formula_normed(norm_weight, query, next_weight, *sources):
    mixed = formula(norm_weight, query, *sources)
    return mixed / (mixed.square().mean(-1, keepdim=True) + 1e-3).sqrt() * next_weight


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize(
    ("n", "dim", "tokens", "tier"), [(1, 8, 3, "triton"), (5, 33, 9, "triton"), (3, 8, 2, "torch")]
)
def test_norm_behind_the_mixture(n, dim, tokens, tier):
    inputs = [torch.randn(dim), torch.randn(dim), torch.randn(dim), *torch.randn(n, tokens, dim)]
    assert_same(ours_normed, formula_normed, inputs, 1e-5, tier)


@pytest.mark.usefixtures("width")
def test_norm_behind_a_tiny_mixture():
    """Where ε outweighs the mean square, δ·out is not near zero and the shortcut for it must still hold."""
    inputs = [torch.randn(16), torch.randn(16), torch.randn(16), *(1e-2 * torch.randn(3, 4, 16))]
    assert_same(ours_normed, formula_normed, inputs, 1e-5, "triton")


def read_on(read, norm_weight, query, next_weight, a, b):
    """Three readers in a row, of which the last also reads what the second one made."""
    sources = [a, b]
    _, sources = read(sources, norm_weight, query, next_weight)
    y, sources = read(sources, norm_weight, 2 * query, next_weight)
    z, sources = read([*sources, y], norm_weight, 3 * query, next_weight)
    return z, 2 * sources[0], sources[2]


def ours_reading(*inputs):
    return read_on(lambda *x: attn_res_read(*x, next_eps=1e-3), *inputs)


def formula_reading(*inputs):
    def read(sources, norm_weight, query, next_weight):
        return formula_normed(norm_weight, query, next_weight, *sources), sources

    return read_on(read, *inputs)


def inputs_for_reading():
    return [torch.randn(8), torch.randn(8), torch.randn(8), *torch.randn(2, 3, 8)]


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("tier", ["triton", "torch"])
def test_readers_in_a_row(tier):
    """A source's gradient is handed from reader to reader; the first one's mixture is never used."""
    assert_same(ours_reading, formula_reading, inputs_for_reading(), 1e-5, tier)


@pytest.mark.usefixtures("width")
def test_readers_under_recomputation_and_twice():
    inputs = inputs_for_reading()
    outputs = []
    for run in (ours_reading, lambda *x: checkpoint(ours_reading, *x, use_reentrant=False)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with use_tier("triton"):
            total = sum(y.square().sum() for y in run(*leaves))
            first = torch.autograd.grad(total, leaves, retain_graph=True)
            again = torch.autograd.grad(total, leaves)
        assert all(torch.equal(x, y) for x, y in zip(first, again))
        outputs.append(first)
    assert all(torch.equal(x, y) for x, y in zip(*outputs))


def test_only_some_gradients_are_handed_on():
    """Without a gradient of the mixture those handed in pass; without gradients at all the sources themselves do."""
    weight, a, b = torch.randn(8), torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    with use_tier("triton"):
        _, (out, _) = attn_res_read([a, b], weight, weight, weight)
        (grad,) = torch.autograd.grad((3 * out).sum(), a)
        with torch.no_grad():
            _, same = attn_res_read([a, b], weight, weight, weight)
    assert torch.equal(out, a) and torch.equal(grad, torch.full_like(a, 3.0))
    assert same[0] is a and same[1] is b


@pytest.mark.usefixtures("width")
def test_one_source_is_returned():
    v = torch.randn(3, 16)
    with use_tier("triton"):
        assert torch.equal(ours(torch.randn(16), torch.randn(16), v), v)


@pytest.mark.usefixtures("width")
def test_one_huge_source_and_zero_query():
    vs = [torch.randn(2, 16), 1e4 * torch.randn(2, 16), torch.randn(2, 16)]
    assert_same(ours, formula, [torch.ones(16), torch.randn(16), *vs], 1e-4, "triton")
    with use_tier("triton"):
        assert torch.allclose(ours(torch.ones(16), torch.zeros(16), *vs), sum(vs) / 3, rtol=1e-6)


def test_strided_and_misaligned_sources():
    bank = torch.randn(3, 4, 17)
    inputs = [torch.randn(16), torch.randn(16), bank[:, 0, 1:], bank[:, 2, :16], torch.randn(49)[1:].view(3, 16)]
    assert_same(
        lambda *x: ours(*inputs[:2], *inputs[2:]) + 0 * sum(y.sum() for y in x),
        formula_of(inputs),
        [torch.ones(1)],
        1e-5,
        "triton",
    )


def formula_of(inputs):
    wide = [x.double() for x in inputs]
    return lambda *x: formula(*wide) + 0 * sum(y.sum() for y in x)


def test_m8_weights_are_fp32_for_bf16_sources():
    """M8: scores that pass through bf16 would be off by 1e-3."""
    weight, query = torch.randn(64), torch.randn(64)
    sources = [torch.randn(2, 64).bfloat16() for _ in range(3)]
    p = triton_._forward(sources, weight, query, None, 1e-5, 0.0)[1][..., :3]
    expected = reference.weights([v.double() for v in sources], weight.double(), query.double(), 1e-5)
    assert relative_error(p.movedim(-1, 0), expected) < 1e-6


def test_declines_mixed_types():
    with use_tier("triton"), pytest.raises(UnsupportedError, match="several types"):
        ours(torch.ones(4), torch.ones(4), torch.randn(2, 4), torch.randn(2, 4).bfloat16())


@pytest.mark.parametrize(("n", "dim", "tokens", "queries"), [(1, 24, 3, 1), (3, 130, 17, 5), (20, 16, 2, 18)])
@pytest.mark.parametrize("many", [1, 2048])
def test_two_phases(n, dim, tokens, queries, many, monkeypatch):
    """Reading the bank once for all queries, then merging the running sum, equals the direct mixture."""
    monkeypatch.setattr(triton_inference, "_MANY", many)
    bank, prefix = [*torch.randn(n, 1, tokens, dim)], torch.randn(1, tokens, dim)
    weight, query = torch.randn(queries, dim), torch.randn(queries, dim)
    with use_tier("triton"):
        partial = attn_res_bank(bank, weight * query)
        merged = [attn_res_merge(partial, j, prefix, weight[j] * query[j]) for j in range(queries)]
    for j in range(queries):
        direct = formula(weight[j].double(), query[j].double(), *(v.double() for v in (*bank, prefix)))
        assert relative_error(merged[j], direct) < 1e-6


def test_two_phases_with_sources_of_very_different_size():
    bank = [10.0**i * torch.randn(2, 32) for i in range(-3, 4)]
    weight, query = torch.ones(32), 30 * torch.randn(32)
    with use_tier("triton"):
        merged = attn_res_merge(attn_res_bank(bank, (weight * query)[None]), 0, bank[2], weight * query)
    direct = formula(weight.double(), query.double(), *(v.double() for v in (*bank, bank[2])))
    assert relative_error(merged, direct) < 1e-4


def test_two_phases_decline_gradients():
    with use_tier("triton"), pytest.raises(UnsupportedError, match="no gradients"):
        attn_res_bank([torch.randn(2, 8, requires_grad=True)], torch.randn(1, 8))
