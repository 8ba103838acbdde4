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


class Estimate(NamedTuple):
    """What a histogram says; all on its device, so that many can be read at once."""

    tokens: Int[Tensor, "experts"]
    """How many every expert counted: the same number, unless the counting is wrong. 0 leaves the rest undefined."""
    quantile: Float[Tensor, "experts"]
    """fp64, not centred; within one bin of the exact value."""
    occupancy: Float[Tensor, "experts"]
    """Tokens inside the chosen bin over the target load: the load error is at most this (training.md §2.7)."""


def solve_histogram(histogram_NB: Int[Tensor, "experts bins"], grid: Grid, top_k: int) -> Estimate:
    """Return the k/n-quantile of every expert's counts, linear inside its bin.

    The number of tokens is taken from the counts themselves, so padding and ragged batches are right by construction.
    """
    experts = histogram_NB.shape[0]
    cumulative_NB = histogram_NB.cumsum(1, dtype=torch.int64)
    tokens_N = cumulative_NB[:, -1]
    share_N = tokens_N * top_k
    bin_N = (cumulative_NB < -(-share_N // experts)[:, None]).sum(1)
    inside_N = histogram_NB.gather(1, bin_N[:, None])[:, 0].double()
    before_N = cumulative_NB.gather(1, bin_N[:, None])[:, 0] - inside_N
    target_N = share_N.double() / experts
    fraction_N = ((target_N - before_N) / inside_N).clamp(0.0, 1.0)
    quantile_N = grid.lowest.double() + (bin_N + fraction_N) * grid.width.double()
    return Estimate(tokens_N, quantile_N, inside_N / target_N)
