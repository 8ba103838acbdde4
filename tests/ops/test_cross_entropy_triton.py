"""Linear cross-entropy kernels in Triton's interpreter (kernels.md §12)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import assert_same, relative_error
from tercet.ops import IGNORE, linear_cross_entropy, token_logprobs, use_tier
from tercet.ops.cross_entropy import reference, triton_

VOCAB = 40


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(triton_, "CHUNK_BYTES", 128 * 4 * VOCAB)
    monkeypatch.setattr(triton_, "_BLOCK", 32)


def rows(tokens=130, dtype=torch.float32):
    targets = torch.randint(VOCAB, (tokens,))
    targets[::7] = IGNORE
    return torch.randn(tokens, 8).to(dtype), torch.randn(VOCAB, 8).to(dtype), targets, torch.rand(tokens)


@pytest.mark.parametrize(
    ("tokens", "dtype", "bound"),
    [(130, torch.float32, 2e-6), (24, torch.bfloat16, 2**-7)],  # the interpreter truncates to bf16
)
def test_loss_and_gradients_over_chunks(tokens, dtype, bound):
    x, weight, targets, loss_weight = rows(tokens, dtype)

    def ours(x, weight):
        return linear_cross_entropy(x, weight, targets, loss_weight)[0]

    def formula(x, weight):
        return reference.linear_cross_entropy(x, weight, targets, loss_weight)[0]

    assert_same(ours, formula, [x, weight], bound, "triton")


def test_losses_stay_fp32_for_bf16_rows():
    x, weight, targets, loss_weight = rows(20, torch.bfloat16)
    with use_tier("triton"):
        loss, losses = linear_cross_entropy(x, weight, targets, loss_weight)
    expected = reference.linear_cross_entropy(x.double(), weight.double(), targets, loss_weight)
    assert relative_error(loss, expected[0]) < 1e-5
    assert relative_error(losses, expected[1]) < 1e-5
    assert not losses.requires_grad


def test_only_wanted_gradients_are_formed():
    x, weight, targets, loss_weight = rows(16)
    _, _, d_x, d_weight = triton_._cross_entropy(x, weight, targets, loss_weight, True, False)
    assert d_x.shape == x.shape
    assert d_weight.shape == (0, 8)


def test_second_backward_is_refused():
    """The gradients are scaled in place, once."""
    x, weight, targets, loss_weight = rows(16)
    with use_tier("triton"):
        loss, _ = linear_cross_entropy(x.requires_grad_(), weight, targets, loss_weight)
    loss.backward(torch.tensor(2.0), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs(temperature):
    x, weight, targets, _ = rows(20)

    def ours(x, weight):
        return token_logprobs(x, weight, targets, temperature=temperature)

    def formula(x, weight):
        return reference.token_logprobs(x, weight, targets, temperature=temperature)

    assert_same(ours, formula, [x, weight], 5e-6, "triton")
    assert_same(ours, formula, [x.double(), weight.double()], 1e-12, "torch")


def test_logprobs_of_a_plain_softmax():
    x, weight, targets, _ = rows(12)
    log_p = (x @ weight.t() / 0.6).log_softmax(1)
    logprob, entropy = token_logprobs(x, weight, targets, temperature=0.6)
    kept = targets != IGNORE
    assert torch.allclose(logprob[kept], log_p[kept].gather(1, targets[kept, None]).squeeze(1), atol=1e-5)
    assert torch.allclose(entropy[kept], -(log_p.exp() * log_p).sum(1)[kept], atol=1e-5)
    assert (logprob[~kept] == 0).all()
