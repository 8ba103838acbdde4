"""Causal attention, one sequence at a time, with the whole logit matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, lengths: tuple[int, ...]) -> Tensor:
    """See `tercet.ops.attention.causal_attention`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    split = [x.flatten(0, 1).to(compute).split(list(lengths)) for x in (q, k, v)]
    outputs = []
    for q_THD, k_THD, v_THV in zip(*split):
        logits = scale * torch.einsum("qhd,khd->hqk", q_THD, k_THD)
        future = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        outputs.append(torch.einsum("hqk,khv->qhv", logits.masked_fill(future, -torch.inf).softmax(-1), v_THV))
    return torch.cat(outputs).view(*v.shape).to(v.dtype)


def logit_max(q_THD: Tensor, k_THD: Tensor, scale: float, lengths: tuple[int, ...], rows: int = 512) -> Tensor:
    """Largest causal logit of each head, in blocks of *rows* queries."""
    best = q_THD.new_full((q_THD.shape[1],), -torch.inf)
    start = 0
    for length in lengths:
        for first in range(start, start + length, rows):
            last = min(first + rows, start + length)
            logits = scale * torch.einsum("qhd,khd->hqk", q_THD[first:last], k_THD[start:last])
            future = torch.ones(last - first, last - start, dtype=torch.bool, device=q_THD.device)
            logits.masked_fill_(future.triu(first - start + 1), -torch.inf)
            best = torch.maximum(best, logits.amax((1, 2)))
        start += length
    return best
