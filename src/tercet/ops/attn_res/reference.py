"""Attention Residuals as the formula, and its two-phase form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


def _scores(v: Tensor, folded: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(v.square().mean(-1) + eps) * (v @ folded)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def weights(sources: Sequence[Tensor], norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """Softmax weights ``[n, …]`` of the sources."""
    folded = _wide(norm_weight) * _wide(query)
    return torch.stack([_scores(_wide(v), folded, eps) for v in sources]).softmax(0)


def attn_res(*sources: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.attn_res.attn_res`."""
    p = weights(sources, norm_weight, query, eps)
    return (p[..., None] * torch.stack([_wide(v) for v in sources])).sum(0).to(sources[0].dtype)


class Partial(NamedTuple):
    """Running softmax over the bank for J queries: maximum, sum of exponentials, weighted sum of values."""

    maximum: Float[Tensor, queries * lead]
    total: Float[Tensor, queries * lead]
    value: Float[Tensor, "queries *lead dim"]


def bank(*sources: Tensor, folded_queries: Tensor, eps: float) -> Partial:
    """See `tercet.ops.attn_res.attn_res_bank`."""
    wide = [_wide(v) for v in sources]
    scores = torch.stack([_many(v, folded_queries, eps) for v in wide])
    maximum = scores.amax(0)
    p = (scores - maximum).exp()
    value = sum(p[i][..., None] * v for i, v in enumerate(wide))
    assert isinstance(value, Tensor)
    return Partial(maximum, p.sum(0), value)


def _many(v: Tensor, folded_queries: Tensor, eps: float) -> Tensor:
    r = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return ((v * r) @ folded_queries.t()).movedim(-1, 0)


def merge(source: Tensor, *, partial: Partial, j: int, folded_query: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.attn_res.attn_res_merge`."""
    wide = _wide(source)
    score = _scores(wide, folded_query, eps)
    maximum = torch.maximum(partial.maximum[j], score)
    old, new = (partial.maximum[j] - maximum).exp(), (score - maximum).exp()
    mixed = old[..., None] * partial.value[j] + new[..., None] * wide
    return (mixed / (old * partial.total[j] + new)[..., None]).to(source.dtype)
