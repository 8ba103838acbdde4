"""Fused linear cross-entropy against logits written out (kernels.md §12)."""

import pytest
import torch

from numerics import assert_same, relative_error
from tercet.errors import ShapeError
from tercet.ops import IGNORE, linear_cross_entropy, use_tier
from tercet.ops.cross_entropy import torch_ as chunks

TIERS = pytest.mark.parametrize("tier", ["reference", "torch"])


def draw(tokens=37, dim=6, vocab=11, dtype=torch.float64):
    x, weight = (torch.randn(s, dtype=torch.float64).to(dtype) for s in ((tokens, dim), (vocab, dim)))
    targets = torch.randint(vocab, (tokens,))
    targets[::5] = IGNORE
    loss_weight = torch.rand(tokens)
    loss_weight[::7] = 0
    return x, weight, targets, loss_weight


def formula(targets, loss_weight):
    def run(x, weight):
        total = x.new_zeros(())
        for t, target in enumerate(targets.tolist()):
            if target != IGNORE:
                e = (weight @ x[t]).exp()
                total = total - loss_weight[t].double() * (e[target] / e.sum()).log()
        return total

    return run


@TIERS
@pytest.mark.parametrize("chunk", [1, 40, 11 * 8, 1 << 20])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_formula(tier, chunk, dtype, bound, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_VALUES", chunk)
    x, weight, targets, loss_weight = draw(dtype=dtype)

    def ours(x, weight):
        return linear_cross_entropy(x, weight, targets, loss_weight)[0]

    assert_same(ours, formula(targets, loss_weight), (x, weight), bound, tier)


@TIERS
def test_per_token_losses(tier):
    x, weight, targets, loss_weight = draw()
    with use_tier(tier):
        total, losses = linear_cross_entropy(x, weight, targets, loss_weight)
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), targets, ignore_index=IGNORE, reduction="none")
    assert relative_error(losses, expected) < 1e-13 and (losses[targets == IGNORE] == 0).all()
    assert not losses.requires_grad
    assert relative_error(total, (losses * loss_weight).sum()) < 1e-13


@TIERS
def test_upstream_gradient_and_single_inputs(tier):
    """Works with only one of the two needing a gradient, and scales with what comes from above."""
    x, weight, targets, loss_weight = draw()
    for needs in ((True, False), (False, True)):
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, weight), needs)]
        with use_tier(tier):
            total, _ = linear_cross_entropy(*leaves, targets, loss_weight)
        (2.5 * total).backward()
        alone = [t.clone().requires_grad_() for t in (x, weight)]
        formula(targets, loss_weight)(*alone).backward()
        for leaf, other, need in zip(leaves, alone, needs):
            assert (leaf.grad is not None) == need
            if need:
                assert relative_error(leaf.grad, 2.5 * other.grad) < 1e-12


@TIERS
def test_no_gradient_mode(tier):
    x, weight, targets, loss_weight = draw()
    with torch.no_grad(), use_tier(tier):
        total, _ = linear_cross_entropy(x, weight, targets, loss_weight)
    assert relative_error(total, formula(targets, loss_weight)(x, weight)) < 1e-12


@TIERS
def test_all_ignored_and_empty(tier):
    x, weight, targets, loss_weight = draw()
    x.requires_grad_()
    with use_tier(tier):
        total, losses = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE), loss_weight)
        empty, _ = linear_cross_entropy(x[:0], weight, targets[:0], loss_weight[:0])
    total.backward()
    assert total == 0 and (losses == 0).all() and (x.grad == 0).all() and empty == 0


@TIERS
def test_large_logits(tier):
    x, weight, targets, loss_weight = draw(dtype=torch.float32)
    with use_tier(tier):
        total, _ = linear_cross_entropy(1e4 * x, weight, targets, loss_weight)
    assert total.isfinite() and total > 0


def test_bf16_gradients():
    x, weight, targets, loss_weight = draw(200, 64, 300, torch.bfloat16)
    x *= 0.3

    def ours(x, weight):
        return linear_cross_entropy(x, weight, targets, loss_weight)[0]

    def exact(x, weight):
        losses = torch.nn.functional.cross_entropy(x @ weight.t(), targets, ignore_index=IGNORE, reduction="none")
        return (losses * loss_weight).sum()

    assert_same(ours, exact, (x, weight), 1e-2, "torch")


@pytest.mark.parametrize("change", [(0, (37, 5)), (1, (11, 7)), (2, (36,)), (3, (36,)), (0, (37,)), (2, (37, 1))])
def test_wrong_shapes(change):
    arguments = list(draw())
    which, shape = change
    arguments[which] = torch.zeros(shape, dtype=arguments[which].dtype)
    with pytest.raises(ShapeError, match=r"\[T\]"):
        linear_cross_entropy(*arguments)


@pytest.mark.parametrize("target", [11, 10_000, -101])
def test_targets_outside_the_vocabulary(target):
    x, weight, targets, loss_weight = draw()
    targets[3] = target
    with pytest.raises(ShapeError, match="outside the vocabulary of 11"):
        linear_cross_entropy(x, weight, targets, loss_weight)
