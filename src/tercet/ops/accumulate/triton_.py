"""Adding bf16 to fp32 at the speed of memory: PyTorch's kernel for operands of two types reads one value at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import float_refusal, operator

_FEWEST = 1 << 20
"""Below, launching costs more than adding, and PyTorch launches faster."""
_BLOCK = 4096


@triton.jit
def _add_kernel(total, part, size, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(total + at, mask=inside) + scale * tl.load(part + at, mask=inside).to(tl.float32)
    tl.store(total + at, value, mask=inside)


@operator("tercet::accumulate", schema="(Tensor(a!) total, Tensor part, float scale) -> ()", mutates_args=("total",))
def _accumulate(total: Tensor, part: Tensor, scale: float) -> None:
    grid = (triton.cdiv(total.numel(), _BLOCK),)
    _add_kernel[grid](total, part, total.numel(), scale, BLOCK=_BLOCK, num_warps=8)


@_accumulate.register_fake
def _(total: Tensor, part: Tensor, scale: float) -> None:
    return None


def declines(total: Tensor, part: Tensor, *, scale: float) -> str | None:
    """Return why the kernel cannot take these inputs, or None."""
    if total.dtype != torch.float32:
        return f"the kernel sums in fp32, not {str(total.dtype).removeprefix('torch.')}"
    return float_refusal(part)


def call(total: Tensor, part: Tensor, *, scale: float) -> None:
    """See `tercet.ops.accumulate.accumulate`."""
    if total.numel() >= _FEWEST and part.dtype != total.dtype and total.is_contiguous() and part.is_contiguous():
        _accumulate(total, part, scale)
    else:
        total.add_(part, alpha=scale)
