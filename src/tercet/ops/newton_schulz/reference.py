"""Newton–Schulz as its polynomial, one batched product at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def newton_schulz(
    blocks: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype
) -> Tensor:
    """See `tercet.ops.newton_schulz.newton_schulz`."""
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    X = (wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)).to(dtype)
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.transpose(-1, -2)
    for a, b, c in coefficients:
        A = X @ X.transpose(-1, -2)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.transpose(-1, -2) if tall else X
