"""The sigmoid gate on MLA's output, on the GPU: one pass forward, one backward from the inputs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.glu.triton_ import sigmoid
from tercet.ops.gpu import FLOATS, blocks, dense, float_refusal, operator

_BLOCK = 2048


@triton.jit
def _forward_kernel(o, gate, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, (value * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, o, gate, d_o, d_gate, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(d_o + at, (d * s).to(d_o.dtype.element_ty), mask=inside)
    tl.store(d_gate + at, (d * value * s * (1.0 - s)).to(d_gate.dtype.element_ty), mask=inside)


@operator("tercet::sigmoid_gate", schema="(Tensor o, Tensor gate, ScalarType dtype) -> Tensor")
def _gate(o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    o, gate = dense(o), dense(gate)
    out = torch.empty_like(o, dtype=dtype)
    if o.numel():
        _forward_kernel[(blocks(o.numel(), _BLOCK),)](o, gate, out, o.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


@_gate.register_fake
def _(o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    return o.new_empty(o.shape, dtype=dtype)


@operator("tercet::sigmoid_gate_backward", schema="(Tensor grad, Tensor o, Tensor gate) -> (Tensor, Tensor)")
def _gate_backward(grad: Tensor, o: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    grad, o, gate = dense(grad), dense(o), dense(gate)
    d_o, d_gate = torch.empty_like(o), torch.empty_like(gate)
    if o.numel():
        _backward_kernel[(blocks(o.numel(), _BLOCK),)](grad, o, gate, d_o, d_gate, o.numel(), BLOCK=_BLOCK, num_warps=8)
    return d_o, d_gate


@_gate_backward.register_fake
def _(grad: Tensor, o: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return o.new_empty(o.shape), gate.new_empty(gate.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gate_backward(grad, *ctx.saved_tensors), None


_gate.register_autograd(_differentiate, setup_context=_save)


def declines(o: Tensor, gate: Tensor, *, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if dtype not in FLOATS:
        return f"kernels write fp32, bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    return float_refusal(o, gate)


def call(o: Tensor, gate: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `tercet.ops.gate.sigmoid_gate`."""
    return _gate(o, gate, dtype)
