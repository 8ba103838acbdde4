"""Approximations that the GPU has instructions for.

Under the Triton interpreter (``TRITON_INTERPRET=1``) there is no PTX, so they become plain NumPy; the kernels
themselves do not know.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import INTERPRETED

if INTERPRETED:

    @triton.jit
    def exp2(x):
        """2^x."""
        return tl.exp2(x)

    @triton.jit
    def reciprocal(x):
        """1/x."""
        return 1.0 / x

else:

    @triton.jit
    def exp2(x):
        """2^x; results below the smallest normal number are zero."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

    @triton.jit
    def reciprocal(x):
        """1/x to one unit in the last place; 1/inf is zero."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
