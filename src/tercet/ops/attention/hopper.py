"""MLA attention on Hopper GPUs: which inputs its Gluon kernels take, and how they are launched.

Gluon is an experimental part of Triton: with a version that is not known to work, and for widths other than the
model's, the kernels of `triton_forward` and `triton_backward` run instead. They give the same numbers up to rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.ops.attention.triton_products import BLOCK, key_product, prepare_kernel, query_product
from tercet.ops.gpu import takes_gluon

WIDTHS = {"D": 128, "R": 64, "V": 128}
"""What the kernels are tuned for; keys and values are copied through one descriptor, and so equally wide."""
WORKSPACE = 3 << 30
"""Bytes of dS that a backward pass keeps at a time; heads beyond it take their turn."""
_STAGE = 64
"""Queries of a stage of the key pass."""


def takes(q: Tensor, D: int, R: int, V: int) -> bool:
    """Return whether the Gluon kernels run on *q*'s device, for its type and these widths."""
    return q.dtype in (torch.bfloat16, torch.float16) and {"D": D, "R": R, "V": V} == WIDTHS and takes_gluon(q.device)


def fits(pairs: int) -> bool:
    """Return whether the dS of one head, *pairs* blocks, is small enough to be kept."""
    return pairs * BLOCK * BLOCK * 2 <= WORKSPACE


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any]:
    """Return the forward and the key kernel: imported on first use, because not every Triton has Gluon."""
    from tercet.ops.attention.gluon_backward import key_kernel
    from tercet.ops.attention.gluon_forward import forward_kernel

    return forward_kernel, key_kernel


@lru_cache(maxsize=32)
def _gluon_kind(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the class of descriptors and the shared layout of a tile, which takes Python 20 microseconds to form."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    element = getattr(gl, str(dtype).removeprefix("torch."))
    return GluonDescriptor, gl.NVMMASharedLayout.get_default_for([rows, width], element)


def _gluon_tile(x: Tensor, rows: int, width: int) -> Any:
    """Return what a Gluon kernel copies ``[rows, width]`` tiles of the matrix *x* from."""
    descriptor, layout = _gluon_kind(rows, width, x.dtype)
    return descriptor(x, list(x.shape), list(x.stride()), [rows, width], layout)


def _tile(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, width])


def forward(
    q: Tensor, kv: Tensor, pe: Tensor, scale: float, tiles: Tensor, out: Tensor, lse: Tensor, row_max: Tensor
) -> None:
    """Fill *out*, *lse* and *row_max* as `triton_forward.forward_kernel` does; *tiles* are those of 128 tokens."""
    T, H = q.shape[:2]
    D, R, _ = WIDTHS.values()
    flat_q = q.flatten(1)
    key_or_value = _gluon_tile(kv.flatten(1), BLOCK, D)
    _kernels()[0][(len(tiles) * H,)](
        _gluon_tile(flat_q, 64, D), _gluon_tile(flat_q, 64, R), key_or_value, key_or_value, _gluon_tile(pe, BLOCK, R),
        kv, out, lse, row_max, tiles, T, H, lse.shape[1], scale, M=BLOCK, N=BLOCK, STAGES=2, **WIDTHS, num_warps=4,
    )  # fmt: skip


def backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    pe: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    pairs: int,
    tiles: Tensor,
    d_q: Tensor,
    d_kv: Tensor,
) -> Tensor:
    """Fill *d_q* and *d_kv*, and return the shared keys' gradient of every head, ``[H, T, R]`` fp32.

    *tiles* are those of 128 tokens, *pairs* the blocks of dS of one head, and *lse* is in slots of multiples of 64.
    """
    T, H = q.shape[:2]
    d_pe = torch.empty(H, T, WIDTHS["R"], dtype=torch.float32, device=q.device)
    turns = -(-H // max(1, WORKSPACE // (pairs * BLOCK * BLOCK * 2)))
    most = -(-H // turns)
    ds = torch.empty(most * pairs * BLOCK, BLOCK, dtype=q.dtype, device=q.device)
    for first in range(0, H, most):
        heads = min(most, H - first)
        _keys(grad, q, kv, pe, out, lse, scale, tiles, first, heads, ds, d_kv)
        _products(q, kv, pe, scale, tiles, first, heads, ds, d_q, d_kv, d_pe)
    return d_pe


def _keys(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    pe: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    tiles: Tensor,
    first: int,
    heads: int,
    ds: Tensor,
    d_kv: Tensor,
) -> None:
    """Fill *ds* and the values' part of *d_kv* for *heads* heads from *first* on."""
    H, slots = lse.shape
    D, R, V = WIDTHS.values()
    rows = heads * slots
    q_far, grad_far = q.new_empty(rows, D + R), q.new_empty(rows, V)
    lse_far, delta_far = lse.new_empty(1, rows), lse.new_empty(1, rows)
    prepare_kernel[(len(tiles) * heads,)](
        out, grad, q, lse, q_far, grad_far, lse_far, delta_far, tiles, first, heads, H, slots, M=BLOCK, **WIDTHS
    )
    key_or_value = _gluon_tile(kv.flatten(1), 64, D)
    _kernels()[1][(len(tiles) * heads,)](
        _gluon_tile(q_far, _STAGE, D), _gluon_tile(q_far, _STAGE, R), _gluon_tile(grad_far, _STAGE, V),
        key_or_value, _gluon_tile(pe, 64, R), key_or_value,
        _gluon_tile(lse_far, 1, _STAGE), _gluon_tile(delta_far, 1, _STAGE), kv, pe, ds, d_kv, tiles, first, heads, H,
        slots, pe.stride(0), scale, M=_STAGE, N=BLOCK, STAGES=3, **WIDTHS, num_warps=4,
    )  # fmt: skip


def _products(
    q: Tensor,
    kv: Tensor,
    pe: Tensor,
    scale: float,
    tiles: Tensor,
    first: int,
    heads: int,
    ds: Tensor,
    d_q: Tensor,
    d_kv: Tensor,
    d_pe: Tensor,
) -> None:
    """Fill *d_q*, the content's part of *d_kv* and *d_pe* for *heads* heads from *first* on."""
    T, H = q.shape[:2]
    D, R, _ = WIDTHS.values()
    flat_q, flat_kv, grid = q.flatten(1), kv.flatten(1), (len(tiles) * heads,)
    query_product[grid](
        kv, pe, _tile(ds, 32, BLOCK), _tile(flat_kv, 32, D), _tile(pe, 32, R), d_q, tiles, first, heads, H,
        pe.stride(0), scale, M=BLOCK, N=32, **WIDTHS, num_warps=4, num_stages=4,
    )  # fmt: skip
    key_product[grid](
        q, _tile(ds, BLOCK, 64), _tile(flat_q, 64, D), _tile(flat_q, 64, R), d_kv, d_pe, tiles, first, heads, H, T,
        scale, M=64, N=BLOCK, **WIDTHS, num_warps=4, num_stages=4,
    )  # fmt: skip
