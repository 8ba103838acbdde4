"""Adding bf16 tensors to fp32 ones in one launch, at the speed of memory.

PyTorch's kernel for operands of two types reads one value at a time, and a model has hundreds of parameters. Here a
table holds the addresses of all tensors, another says which piece of which tensor a program adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import float_refusal
from tercet.ops.tables import kept

_BLOCK = 4096
"""Values a program adds."""


@triton.jit
def _add_kernel(addresses, pieces, count, scale, PART: tl.constexpr, BLOCK: tl.constexpr):
    """``addresses [2, count]`` of totals and parts; ``pieces [programs, 3]``: tensor, block of it, its size."""
    piece = pieces + 3 * tl.program_id(0)
    tensor, block, size = tl.load(piece), tl.load(piece + 1).to(tl.int64), tl.load(piece + 2)
    at = tl.arange(0, BLOCK)
    total = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + block * BLOCK
    part = tl.load(addresses + count + tensor).to(tl.pointer_type(PART)) + block * BLOCK
    total, part = tl.multiple_of(total, 16), tl.multiple_of(part, 16)
    value = tl.load(total + at, mask=at < size) + scale * tl.load(part + at, mask=at < size).to(tl.float32)
    tl.store(total + at, value, mask=at < size)


@kept(64)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for every program its tensor, its block of it, and how many values that block has."""
    rows = []
    for n, size in enumerate(sizes):
        blocks = torch.arange(triton.cdiv(size, _BLOCK), dtype=torch.int32)
        held = (size - _BLOCK * blocks.long()).clamp(max=_BLOCK).int()
        rows.append(torch.stack([torch.full_like(blocks, n), blocks, held], dim=1))
    return torch.cat(rows).contiguous().to(device)


def _simple(total: Tensor, part: Tensor) -> bool:
    """Whether the kernel can walk both from their first value on."""
    aligned = total.data_ptr() % 16 == 0 and part.data_ptr() % 16 == 0
    return aligned and total.is_contiguous() and part.is_contiguous()


def declines(*tensors: Tensor, scale: float) -> str | None:
    """Return why the kernel cannot take these inputs, or None."""
    totals, parts = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    if any(total.dtype != torch.float32 for total in totals):
        return f"the kernel sums in fp32, not {sorted({str(total.dtype) for total in totals})}"
    return float_refusal(*parts)


def call(*tensors: Tensor, scale: float) -> None:
    """See `tercet.ops.accumulate.accumulate`."""
    pairs = list(zip(tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]))
    for dtype in {part.dtype for _, part in pairs}:
        chosen = [pair for pair in pairs if pair[1].dtype == dtype and _simple(*pair)]
        _add([total for total, _ in chosen], [part for _, part in chosen], scale)
    for total, part in pairs:
        if not _simple(total, part):
            total.add_(part, alpha=scale)


def _add(totals: list[Tensor], parts: list[Tensor], scale: float) -> None:
    """Launch on tensors of one type each, contiguous and aligned."""
    pieces = _pieces(tuple(total.numel() for total in totals), totals[0].device) if totals else None
    if pieces is None or not len(pieces):
        return
    addresses = torch.tensor([x.data_ptr() for x in (*totals, *parts)], dtype=torch.int64, device="cpu")
    if totals[0].is_cuda:  # from pinned memory, so that the host does not wait
        addresses = addresses.pin_memory().to(totals[0].device, non_blocking=True)
    kind = getattr(tl, str(parts[0].dtype).removeprefix("torch."))
    _add_kernel[(len(pieces),)](addresses, pieces, len(totals), scale, PART=kind, BLOCK=_BLOCK, num_warps=8)
