"""RMSNorm and gated RMSNorm on the GPU: one pass forward, one backward, rows in registers.

The backward pass keeps one number a row and walks its rows in a fixed order, so the weight's gradient (partial sums a
program, then one sum over programs) is the same in every run. Its programs stay, and the next rows come through shared
memory while one tile is worked on; a narrow tile belongs to one warp, whose reductions wait for nobody.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.glu.triton_ import sigmoid
from tercet.ops.gpu import blocks, chip, dense, fitted, float_refusal, operator, power_of_two
from tercet.ops.triton_sums import row_sum

MAX_WIDTH = 16384
_FORWARD, _BACKWARD = 2048, 1024
"""Values a program holds of one tensor, unless a row is longer; measured best on an H200, as are the two below."""
_RESIDENT, _STAGES = 8, 4
"""Warps on a multiprocessor in the backward pass, and tiles in flight."""


@triton.jit
def _forward_kernel(
    x,
    gate,
    weight,
    out,
    r_out,
    rows,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    unit = value * r[:, None]
    element = out.dtype.element_ty
    if GATED:
        y = unit * w.to(tl.float32) * sigmoid(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32))
    else:
        y = unit.to(element).to(tl.float32) * w.to(element).to(tl.float32)
    tl.store(out + at, y.to(element), mask=mask)
    tl.store(r_out + row, r, mask=row < rows)


@fitted
@triton.jit
def _backward_kernel(
    x,
    gate,
    weight,
    grad,
    r_in,
    d_x,
    d_gate,
    partial,
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([BLOCK], tl.float32)
    first, step = program * ROWS, tl.num_programs(0) * ROWS
    for k in tl.range(0, tl.cdiv(rows - first, step), num_stages=STAGES):
        row = (first + k * step).to(tl.int64) + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        r = tl.load(r_in + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * r
        d = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            s = sigmoid(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32))
            tl.store(d_gate + at, (d * unit * w * s * (1.0 - s)).to(d_gate.dtype.element_ty), mask=mask)
            d *= s
        d_weight += tl.sum(d * unit, 0)
        d_unit = d * w
        inner = tl.sum(d_unit * unit, 1)[:, None] / D
        tl.store(d_x + at, ((d_unit - unit * inner) * r).to(d_x.dtype.element_ty), mask=mask)
    tl.store(partial + program.to(tl.int64) * D + column, d_weight, mask=column < D)


def _shape(x: Tensor, values: int) -> tuple[int, dict[str, int]]:
    """Return the number of rows and the kernels' tile of about *values*."""
    dim = x.shape[-1]
    block = power_of_two(dim)
    tile = max(values, block)
    return x.numel() // dim, {"D": dim, "ROWS": tile // block, "BLOCK": block, "num_warps": tile // 1024}


@operator("tercet::rms_norm", schema="(Tensor x, Tensor? gate, Tensor weight, float eps) -> (Tensor, Tensor)")
def _forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = dense(x), dense(weight)
    out, r = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, tile = _shape(x, _FORWARD)
    if rows:
        beside = x if gate is None else dense(gate)
        _forward_kernel[(blocks(rows, tile["ROWS"]),)](
            x, beside, weight, out, r, rows, eps, GATED=gate is not None, **tile
        )
    return out, r


@_forward.register_fake
def _(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(
    "tercet::rms_norm_backward",
    schema="(Tensor x, Tensor? gate, Tensor weight, Tensor grad, Tensor r) -> (Tensor, Tensor, Tensor)",
)
def _backward(x: Tensor, gate: Tensor | None, weight: Tensor, grad: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, grad, weight = dense(x), dense(grad), dense(weight)
    beside = x if gate is None else dense(gate)
    d_x = torch.empty_like(x)
    d_gate = x.new_empty(0) if gate is None else torch.empty_like(x)
    rows, tile = _shape(x, _BACKWARD)
    resident = max(1, _RESIDENT // tile["num_warps"]) * chip(x.device).multiprocessors
    programs = min(max(1, blocks(rows, tile["ROWS"])), resident)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        x, beside, weight, grad, r, d_x, d_gate, partial, rows, GATED=gate is not None, STAGES=_STAGES, **tile
    )
    return d_x, d_gate, row_sum(partial, weight.dtype)


@_backward.register_fake
def _(x: Tensor, gate: Tensor | None, weight: Tensor, grad: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_x = x.new_empty(x.shape)
    return d_x, torch.empty_like(d_x) if gate is not None else x.new_empty(0), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gate, weight, output[1])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor, None]:
    x, gate, weight, r = ctx.saved_tensors
    d_x, d_gate, d_weight = _backward(x, gate, weight, grad, r)
    return d_x, None if gate is None else d_gate, d_weight, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(x: Tensor, *others: Tensor, eps: float) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if x.shape[-1] > MAX_WIDTH:
        return f"width {x.shape[-1]} exceeds {MAX_WIDTH}"
    if len(others) == 2 and others[0].dtype != x.dtype:
        return f"rows are {x.dtype} and their gate {others[0].dtype}"
    return float_refusal(x, *others)


def call(x: Tensor, *others: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.norm.rms_norm` (weight) and `tercet.ops.norm.gated_rms_norm` (gate, weight)."""
    gate = others[0] if len(others) == 2 else None
    return _forward(x, gate, others[-1], eps)[0]
