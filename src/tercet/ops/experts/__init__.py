"""Routed experts: gather tokens by expert, gated feed-forward, weighted fp32 combine (report §2.3.1)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.experts import reference, torch_
from tercet.ops.glu import Activation
from tercet.ops.registry import Operator, checks_values

_experts = Operator("routed_experts", reference.routed_experts, torch_.routed_experts, "tercet.ops.experts.triton_")


def routed_experts(
    z: Float[Tensor, "tokens latent"],
    weights: Float[Tensor, "tokens chosen"],
    experts: Int[Tensor, "tokens chosen"],
    w1: Float[Tensor, "experts inner latent"],
    w2: Float[Tensor, "experts latent inner"],
    w3: Float[Tensor, "experts inner latent"],
    *,
    activation: Activation = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Float[Tensor, "tokens latent"]:
    """Return ``Σ_e p_e · w2_e act(w1_e z, w3_e z)`` over each token's chosen experts.

    Products and sum over experts are fp32, with one cast to z's dtype. Expert outputs are not saved: the weights'
    gradient is ``dp = (w2ᵀ dy) · h`` (kernels.md §11).

    Args:
        z: token rows at the width that is dispatched.
        weights: fp32 combination weights.
        experts: chosen expert of every weight, distinct within a token.
        w1: gate projections.
        w2: down projections.
        w3: up projections.
        activation: ``situ`` or ``silu``.
        beta: SiTU's β₁.
        linear_beta: SiTU's β₂.

    Raises:
        ShapeError: shapes disagree, or (seen on a CPU only) an expert that does not exist.
    """
    count, inner, latent = w1.shape
    if w3.shape != w1.shape or tuple(w2.shape) != (count, latent, inner):
        shapes = ", ".join(str(tuple(w.shape)) for w in (w1, w3, w2))
        raise ShapeError(f"expert weights must be w1, w3 [E, I, L] and w2 [E, L, I], got {shapes}")
    if z.ndim != 2 or z.shape[1] != latent or weights.shape != experts.shape or len(weights) != len(z):
        shapes = ", ".join(str(tuple(x.shape)) for x in (z, weights, experts))
        raise ShapeError(f"z must be [T, {latent}] with weights and experts [T, k], got {shapes}")
    if checks_values(z) and experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        raise ShapeError(
            f"a token chose expert {int(experts.min())} or {int(experts.max())}; there are {count} experts"
        )
    return _experts(z, weights, experts, w1, w2, w3, activation=activation, beta=beta, linear_beta=linear_beta)
