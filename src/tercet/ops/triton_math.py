"""What differs between GPUs in the arithmetic of kernels, which use it without knowing.

NVIDIA GPUs have instructions for approximations, and multiply fp32 values on tensor cores in parts of tf32; elsewhere
kernels get what Triton offers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import AMD, PTX

FP32 = tl.constexpr("ieee" if AMD else "tf32x3")
"""Precision of a product of fp32 values that errs by 1e-6."""
TF32 = tl.constexpr("ieee" if AMD else "tf32")
"""Precision of a product of fp32 values of which only the upper 11 bits count."""

if PTX:

    @triton.jit
    def exp2(x):
        """2^x; results below the smallest normal number are zero."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

    @triton.jit
    def reciprocal(x):
        """1/x to one unit in the last place; 1/inf is zero."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

else:

    @triton.jit
    def exp2(x):
        """2^x."""
        return tl.exp2(x)

    @triton.jit
    def reciprocal(x):
        """1/x."""
        return 1.0 / x
