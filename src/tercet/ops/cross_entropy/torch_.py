"""Cross-entropy in chunks of tokens; gradients are formed in the forward pass while a chunk's logits exist.

Extra memory is one chunk of fp32 logits and the gradient of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tercet.ops.cross_entropy import reference

CHUNK_VALUES = 1 << 20
"""Logits held at once on a CPU, where a chunk should stay in cache."""
CHUNK_VALUES_GPU = 1 << 28
"""Logits held at once on a GPU, where a chunk should fill the device."""


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += leftᵀ right`` in total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(left.t() @ right)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(x.dtype, torch.float32)
        need_x, need_w = ctx.needs_input_grad[:2]
        d_x = torch.empty_like(x) if need_x else None
        d_weight = torch.zeros_like(weight, dtype=compute) if need_w else None
        losses = torch.empty(x.shape[0], dtype=compute, device=x.device)
        kept = targets >= 0
        safe = targets.clamp(min=0)
        factor = loss_weight.to(compute) * kept
        budget = CHUNK_VALUES if x.device.type == "cpu" else CHUNK_VALUES_GPU
        chunk = max(1, budget // weight.shape[0])
        for start in range(0, x.shape[0], chunk):
            here = slice(start, start + chunk)
            log_p = torch.log_softmax((x[here] @ weight.t()).to(compute), dim=1)
            picked = safe[here, None]
            losses[here] = torch.where(kept[here], -log_p.gather(1, picked).squeeze(1), 0.0)
            if need_x or need_w:
                d_logits = log_p.exp_()
                d_logits.scatter_add_(1, picked, d_logits.new_full(picked.shape, -1.0))
                d_logits = d_logits.mul_(factor[here, None]).to(x.dtype)
                if d_x is not None:
                    torch.mm(d_logits, weight, out=d_x[here])
                if d_weight is not None:
                    _add_product(d_weight, d_logits, x[here])
        ctx.save_for_backward(d_x, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * factor).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_x, d_weight = ctx.saved_tensors
        d_x = None if d_x is None else d_x * grads[0].to(d_x.dtype)
        d_weight = None if d_weight is None else (d_weight * grads[0]).to(ctx.weight_dtype)
        return d_x, d_weight, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.linear_cross_entropy`."""
    return _LinearCrossEntropy.apply(x, weight, targets, loss_weight)


def token_logprobs(x: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.token_logprobs`; chunks are computed again for the gradient."""
    budget = CHUNK_VALUES if x.device.type == "cpu" else CHUNK_VALUES_GPU
    size = max(1, budget // weight.shape[0])
    pieces = [
        checkpoint(reference.token_logprobs, rows, weight, chosen, temperature=temperature, use_reentrant=False)
        for rows, chosen in zip(x.split(size), targets.split(size))
    ]
    logprobs, entropies = zip(*pieces)
    return torch.cat(logprobs), torch.cat(entropies)
