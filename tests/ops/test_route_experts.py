"""Router and routed experts (model.md §7.2, kernels.md §11; M5, M7, M33, M35)."""

import pytest
import torch

from numerics import assert_same, outputs_and_gradients, relative_error
from tercet.errors import ShapeError
from tercet.ops import route, routed_experts, router_logits, use_tier

TIERS = pytest.mark.parametrize("tier", ["reference", "torch"])


def sigmoid(x):
    return 1 / (1 + (-x).exp())


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (16, 2), (256, 8), (896, 16), (896, 17), (897, 30)])
def test_routing(experts, k):
    """M35: no size is special."""
    logits, bias = torch.randn(40, experts, dtype=torch.float64), torch.randn(experts, dtype=torch.float64)
    got = route(logits, bias, top_k=k, scaling_factor=2.446)
    scores = sigmoid(logits)
    for t in range(40):
        ranked = sorted(range(experts), key=lambda e: -(scores[t, e] + bias[e]).item())
        assert got.experts[t].tolist() == ranked[:k]
        assert got.cutoff[t].item() == pytest.approx((scores[t] + bias)[ranked[k]].item(), abs=1e-14)
        chosen = scores[t, ranked[:k]]
        assert relative_error(got.weights[t], 2.446 * chosen / chosen.sum()) < 1e-14
    assert relative_error(got.scores, scores) < 1e-14


def test_bias_selects_but_never_weighs():
    logits = torch.zeros(3, 5)
    got = route(logits, torch.tensor([0.0, 0.3, 0.0, 0.2, 0.1]), top_k=2)
    assert got.experts.tolist() == [[1, 3]] * 3
    assert torch.allclose(got.weights, torch.full((3, 2), 0.5))
    without = route(logits, torch.zeros(5), top_k=2, renormalize=False, scaling_factor=3.0)
    assert torch.allclose(without.weights, torch.full((3, 2), 1.5))


def test_bias_has_no_gradient_and_logits_have():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    got = route(logits, bias, top_k=2)
    assert not got.cutoff.requires_grad
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(got.weights.square().sum(), bias)
    chosen = got.experts

    def formula(logits):
        scores = sigmoid(logits).gather(1, chosen)
        return scores / scores.sum(1, keepdim=True)

    assert_same(lambda x: route(x, bias.detach(), top_k=2).weights, formula, [logits], 1e-12)


def test_scores_are_fp32_from_bf16():
    logits = torch.randn(9, 6).bfloat16()
    got = route(logits, torch.zeros(6), top_k=2)
    assert got.scores.dtype is torch.float32 and got.weights.dtype is torch.float32
    assert relative_error(got.scores, sigmoid(logits.double())) < 1e-6


def test_forced_choice():
    logits = torch.randn(4, 6)
    forced = torch.tensor([[0, 1], [2, 3], [4, 5], [5, 0]])
    got = route(logits, torch.randn(6), top_k=2, forced=forced)
    assert torch.equal(got.experts, forced)
    picked = logits.sigmoid().gather(1, forced)
    assert torch.allclose(got.weights, picked / picked.sum(1, keepdim=True))


def test_no_tokens():
    got = route(torch.zeros(0, 6), torch.zeros(6), top_k=2)
    assert got.weights.shape == (0, 2) and got.cutoff.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "bias", "k", "forced", "message"),
    [
        ((4, 6), (5,), 2, None, "route takes logits"),
        ((6,), (6,), 2, None, "route takes logits"),
        ((4, 6), (6,), 0, None, "top_k is 0"),
        ((4, 6), (6,), 6, None, "top_k is 6"),
        ((4, 6), (6,), 2, (4, 3), "forced"),
        ((4, 6), (6,), 2, (3, 2), "forced"),
    ],
)
def test_wrong_routing(logits, bias, k, forced, message):
    choice = None if forced is None else torch.zeros(forced, dtype=torch.long)
    with pytest.raises(ShapeError, match=message):
        route(torch.zeros(logits), torch.zeros(bias), top_k=k, forced=choice)


def test_bias_must_stay_fp32():
    with pytest.raises(ShapeError, match="must stay fp32"):
        route(torch.zeros(4, 6), torch.zeros(6).bfloat16(), top_k=2)


def draw(tokens=23, experts=6, k=2, latent=5, inner=7, dtype=torch.float64):
    """Return z, weights, w1, w2, w3 and the choice."""
    shapes = [
        (tokens, latent),
        (tokens, k),
        (experts, inner, latent),
        (experts, latent, inner),
        (experts, inner, latent),
    ]
    choice = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k).long()
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes], choice


def formula(choice, activation):
    """Token by token, choice by choice."""

    def act(g, u):
        if activation == "silu":
            return g * sigmoid(g) * u
        return 4 * torch.tanh(g / 4) * sigmoid(g) * 25 * torch.tanh(u / 25)

    def run(z, weights, w1, w2, w3):
        rows = []
        for t in range(len(z)):
            terms = []
            for j, e in enumerate(choice[t].tolist()):
                terms.append(weights[t, j] * (w2[e] @ act(w1[e] @ z[t], w3[e] @ z[t])))
            rows.append(sum(terms))
        return torch.stack(rows) if rows else z

    return run


def ours(choice, activation="situ"):
    def run(z, weights, w1, w2, w3):
        return routed_experts(z, weights, choice, w1, w2, w3, activation=activation)

    return run


@TIERS
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("shape", [{}, {"tokens": 1}, {"k": 5}, {"tokens": 0}, {"experts": 40, "k": 3}])
def test_formula(tier, activation, shape):
    """Among the gradients that of the combination weights, which needs no stored expert output (kernels.md §11)."""
    tensors, choice = draw(**shape)
    assert_same(ours(choice, activation), formula(choice, activation), tensors, 1e-12, tier)


@TIERS
def test_all_tokens_in_one_expert(tier):
    tensors, _ = draw(k=1)
    choice = torch.full((23, 1), 5)
    assert_same(ours(choice), formula(choice, "situ"), tensors, 1e-12, tier)
    grads = outputs_and_gradients(ours(choice), tensors, tier)[3:]
    assert all((d[:5] == 0).all() for d in grads)


@TIERS
def test_weight_of_zero_still_has_a_gradient(tier):
    tensors, choice = draw()
    tensors[1][3] = 0
    assert_same(ours(choice), formula(choice, "situ"), tensors, 1e-12, tier)
    assert outputs_and_gradients(ours(choice), tensors, tier)[2][3].abs().min() > 0


@TIERS
def test_gradcheck(tier):
    tensors, choice = draw(tokens=5, experts=3, latent=3, inner=4)
    leaves = tuple(x.requires_grad_() for x in tensors)
    with use_tier(tier):
        assert torch.autograd.gradcheck(ours(choice), leaves, fast_mode=True)


@TIERS
def test_combine_is_fp32_in_bf16(tier):
    """M7: one expert's large output must not swallow another's: products and sum fp32, one cast."""
    tensors, choice = draw(tokens=60, experts=20, k=16, dtype=torch.bfloat16)
    tensors[1] = tensors[1].float()
    with use_tier(tier):
        y = ours(choice)(*tensors)
    assert y.dtype is torch.bfloat16
    exact = formula(choice, "situ")(*(x.double() for x in tensors))
    assert relative_error(y, exact) < 5e-3


@TIERS
def test_nan_stays_in_its_token(tier):
    tensors, choice = draw()
    tensors[0][4] = torch.nan
    with use_tier(tier):
        y = ours(choice)(*tensors)
    assert y[4].isnan().all() and int(y.isnan().any(1).sum()) == 1


def test_wrong_shapes():
    (z, weights, w1, w2, w3), choice = draw()
    for bad in (
        (z, weights, choice, w1, w2.mT, w3),
        (z, weights, choice, w1, w2, w3[:3]),
        (z, weights, choice, w1, w2, w1.mT),
    ):
        with pytest.raises(ShapeError, match="expert weights must be"):
            routed_experts(*bad)
    for bad in (
        (z[:, :2], weights, choice),
        (z[0], weights, choice),
        (z, weights[:, :1], choice),
        (z[:3], weights, choice),
    ):
        with pytest.raises(ShapeError, match="z must be"):
            routed_experts(*bad, w1, w2, w3)
    for outside in (-1, 6):
        wrong = choice.clone()
        wrong[2, 1] = outside
        with pytest.raises(ShapeError, match="6 experts"):
            routed_experts(z, weights, wrong, w1, w2, w3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_at_least_fp32(dtype):
    x, w = torch.randn(9, 33).to(dtype), torch.randn(5, 33)
    logits = router_logits(x, w)
    wide = torch.promote_types(dtype, torch.float32)
    assert logits.dtype is wide
    assert relative_error(logits, x.double() @ w.double().t()) <= (1e-14 if wide is torch.float64 else 1e-6)


def test_logits_refuse_other_widths():
    with pytest.raises(ShapeError, match="router_logits"):
        router_logits(torch.randn(4, 8), torch.randn(3, 9))
