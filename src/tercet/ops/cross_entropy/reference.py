"""Cross-entropy with the logits written out."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.linear_cross_entropy`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(compute) @ weight.to(compute).t()
    kept = targets >= 0
    picked = logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    loss = torch.where(kept, logits.logsumexp(1) - picked, 0.0)
    return (loss * loss_weight.to(compute)).sum(), loss.detach()


def token_logprobs(x: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.token_logprobs`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    log_p = (x.to(compute) @ weight.to(compute).t() / temperature).log_softmax(1)
    kept = targets >= 0
    picked = log_p.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(kept, picked, 0.0), torch.where(kept, -(log_p.exp() * log_p).sum(1), 0.0)
