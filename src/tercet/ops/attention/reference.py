"""Causal attention, one sequence at a time, with the whole logit matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def keys(k_content: Tensor, k_pe: Tensor) -> Tensor:
    """Return whole keys ``[B, T, H, D + R]``: every head's own part, then the shared one."""
    return torch.cat([k_content, k_pe[:, :, None].expand(-1, -1, k_content.shape[2], -1)], dim=-1)


def split(q: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values for queries as wide as *q*."""
    content = q.shape[-1] - k_pe.shape[-1]
    k_content, v = kv.split([content, kv.shape[-1] - content], dim=-1)
    return keys(k_content, k_pe), v


def mla_attention(
    q: Tensor, kv: Tensor, k_pe: Tensor, *, scale: float, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.attention.mla_attention`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    k, v = split(q, kv, k_pe)
    sequences = [x.flatten(0, 1).to(compute).split(list(lengths)) for x in (q, k, v)]
    outputs, peaks = [], []
    for q_THD, k_THD, v_THV in zip(*sequences):
        logits = scale * torch.einsum("qhd,khd->hqk", q_THD, k_THD)
        future = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
        outputs.append(torch.einsum("hqk,khv->qhv", logits.softmax(-1), v_THV))
        peaks.append(logits.detach().amax(-1) if logits.numel() else logits.new_empty(logits.shape[:2]))
    return torch.cat(outputs).view(v.shape), torch.cat(peaks, dim=1)


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
