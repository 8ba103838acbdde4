"""How tests compare numbers: one relative error, and values with all gradients against a formula run in fp64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercet.ops import use_tier


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x − ref‖ / ‖ref‖ in fp64 (kernels.md §0, rule 6); 0 for two zeros."""
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    difference, norm = (x - reference).norm(), reference.norm()
    return float(difference / norm) if norm > 0 else float(difference)


def outputs_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    tier: str | None = None,
    seed: int = 1,
) -> list[Tensor]:
    """Return what *function* gives on *tier* and the gradients of a fixed random projection of it."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with use_tier(tier):
        result = function(*leaves)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
        total = sum((o.double() * w).sum() for o, w in zip(outputs, weights))
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, grads))]


def assert_same(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    bound: float,
    tier: str | None = None,
) -> None:
    """Assert outputs and all gradients of *ours* on *tier* within *bound* of *formula* (itself run in fp64)."""
    actual = outputs_and_gradients(ours, tensors, tier)
    expected = outputs_and_gradients(formula, [x.double() for x in tensors])
    for n, (x, reference) in enumerate(zip(actual, expected)):
        assert x.shape == reference.shape
        assert x.isfinite().all(), n
        assert relative_error(x, reference) <= bound, f"tensor {n}: {relative_error(x, reference):.2e}"
