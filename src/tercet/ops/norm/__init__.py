"""Normalisations: RMSNorm, RMSNorm with a sigmoid gate after it, and the L2 norm of KDA's queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.compiling import result
from tercet.ops.registry import Operator


def _rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps only its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return result((wide * r).to(x.dtype).mul_(weight.to(x.dtype)), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        unit = x.to(r.dtype) * r
        grad = grads[0].to(r.dtype)
        d_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        d_unit = grad * weight.to(r.dtype)
        inner = (d_unit * unit).sum(-1, keepdim=True).div_(x.shape[-1])
        return d_unit.sub_(unit.mul_(inner)).mul_(r).to(x.dtype), d_weight, None


def _rms_norm_torch(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return _RMSNorm.apply(x, weight, eps)


_rms_norm = Operator("rms_norm", _rms_norm_reference, _rms_norm_torch, "tercet.ops.norm.triton_")


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if x.ndim < 1 or weight.shape != x.shape[-1:]:
        raise ShapeError(f"a norm's weight must be as wide as the rows, got {tuple(weight.shape)} for {tuple(x.shape)}")


def rms_norm(x: Float[Tensor, "*lead dim"], weight: Float[Tensor, "dim"], *, eps: float) -> Float[Tensor, "*lead dim"]:
    """Return ``x / sqrt(mean(x²) + eps)`` in fp32, **cast to x's dtype, then** times weight (no ``1 + w``).

    Raises:
        ShapeError: weight is not as wide as x's rows.
    """
    _check_weight(x, weight)
    return _rms_norm(x, weight, eps=eps)


def _gated_reference(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    compute = torch.promote_types(o.dtype, torch.float32)
    return (_rms_norm_torch(o.to(compute), weight.to(compute), eps=eps) * gate.to(compute).sigmoid()).to(o.dtype)


_gated = Operator("gated_rms_norm", _gated_reference, triton_module="tercet.ops.norm.triton_")


def gated_rms_norm(
    o: Float[Tensor, "*lead dim"],
    gate: Float[Tensor, "*lead dim"],
    weight: Float[Tensor, "dim"],
    *,
    eps: float,
) -> Float[Tensor, "*lead dim"]:
    """Return ``RMSNorm(o) · weight · σ(gate)``: norm first, then the gate; all in fp32, one cast (report eq. 6).

    Raises:
        ShapeError: gate differs from o in shape, or weight is not as wide as their rows.
    """
    if gate.shape != o.shape:
        raise ShapeError(f"gated_rms_norm takes o and gate of one shape, got {tuple(o.shape)} and {tuple(gate.shape)}")
    _check_weight(o, weight)
    return _gated(o, gate, weight, eps=eps)


def _l2_norm_reference(x: Tensor, *, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y = wide * r
        ctx.save_for_backward(y, r)
        return result(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, r = ctx.saved_tensors
        grad = grads[0].to(r.dtype)
        inner = (grad * y).sum(-1, keepdim=True)
        return ((grad - y * inner) * r).to(grads[0].dtype), None


def _l2_norm_torch(x: Tensor, *, eps: float) -> Tensor:
    return _L2Norm.apply(x, eps)


_l2_norm = Operator("l2_norm", _l2_norm_reference, _l2_norm_torch)


def l2_norm(x: Float[Tensor, "*lead dim"], *, eps: float = 1e-6) -> Float[Tensor, "*lead dim"]:
    """Return ``x / sqrt(Σ x² + eps)``; eps is added to the **sum**, inside the root."""
    return _l2_norm(x, eps=eps)
