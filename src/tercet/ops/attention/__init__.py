"""Causal softmax attention over packed sequences, for MLA's training and prefill path (report §2.1.2)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.attention import reference, torch_
from tercet.ops.packing import sequence_lengths
from tercet.ops.registry import Operator

_attention = Operator("causal_attention", reference.causal_attention, torch_.causal_attention)


def causal_attention(
    q: Float[Tensor, "batch tokens heads qk"],
    k: Float[Tensor, "batch tokens heads qk"],
    v: Float[Tensor, "batch tokens heads value"],
    *,
    scale: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> Float[Tensor, "batch tokens heads value"]:
    """Return ``softmax(scale · q kᵀ) v`` over earlier and equal positions of the same sequence; softmax in fp32.

    Raises:
        ShapeError: shapes disagree.
    """
    if q.ndim != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ShapeError(f"attention takes q, k [B, T, H, D] and v [B, T, H, V], got {shapes}")
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    return _attention(q, k, v, scale=scale, lengths=lengths)


@torch.no_grad()
def attention_logit_max(
    q: Float[Tensor, "batch tokens heads qk"],
    k: Float[Tensor, "batch tokens heads qk"],
    *,
    scale: float,
    threshold: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> Float[Tensor, "heads"]:
    """Return each head's largest causal logit, exactly where it exceeds *threshold* (for QK-Clip, training.md §1.5).

    Where the Cauchy–Schwarz bound ``scale · max‖q‖ · max‖k‖`` shows that a head cannot exceed *threshold*, that bound
    is returned instead — an upper bound that costs one pass; only heads that might exceed it are computed pair by pair.
    """
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    q_THD, k_THD = q.flatten(0, 1).float(), k.flatten(0, 1).float()
    if q_THD.shape[0] == 0:
        return q_THD.new_full((q.shape[2],), -math.inf)
    result = scale * q_THD.norm(dim=-1).amax(0) * k_THD.norm(dim=-1).amax(0)
    suspects = (result > threshold).nonzero().flatten()
    if suspects.numel():
        result[suspects] = reference.logit_max(q_THD[:, suspects], k_THD[:, suspects], scale, lengths)
    return result
