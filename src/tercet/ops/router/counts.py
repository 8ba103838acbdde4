"""What balancing asks of a routing, counted in place: tokens an expert got, and the biases it would have needed.

Counts are integers, so any split over micro-batches and ranks gives the same sums. Nothing here has a gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.registry import Operator


def _choices_reference(loads_N: Tensor, experts_MK: Tensor, *, valid_M: Tensor | None) -> None:
    ones = torch.ones_like(experts_MK) if valid_M is None else valid_M.long()[:, None].expand_as(experts_MK)
    loads_N.scatter_add_(0, experts_MK.reshape(-1), ones.reshape(-1))


def _needed_reference(
    histogram_NB: Tensor,
    scores_MN: Tensor,
    cutoff_M: Tensor,
    lowest: Tensor,
    width: Tensor,
    *,
    valid_M: Tensor | None,
) -> None:
    experts, bins = histogram_NB.shape
    needed_MN = cutoff_M[:, None] - scores_MN
    slots_MN = ((needed_MN - lowest) / width).nan_to_num(0.0).clamp_(0, bins - 1).to(torch.int64)
    slots_MN += torch.arange(experts, device=slots_MN.device) * bins
    if valid_M is None:
        ones = torch.ones((), dtype=torch.int32, device=slots_MN.device).expand(slots_MN.numel())
    else:
        ones = valid_M.to(torch.int32)[:, None].expand(slots_MN.shape).reshape(-1)
    histogram_NB.view(-1).scatter_add_(0, slots_MN.view(-1), ones)


_choices = Operator("count_choices", _choices_reference, triton_module="tercet.ops.router.triton_choices")
_needed = Operator("count_needed", _needed_reference, triton_module="tercet.ops.router.triton_needed")


def count_choices(
    loads_N: Int[Tensor, "experts"],
    experts_MK: Int[Tensor, "tokens chosen"],
    valid_M: Bool[Tensor, "tokens"] | None = None,
) -> None:
    """Add to every expert's load the valid tokens that chose it.

    Args:
        loads_N: int64 counts, changed in place.
        experts_MK: int64 choices, each in ``[0, experts)``.
        valid_M: rows that are real tokens; None counts all.

    Raises:
        ShapeError: *valid_M* is not one flag per token.
    """
    _check_valid(valid_M, len(experts_MK))
    _choices(loads_N, experts_MK, valid_M=valid_M)


def count_needed(
    histogram_NB: Int[Tensor, "experts bins"],
    scores_MN: Float[Tensor, "tokens experts"],
    cutoff_M: Float[Tensor, "tokens"],
    *,
    lowest: Float[Tensor, ""],
    width: Float[Tensor, ""],
    valid_M: Bool[Tensor, "tokens"] | None = None,
) -> None:
    """Add ``α_i − s_ij`` of every valid token i to the histogram of expert j (report App. D).

    Args:
        histogram_NB: int32 counts of equal bins, changed in place.
        scores_MN: raw scores s.
        cutoff_M: α, the biased score that an expert must exceed.
        lowest: left edge of the first bin; what lies outside goes to the nearest bin, what is not a number to bin 0.
        width: of a bin, above 0.
        valid_M: rows that are real tokens; None counts all.

    Raises:
        ShapeError: shapes disagree.
    """
    tokens, experts = scores_MN.shape
    if histogram_NB.shape[0] != experts or cutoff_M.shape != (tokens,):
        raise ShapeError(
            f"count_needed takes a histogram [{experts}, bins] and a cutoff [{tokens}] with scores "
            f"{[tokens, experts]}, got {list(histogram_NB.shape)} and {list(cutoff_M.shape)}"
        )
    _check_valid(valid_M, tokens)
    _needed(histogram_NB, scores_MN, cutoff_M, lowest, width, valid_M=valid_M)


def _check_valid(valid_M: Tensor | None, tokens: int) -> None:
    if valid_M is not None and valid_M.shape != (tokens,):
        raise ShapeError(f"valid must be one flag for each of {tokens} tokens, got {list(valid_M.shape)}")
