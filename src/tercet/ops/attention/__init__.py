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

_attention = Operator("mla_attention", reference.mla_attention, torch_.mla_attention, "tercet.ops.attention.triton_")


def mla_attention(
    q: Float[Tensor, "batch tokens heads query"],
    kv: Float[Tensor, "batch tokens heads content_value"],
    k_pe: Float[Tensor, "batch tokens shared"],
    *,
    scale: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[Float[Tensor, "batch tokens heads value"], Float[Tensor, "heads tokens"] | None]:
    """Return causal attention within each sequence, at least fp32, and what QK-Clip wants to know about it.

    With ``k = [k_content | k_pe]``: ``o = softmax(scale · q kᵀ) v`` over earlier and equal positions. The softmax is
    fp32, and so is the output, because a rounded output biases the online softmax's error (report §2.1.2).

    Args:
        q: queries, per head ``[content | shared]``.
        kv: per head ``[k_content | v]``, as the projection of the latent gives them.
        k_pe: the part of the keys that all heads share, not rotated; may be 0 wide.
        scale: factor on the logits, positive.
        cu_seqlens: bounds of packed sequences.

    Returns:
        o: at least fp32.
        row_max: largest logit of every query, ``heads`` by flat ``batch · tokens``; None on the torch tier, whose
            fused attention keeps it to itself (`attention_logit_max` then finds the maximum from q and k).

    Raises:
        ShapeError: shapes disagree.
    """
    fits = q.ndim == 4 and kv.ndim == 4 and k_pe.ndim == 3
    fits = fits and kv.shape[:3] == q.shape[:3] and k_pe.shape[:2] == q.shape[:2]
    if not fits or not k_pe.shape[2] < q.shape[3] < kv.shape[3] + k_pe.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, kv, k_pe))
        raise ShapeError(f"attention takes q [B, T, H, D + R], kv [B, T, H, D + V] and k_pe [B, T, R], got {shapes}")
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    return _attention(q, kv, k_pe, scale=scale, lengths=lengths)


@torch.no_grad()
def attention_logit_max(
    q: Float[Tensor, "batch tokens heads query"],
    k_content: Float[Tensor, "batch tokens heads content"],
    k_pe: Float[Tensor, "batch tokens shared"],
    *,
    scale: float,
    threshold: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> Float[Tensor, "heads"]:
    """Return each head's largest causal logit, exactly where it exceeds *threshold* (for QK-Clip, training.md §1.5).

    Where the Cauchy–Schwarz bound ``scale · max‖q‖ · max‖k‖`` shows that a head cannot exceed *threshold*, that bound
    is returned instead — an upper bound that costs one pass; only heads that might exceed it are computed pair by pair.
    Which ones those are is read from the device, so a GPU's queue drains; `mla_attention`'s ``row_max`` costs neither.
    """
    if q.shape[:2].numel() == 0:
        return q.new_full((q.shape[2],), -math.inf, dtype=torch.float32)
    content_TH = _norm(k_content)
    shared_T1 = _norm(k_pe)[:, None]
    result = scale * _norm(q).amax(0) * torch.hypot(content_TH, shared_T1).amax(0)
    suspects = (result > threshold).nonzero().flatten()
    if suspects.numel():
        lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
        q_THD, k_THD = (x.flatten(0, 1)[:, suspects].float() for x in (q, reference.keys(k_content, k_pe)))
        result[suspects] = reference.logit_max(q_THD, k_THD, scale, lengths)
    return result


def _norm(x: Tensor) -> Tensor:
    """Length of every row, in fp32 at least; batch and tokens become one dim."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).flatten(0, 1).float()
