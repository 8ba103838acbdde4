"""Quantile Balancing as pure functions: the exact update, and the histogram that estimates it (report eq. 14, App. D).

Token i admits expert j when ``s_ij + b_j`` exceeds the cutoff α_i, its (k+1)-th largest biased score. So
``r_ij = α_i − s_ij`` is the bias that expert j would need at token i, and the k/n-quantile of column j is the bias with
which the expert would get exactly its share ``q = m·k/n`` of m tokens.

Shapes: M tokens, N experts, B bins, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


def needed_bias(
    scores: Float[Tensor, "tokens experts"], cutoff: Float[Tensor, "tokens"]
) -> Float[Tensor, "tokens experts"]:
    """Return ``r = α − s`` from raw scores and the biased (k+1)-th value."""
    return cutoff[:, None] - scores


def exact_quantile(needed_MN: Float[Tensor, "tokens experts"], top_k: int) -> Float[Tensor, "experts"]:
    """Return each column's (⌊q⌋+1)-th smallest value, the exact minimiser of the dual (report App. C); not centred.

    Args:
        needed_MN: `needed_bias` of at least one token.
        top_k: experts a token takes, less than the number of experts.
    """
    tokens, experts = needed_MN.shape
    return needed_MN.kthvalue(tokens * top_k // experts + 1, dim=0).values


class Grid(NamedTuple):
    """Equal bins over every value that a needed bias can take while the scores are sigmoid outputs."""

    lowest: Float[Tensor, ""]
    width: Float[Tensor, ""]

    @classmethod
    def around(cls, bias_N: Float[Tensor, "experts"], bins: int) -> Grid:
        """Span ``[min(b) − 1, max(b) + 1]``: α is some ``s + b``, and s lies in (0, 1)."""
        lowest, highest = bias_N.min() - 1.0, bias_N.max() + 1.0
        return cls(lowest, (highest - lowest) / bins)


def count_needed(
    histogram_NB: Int[Tensor, "experts bins"],
    needed_MN: Float[Tensor, "tokens experts"],
    grid: Grid,
    valid_M: Tensor | None = None,
) -> None:
    """Add every valid token's needed biases to the counts, in place.

    Integer counts make the result independent of how tokens are split over micro-batches and ranks. A value that is
    not a number lands in bin 0: the step that produced it is skipped anyway.
    """
    experts, bins = histogram_NB.shape
    slots_MN = ((needed_MN - grid.lowest) / grid.width).to(torch.int64).clamp_(0, bins - 1)
    slots_MN += torch.arange(experts, device=slots_MN.device) * bins
    if valid_M is None:
        ones = torch.ones((), dtype=torch.int32, device=slots_MN.device).expand(slots_MN.numel())
    else:
        ones = valid_M.to(torch.int32)[:, None].expand(slots_MN.shape).reshape(-1)
    histogram_NB.view(-1).scatter_add_(0, slots_MN.view(-1), ones)


class Estimate(NamedTuple):
    """What a histogram says."""

    quantile: Float[Tensor, "experts"]
    """fp64, not centred; within one bin of the exact value."""
    occupancy: Float[Tensor, "experts"]
    """Tokens inside the chosen bin over the target load: the load error is at most this (training.md §2.7)."""


def solve_histogram(histogram_NB: Int[Tensor, "experts bins"], grid: Grid, top_k: int) -> Estimate | None:
    """Return the k/n-quantile of every expert's counts, linear inside its bin; None when nothing was counted.

    The number of tokens is taken from the counts themselves, so padding and ragged batches are right by construction.
    """
    experts = histogram_NB.shape[0]
    cumulative_NB = histogram_NB.cumsum(1, dtype=torch.int64)
    totals_N = cumulative_NB[:, -1]
    tokens = int(totals_N[0])
    assert bool((totals_N == tokens).all()), "every expert must have counted the same tokens"
    if tokens == 0:
        return None
    target = tokens * top_k / experts
    bin_N = (cumulative_NB < -(-tokens * top_k // experts)).sum(1)
    inside_N = histogram_NB.gather(1, bin_N[:, None])[:, 0].double()
    before_N = cumulative_NB.gather(1, bin_N[:, None])[:, 0] - inside_N
    fraction_N = ((target - before_N) / inside_N).clamp(0.0, 1.0)
    quantile_N = grid.lowest.double() + (bin_N + fraction_N) * grid.width.double()
    return Estimate(quantile_N, inside_N / target)
