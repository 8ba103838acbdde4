"""What operators owe to a compiler: to notice it, and outputs that it follows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def traced() -> bool:
    """Return whether tensors may be pretended: a compiler traces, or a dispatch mode (fake tensors, counting) looks on.

    While a compiler follows the backward pass, `torch.compiler.is_compiling` says no in PyTorch 2.11; the modes in
    which it follows say yes.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return *x* in *dtype*; if it has that type, a view of it. For the output of an autograd function's forward.

    Where PyTorch 2.11 compiles an autograd function whose output comes out of a ``to`` without effect or an in-place
    operation, the gradient is lost without a word; views keep it and cost nothing.
    """
    return x.view_as(x) if x.dtype == dtype else x.to(dtype)
