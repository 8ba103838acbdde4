"""SiTU-GLU on the GPU: one pass forward, one backward from the saved pre-activations (kernels.md §8).

`situ` and `situ_pulled` are also the epilogues of the expert kernels. Where results are rounded to bf16, by up to 2⁻⁹,
tanh is the GPU's own instruction, off by up to 2⁻¹¹ of its value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import PTX, blocks, dense, float_refusal, operator
from tercet.ops.triton_math import exp2, reciprocal

_BLOCK, _WARPS = 1024, 4
_NAN = tl.constexpr(tl.PropagateNan.ALL)
"""A minimum that hands NaN on; the plain one would hide it."""


@triton.jit
def _tanh(x):
    """Return numerator and denominator of tanh(x), to a few fp32 ulps; near 0 a series, as the numerator cancels.

    Beyond 2^28 the ratio is 1 in fp32, and products of denominators stay finite.
    """
    e = exp2(tl.minimum(2.8853900817779268 * x, 28.0, propagate_nan=_NAN))
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0)))
    under = e + 1.0
    return tl.where(tl.abs(x) < 0.1, series * under, e - 1.0), under


if PTX:

    @triton.jit
    def _coarse_tanh(x):
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

else:

    @triton.jit
    def _coarse_tanh(x):
        over, under = _tanh(x)
        return over / under


@triton.jit
def _sigmoid(x):
    """Return numerator and denominator of the logistic function, without overflow on either side."""
    e = exp2(-1.4426950408889634 * tl.abs(x))
    return tl.where(x < 0.0, e, 1.0), 1.0 + e


@triton.jit
def sigmoid(x):
    """Logistic function; exactly 0 and 1 in the limits."""
    over, under = _sigmoid(x)
    return over * reciprocal(under)


@triton.jit
def _coarse_factors(gate, up, beta, linear_beta):
    """Return tanh(g/β₁), tanh(u/β₂) and σ(g)."""
    sigma = reciprocal(1.0 + exp2(-1.4426950408889634 * gate))
    return _coarse_tanh(gate * (1.0 / beta)), _coarse_tanh(up * (1.0 / linear_beta)), sigma


@triton.jit
def situ(gate, up, beta, linear_beta, COARSE: tl.constexpr):
    """``β₁ tanh(g/β₁) σ(g) · β₂ tanh(u/β₂)``; one reciprocal for all three denominators."""
    if COARSE:
        t_g, t_u, s = _coarse_factors(gate, up, beta, linear_beta)
        return beta * linear_beta * t_g * t_u * s
    tanh_g, under_g = _tanh(gate * (1.0 / beta))
    tanh_u, under_u = _tanh(up * (1.0 / linear_beta))
    sigma, under = _sigmoid(gate)
    return beta * linear_beta * tanh_g * tanh_u * sigma * reciprocal(under_g * under_u * under)


@triton.jit
def situ_pulled(gate, up, beta, linear_beta, COARSE: tl.constexpr):
    """Return SiTU and its two partial derivatives, from one reciprocal as well."""
    if COARSE:
        t_g, t_u, s = _coarse_factors(gate, up, beta, linear_beta)
    else:
        t_g, under_g = _tanh(gate * (1.0 / beta))
        t_u, under_u = _tanh(up * (1.0 / linear_beta))
        s, under = _sigmoid(gate)
        once = reciprocal(under_g * under_u * under)
        s *= under_g * under_u * once
        once *= under
        t_g, t_u = t_g * under_u * once, t_u * under_g * once
    left, right = beta * t_g * s, linear_beta * t_u
    by_gate = ((1.0 - t_g * t_g) * s + left * (1.0 - s)) * right
    return left * right, by_gate, left * (1.0 - t_u * t_u)


@triton.jit
def silu_pulled(gate, up):
    """Return SwiGLU and its two partial derivatives."""
    s = sigmoid(gate)
    silu = gate * s
    return silu * up, up * s * (1.0 + gate * (1.0 - s)), silu


@triton.jit
def _forward_kernel(gate, up, out, count, beta, linear_beta, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    y = situ(g, u, beta, linear_beta, out.dtype.element_ty == tl.bfloat16)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, d_gate, d_up, count, beta, linear_beta, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    _, by_gate, by_up = situ_pulled(g, u, beta, linear_beta, d_gate.dtype.element_ty == tl.bfloat16)
    tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=inside)


@operator("tercet::situ_glu", schema="(Tensor gate, Tensor up, float beta, float linear_beta) -> Tensor")
def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = dense(gate), dense(up)
    out = torch.empty_like(gate)
    if gate.numel():
        _forward_kernel[(blocks(gate.numel(), _BLOCK),)](
            gate, up, out, gate.numel(), beta, linear_beta, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out


@_situ.register_fake
def _(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return gate.new_empty(gate.shape)


@operator(
    "tercet::situ_glu_backward",
    schema="(Tensor grad, Tensor gate, Tensor up, float beta, float linear_beta) -> (Tensor, Tensor)",
)
def _situ_backward(grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor]:
    grad, gate, up = dense(grad), dense(gate), dense(up)
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        _backward_kernel[(blocks(gate.numel(), _BLOCK),)](
            grad, gate, up, d_gate, d_up, gate.numel(), beta, linear_beta, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return d_gate, d_up


@_situ_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.betas = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_situ_backward(grad, *ctx.saved_tensors, *ctx.betas), None, None


_situ.register_autograd(_differentiate, setup_context=_save)


def declines(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ"
    return float_refusal(gate)


def call(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """See `tercet.ops.glu.situ_glu`."""
    return _situ(gate, up, beta, linear_beta)
