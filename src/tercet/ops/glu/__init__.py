"""Gated feed-forward activations: SiTU-GLU (report §2.3.2, eq. 12) and SwiGLU."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.compiling import result
from tercet.ops.registry import Operator

Activation = Literal["situ", "silu"]


def situ_glu_reference(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """See `situ_glu`; the formula, differentiable by autograd."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return y.to(gate.dtype)


def situ_forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU without autograd, in the compute dtype of its inputs; few passes over memory."""
    y = (gate * (1 / beta)).tanh_().mul_(torch.sigmoid(gate))
    return y.mul_((up * (1 / linear_beta)).tanh_()).mul_(beta * linear_beta)


def situ_backward(
    grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(y, ∂gate, ∂up)`` from the pre-activations (kernels.md §8)."""
    t_g, t_u, s = (gate * (1 / beta)).tanh_(), (up * (1 / linear_beta)).tanh_(), torch.sigmoid(gate)
    left = (t_g * s).mul_(beta)
    d_up = (1 - t_u * t_u).mul_(left).mul_(grad)
    right = t_u.mul_(linear_beta)
    d_gate = t_g.mul_(t_g).neg_().add_(1).mul_(s).add_(left * (1 - s)).mul_(right).mul_(grad)
    return left.mul_(right), d_gate, d_up


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        compute = torch.promote_types(gate.dtype, torch.float32)
        return result(situ_forward(gate.to(compute), up.to(compute), beta, linear_beta), gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        compute = torch.promote_types(gate.dtype, torch.float32)
        _, d_gate, d_up = situ_backward(grads[0].to(compute), gate.to(compute), up.to(compute), *ctx.betas)
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None


def _situ_torch(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    return _SituGLU.apply(gate, up, beta, linear_beta)


_situ = Operator("situ_glu", situ_glu_reference, _situ_torch, "tercet.ops.glu.triton_")


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise ShapeError(f"a GLU takes gate and up of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")


def situ_glu(
    gate: Float[Tensor, "*shape"],
    up: Float[Tensor, "*shape"],
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Float[Tensor, "*shape"]:
    """Return ``[β₁ tanh(g/β₁) σ(g)] · [β₂ tanh(u/β₂)]``; computed in fp32, bounded by ``β₁ β₂`` = 100.

    Args:
        gate: pre-activation of the gate projection.
        up: pre-activation of the up projection.
        beta: β₁, the bound of the gate branch.
        linear_beta: β₂, the bound of the linear branch.

    Raises:
        ShapeError: the two halves differ in shape.
    """
    _check(gate, up)
    return _situ(gate, up, beta=beta, linear_beta=linear_beta)


def swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ``SiLU(g) · u`` (Kimi-Linear).

    Raises:
        ShapeError: the two halves differ in shape.
    """
    _check(gate, up)
    return F.silu(gate) * up
