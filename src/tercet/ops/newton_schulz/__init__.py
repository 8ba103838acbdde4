"""Newton–Schulz orthogonalisation of many equal blocks at once (training.md §1.2)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.newton_schulz import reference
from tercet.ops.registry import Operator

Method = Literal["quintic", "polar_express", "8+2"]

_QUINTIC = (3.4445, -4.7750, 2.0315)
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "quintic": (_QUINTIC,) * 5,
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ),
    "8+2": (_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
"""Polynomial coefficients (a, b, c) of every step: Jordan's quintic; Polar Express, arXiv 2505.16932; quintic, then two
exact steps."""


_newton_schulz = Operator("newton_schulz", reference.newton_schulz, triton_module="tercet.ops.newton_schulz.triton_")


def newton_schulz(
    blocks: Float[Tensor, "count rows cols"], *, method: Method = "quintic"
) -> Float[Tensor, "count rows cols"]:
    """Return for each block U Σ Vᵀ approximately U Vᵀ: ``X ← aX + (bA + cA²)X`` with ``A = X Xᵀ``.

    The norm is taken in fp32 before any cast, so tiny gradients survive and a zero block gives zero. Products run in
    bf16 on a GPU and in the input's own precision on a CPU.

    Args:
        blocks: matrices of one shape, tall or wide.
        method: coefficient schedule, see `COEFFICIENTS`.

    Raises:
        ShapeError: not a stack of matrices.
    """
    if blocks.ndim != 3:
        raise ShapeError(f"newton_schulz takes a stack of matrices [N, rows, cols], got {tuple(blocks.shape)}")
    if blocks.numel() == 0:
        return blocks
    dtype = torch.bfloat16 if blocks.device.type == "cuda" else torch.promote_types(blocks.dtype, torch.float32)
    return _newton_schulz(blocks, coefficients=COEFFICIENTS[method], dtype=dtype)
