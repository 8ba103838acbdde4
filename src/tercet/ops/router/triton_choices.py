"""Loads of experts on the GPU: every program counts its choices alone, then adds its counts once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import blocks, dense, operator, power_of_two

_BLOCK = 4096
"""Choices a program counts."""
MAX_EXPERTS = 4096


@triton.jit
def _choices_kernel(
    loads,
    experts,
    valid,
    choices,
    K: tl.constexpr,
    E: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = at < choices
    if MASKED:
        counted = counted & (tl.load(valid + at // K, mask=counted, other=0) != 0)
    chosen = tl.load(experts + at, mask=counted, other=0).to(tl.int32)
    counts = tl.histogram(chosen, EXPERTS, mask=counted)
    expert = tl.arange(0, EXPERTS)
    tl.atomic_add(loads + expert, counts.to(tl.int64), mask=(expert < E) & (counts > 0), sem="relaxed")


@operator(
    "tercet::count_choices",
    schema="(Tensor(a!) loads, Tensor experts, Tensor? valid) -> ()",
    mutates_args=("loads",),
)
def _count(loads: Tensor, experts: Tensor, valid: Tensor | None) -> None:
    if experts.numel():
        _choices_kernel[(blocks(experts.numel(), _BLOCK),)](
            loads,
            dense(experts),
            experts if valid is None else dense(valid),
            experts.numel(),
            K=experts.shape[1],
            E=len(loads),
            MASKED=valid is not None,
            BLOCK=_BLOCK,
            EXPERTS=power_of_two(len(loads)),
        )


@_count.register_fake
def _(*_: Any) -> None:
    return None


def declines(loads_N: Tensor, experts_MK: Tensor, *, valid_M: Tensor | None) -> str | None:
    """Return why the kernel cannot take these inputs, or None."""
    if len(loads_N) > MAX_EXPERTS:
        return f"{len(loads_N)} experts, more than {MAX_EXPERTS}"
    if loads_N.dtype != torch.int64 or not loads_N.is_contiguous():
        return "the kernel adds to dense int64 counts"
    return None


def call(loads_N: Tensor, experts_MK: Tensor, *, valid_M: Tensor | None) -> None:
    """See `tercet.ops.router.counts.count_choices`."""
    _count(loads_N, experts_MK, valid_M)
