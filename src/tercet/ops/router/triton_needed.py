"""Histogram of needed biases on the GPU: one pass over the scores, integer atomics, so the same counts in any order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import blocks, dense, operator, power_of_two

_TILE = 2048
"""Scores a program holds."""


@triton.jit
def _needed_kernel(
    histogram,
    scores,
    cutoff,
    lowest,
    width,
    valid,
    tokens,
    bins,
    E: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    counted = row < tokens
    needed = tl.load(cutoff + row, mask=counted, other=0.0)[:, None]
    if MASKED:
        counted = counted & (tl.load(valid + row, mask=counted, other=0) != 0)
    mask = counted[:, None] & (expert < E)[None, :]
    needed = needed - tl.load(scores + row[:, None] * E + expert[None, :], mask=mask, other=0.0)
    place = tl.div_rn(needed - tl.load(lowest), tl.load(width) + tl.zeros_like(needed))
    place = tl.where(place == place, place, 0.0)
    slot = tl.minimum(tl.maximum(place, 0.0), (bins - 1).to(tl.float32)).to(tl.int32)
    tl.atomic_add(histogram + expert[None, :] * bins + slot, 1, mask=mask, sem="relaxed")


@operator(
    "tercet::count_needed",
    schema="(Tensor(a!) histogram, Tensor scores, Tensor cutoff, Tensor lowest, Tensor width, Tensor? valid) -> ()",
    mutates_args=("histogram",),
)
def _count(
    histogram: Tensor, scores: Tensor, cutoff: Tensor, lowest: Tensor, width: Tensor, valid: Tensor | None
) -> None:
    tokens, experts = scores.shape
    padded = power_of_two(experts)
    rows = max(1, _TILE // padded)
    if tokens:
        _needed_kernel[(blocks(tokens, rows),)](
            histogram,
            dense(scores),
            dense(cutoff),
            lowest,
            width,
            scores if valid is None else dense(valid),
            tokens,
            histogram.shape[1],
            E=experts,
            MASKED=valid is not None,
            ROWS=rows,
            EXPERTS=padded,
        )


@_count.register_fake
def _(*_: Any) -> None:
    return None


def declines(
    histogram_NB: Tensor,
    scores_MN: Tensor,
    cutoff_M: Tensor,
    lowest: Tensor,
    width: Tensor,
    *,
    valid_M: Tensor | None,
) -> str | None:
    """Return why the kernel cannot take these inputs, or None."""
    if any(x.dtype != torch.float32 for x in (scores_MN, cutoff_M, lowest, width)):
        return "the kernel counts fp32 scores"
    if histogram_NB.dtype != torch.int32 or not histogram_NB.is_contiguous():
        return "the kernel adds to dense int32 counts"
    return None


def call(
    histogram_NB: Tensor,
    scores_MN: Tensor,
    cutoff_M: Tensor,
    lowest: Tensor,
    width: Tensor,
    *,
    valid_M: Tensor | None,
) -> None:
    """See `tercet.ops.router.counts.count_needed`."""
    _count(histogram_NB, scores_MN, cutoff_M, lowest, width, valid_M)
