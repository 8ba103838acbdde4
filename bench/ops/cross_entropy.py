"""Linear cross-entropy, 8192 rows of 7168 against 163,840 words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import Case, compare

from tercet.ops import linear_cross_entropy, token_logprobs
from tercet.ops.cross_entropy import reference


def cases(device: torch.device) -> list[Case]:
    """Return the training loss, and per-token log-probabilities forward only."""
    tokens, dim, vocab = (8192, 7168, 163_840) if device.type == "cuda" else (64, 32, 100)
    x = torch.randn(tokens, dim, device=device).bfloat16()
    weight = (0.02 * torch.randn(vocab, dim, device=device)).bfloat16()
    targets = torch.randint(vocab, (tokens,), device=device)
    share = torch.full((tokens,), 1 / tokens, device=device)

    def ours(x, weight):
        return linear_cross_entropy(x, weight, targets, share)[0]

    def materialised(x, weight):
        return F.cross_entropy((x @ weight.t()).float(), targets)

    def both(function):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        return lambda: torch.autograd.grad(function(*leaves), leaves)

    def check():
        few, words = x[:300, :512], (weight[:9000, :512] * 4)
        kept = targets[:300] % len(words)
        kept[::9] = -100

        def small(tier):
            return lambda x, weight: tier(x, weight, kept, share[:300])[0]

        limits = {"out": 1e-5, "gradients": 5e-3}
        return compare(
            small(linear_cross_entropy), small(reference.linear_cross_entropy), {"x": few, "weight": words}, limits
        )

    flops = 2 * tokens * dim * vocab
    return [
        Case(
            "linear CE forward + backward", both(ours), {"logits materialised": both(materialised)}, check, 0, 3 * flops
        ),
        Case(
            "token log-probabilities and entropy",
            lambda: token_logprobs(x, weight, targets),
            {"logits materialised": lambda: (x @ weight.t()).float().log_softmax(1).gather(1, targets[:, None])},
            flops=flops,
        ),
    ]
