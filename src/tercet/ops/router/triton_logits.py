"""The router's product on the GPU: bf16 rows times an fp32 weight, with fp32 accuracy, on tensor cores.

An fp32 value is the sum of three bf16 parts, each the rounding of what the parts before it left: 3 × 8 bits are fp32's
24. A product of bf16 values is exact in fp32, so rows times the three parts, added from the smallest up, errs as an
fp32 product does (1e-7 of the norm), and no fp32 copy of the rows is made. The gradient of the logits is cut in
registers in the same way. Blocks of a long sum are summed apart and then added; slabs of tokens are added in order, so
every run gives the same bits.

Shapes: T tokens, E experts, H hidden width; tiles of BM × BN, BK deep.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import blocks, dense, fitted, float_refusal, operand_type, operator

_SPLIT = 1024
_LOGITS = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
_ROWS_GRADIENT = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 2}
_WEIGHT_GRADIENT = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
_SLAB = 1024
"""Fewest tokens that a program sums for the weight's gradient."""
_PROGRAMS = 256
"""Programs that fill a GPU: a weight of so many tiles needs no slabs."""


@triton.jit
def _parts(x):
    """Cut fp32 values into three bf16 parts, largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_kernel(w, parts, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    high, middle, low = _parts(tl.load(w + at, mask=at < count, other=0.0).to(tl.float32))
    tl.store(parts + at, high, mask=at < count)
    tl.store(parts + count + at, middle, mask=at < count)
    tl.store(parts + 2 * count + at, low, mask=at < count)


@fitted
@triton.jit
def _logits_kernel(
    x,
    parts,
    out,
    tokens,
    E: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    from_row = tl.minimum(row, tokens - 1).to(tl.int64) * H
    from_expert = tl.minimum(expert, E - 1).to(tl.int64) * H
    size: tl.constexpr = E * H
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(x + from_row[:, None] + k[None, :], mask=(k < H)[None, :], other=0.0).to(OPERAND)
        w = parts + from_expert[None, :] + k[:, None]
        inside = (k < H)[:, None]
        high = tl.load(w, mask=inside, other=0.0).to(OPERAND)
        middle = tl.load(w + size, mask=inside, other=0.0).to(OPERAND)
        low = tl.load(w + 2 * size, mask=inside, other=0.0).to(OPERAND)
        total += tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    to = row.to(tl.int64)[:, None] * E + expert[None, :]
    tl.store(out + to, total, mask=(row < tokens)[:, None] & (expert < E)[None, :])


@fitted
@triton.jit
def _rows_gradient_kernel(
    d,
    parts,
    out,
    tokens,
    E: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``d [T, E] @ w [E, H]``; the result is rounded to bf16, so two parts of each are enough."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    from_row = tl.minimum(row, tokens - 1).to(tl.int64) * E
    size: tl.constexpr = E * H
    for first in range(0, E, BK):
        k = first + tl.arange(0, BK)
        d_high, d_middle, _ = _parts(tl.load(d + from_row[:, None] + k[None, :], mask=(k < E)[None, :], other=0.0))
        w = parts + k.to(tl.int64)[:, None] * H + column[None, :]
        inside = (k < E)[:, None] & (column < H)[None, :]
        high = tl.load(w, mask=inside, other=0.0).to(OPERAND)
        middle = tl.load(w + size, mask=inside, other=0.0).to(OPERAND)
        d_high, d_middle = d_high.to(OPERAND), d_middle.to(OPERAND)
        total = tl.dot(d_high, high, tl.dot(d_middle, high, tl.dot(d_high, middle, total)))
    to = row.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < H)[None, :])


@fitted
@triton.jit
def _weight_gradient_kernel(
    d,
    x,
    out,
    tokens,
    slab,
    E: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``out[s] = dᵀ x`` over the tokens of slab s."""
    expert = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(part * slab, tl.minimum(part * slab + slab, tokens), BK):
        token = first + tl.arange(0, BK)
        inside = (token < tl.minimum(part * slab + slab, tokens))[:, None]
        at = token.to(tl.int64)[:, None]
        b = tl.load(x + at * H + column[None, :], mask=inside & (column < H)[None, :], other=0.0).to(OPERAND)
        high, middle, low = _parts(
            tl.load(d + at * E + expert[None, :], mask=inside & (expert < E)[None, :], other=0.0)
        )
        high, middle, low = high.to(OPERAND).T, middle.to(OPERAND).T, low.to(OPERAND).T
        total += tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))
    to = (part.to(tl.int64) * E + expert[:, None]) * H + column[None, :]
    tl.store(out + to, total, mask=(expert < E)[:, None] & (column < H)[None, :])


def _split(weight: Tensor) -> Tensor:
    """Return the parts ``[3, E, H]`` of the weight."""
    parts = torch.empty(3, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    count = weight.numel()
    _split_kernel[(blocks(count, _SPLIT),)](weight, parts, count, BLOCK=_SPLIT)
    return parts


@operator("tercet::router_logits", schema="(Tensor x, Tensor weight) -> Tensor")
def _forward(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = dense(x), dense(weight)
    (tokens, hidden), count = x.shape, len(weight)
    out = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
    if tokens:
        grid = (blocks(tokens, _LOGITS["BM"]), blocks(count, _LOGITS["BN"]))
        operand = operand_type(x.dtype)
        _logits_kernel[grid](x, _split(weight), out, tokens, E=count, H=hidden, OPERAND=operand, **_LOGITS)
    return out


@_forward.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((len(x), len(weight)), dtype=torch.float32)


@operator("tercet::router_logits_backward", schema="(Tensor d_logits, Tensor x, Tensor weight) -> (Tensor, Tensor)")
def _backward(d_logits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    d_logits, x, weight = dense(d_logits), dense(x), dense(weight)
    (tokens, hidden), count = x.shape, len(weight)
    d_x = torch.empty_like(x)
    if not tokens:
        return d_x, torch.zeros_like(weight)
    sizes = {"E": count, "H": hidden, "OPERAND": operand_type(x.dtype)}
    grid = (blocks(tokens, _ROWS_GRADIENT["BM"]), blocks(hidden, _ROWS_GRADIENT["BN"]))
    _rows_gradient_kernel[grid](d_logits, _split(weight), d_x, tokens, **sizes, **_ROWS_GRADIENT)
    tiles = (blocks(count, _WEIGHT_GRADIENT["BM"]), blocks(hidden, _WEIGHT_GRADIENT["BN"]))
    slab = max(_SLAB, blocks(tokens, blocks(_PROGRAMS, tiles[0] * tiles[1])))
    sums = torch.empty(blocks(tokens, slab), count, hidden, dtype=torch.float32, device=x.device)
    _weight_gradient_kernel[(*tiles, len(sums))](d_logits, x, sums, tokens, slab, **sizes, **_WEIGHT_GRADIENT)
    return d_x, sums.sum(0).to(weight.dtype)


@_backward.register_fake
def _(d_logits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_logits: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(d_logits, *ctx.saved_tensors)


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if x.dtype != torch.bfloat16:
        return f"rows must be bf16 for products with bf16 parts, not {str(x.dtype).removeprefix('torch.')}"
    return float_refusal(weight)


def call(x: Tensor, weight: Tensor) -> Tensor:
    """See `tercet.ops.router.router_logits`."""
    return _forward(x, weight)
