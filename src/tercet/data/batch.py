"""The one thing every trainer eats."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed sequences; packed documents never see each other.

    Row t of `tokens` predicts `targets[t]`; the last row of a sequence may still have a target (the next token of its
    document), so packing loses no prediction.
    """

    tokens: Int[Tensor, "tokens"]
    targets: Int[Tensor, "tokens"]
    """Next token of every row; `tercet.ops.IGNORE` where there is none."""
    loss_weight: Float[Tensor, "tokens"]
    """fp32 weight of every row; 0 where there is no target."""
    cu_seqlens: Int[Tensor, "bounds"]
    """int32 bounds of the packed sequences."""
    images: None = None
    """Reserved for the vision tower."""
