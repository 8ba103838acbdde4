"""What every GPU kernel's wrapper needs: aligned inputs and the size of the device."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU, slowly, in Triton's interpreter."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels read and write."""


def dense(x: Tensor) -> Tensor:
    """Return *x* contiguous and at a 16-byte boundary, copied only when it is not (kernels.md §15)."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Return how many programs of full size run at once; a small number where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def float_refusal(*tensors: Tensor) -> str | None:
    """Return a reason when a tensor is of a type that no kernel takes, else None."""
    for x in tensors:
        if x.dtype not in FLOATS:
            return f"kernels take fp32, bf16 and fp16, not {str(x.dtype).removeprefix('torch.')}"
    return None


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which kernels feed *dtype* to matrix products: Triton's interpreter cannot multiply bf16."""
    if dtype == torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32
