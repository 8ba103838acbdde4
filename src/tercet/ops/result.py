"""What an autograd function's forward returns."""

from __future__ import annotations

import torch
from torch import Tensor


def result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return *x* in *dtype*; if it has that type, a view of it.

    Where PyTorch 2.11 compiles an autograd function whose output comes out of a ``to`` without effect or an in-place
    operation, the gradient is lost without a word; views keep it and cost nothing.
    """
    return x.view_as(x) if x.dtype == dtype else x.to(dtype)
