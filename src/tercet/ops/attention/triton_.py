"""MLA attention on the GPU: keys and values read where the projections left them, output in fp32 (report §2.1.2).

Nothing is concatenated, expanded or padded: the logits are two products, the part of the keys that all heads share is
one ``[T, R]`` matrix, and values keep their own width. The kernels are in `triton_forward` and `triton_backward`; for
the model's widths on a Hopper GPU, `hopper` launches faster ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.ops.attention import hopper
from tercet.ops.attention.triton_backward import delta_kernel, head_sum, key_kernel, query_kernel
from tercet.ops.attention.triton_forward import forward_kernel
from tercet.ops.gpu import HOPPER, INTERPRETED, chip, dense, float_refusal, operand_type, operator
from tercet.ops.tables import kept
from tercet.ops.triton_math import TF32

WIDTHS = (16, 32, 64, 128)
SLOT = 64
"""What a backward pass needs of every query lies in slots: tokens in order, each sequence from a multiple of it on."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut and run: queries and keys a tile, warps, pipeline depth, tensor descriptors or pointers."""

    queries: int
    keys: int
    warps: int
    stages: int
    bulk: bool = False


@dataclass(frozen=True)
class Launches:
    """The three kernels' launches."""

    forward: Launch
    query: Launch
    key: Launch


HOPPER_TILES = Launches(Launch(128, 64, 8, 3, True), Launch(128, 64, 8, 3, True), Launch(64, 128, 8, 3, True))
"""Measured best on an H200 for 8 heads of 8 × 4096 tokens and for 96 heads of 8192."""
BLACKWELL_TILES = replace(HOPPER_TILES, key=Launch(64, 64, 8, 3, True))
"""Not measured: as Hopper's, but for the accumulators of the key pass, which exceed Blackwell's tensor memory."""
SMALL = Launches(Launch(64, 32, 4, 2), Launch(64, 32, 4, 1), Launch(32, 64, 4, 1))
"""For 16-bit inputs on GPUs with little shared memory."""
FP32 = Launches(Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))


@lru_cache(maxsize=16)
def _launches(dtype: torch.dtype, device: torch.device) -> Launches:
    own = chip(device)
    if INTERPRETED or dtype == torch.float32:
        return FP32
    if not own.roomy:
        return SMALL
    return HOPPER_TILES if own.generation == HOPPER else BLACKWELL_TILES


@kept(64)
def _tiles(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return ``[tiles, 6]`` int32 about the tile's sequence: first token, length, first tile, tiles, first slot, and
    pairs of tiles (of queries and keys, past or present) of the sequences in front of it.

    Long sequences come first, so that the programs that start last are short.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    start, room = length.cumsum(0) - length, (length + SLOT - 1) // SLOT * SLOT
    slot = room.cumsum(0) - room
    order = torch.argsort(length, descending=True, stable=True)
    length, start, slot = length[order], start[order], slot[order]
    count = (length + size - 1) // size
    first = count.cumsum(0) - count
    pairs = count * (count + 1) // 2
    table = torch.stack([start, length, first, count, slot, pairs.cumsum(0) - pairs], dim=1)
    table = table.repeat_interleave(count, dim=0)
    return table.to(device=device, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What follows from the lengths of a batch."""

    slots: int
    """Slots a head for what the backward pass needs of every query."""
    pairs: int
    """Tiles of queries times tiles of keys not behind them, a head."""
    forward: Tensor
    query: Tensor
    key: Tensor
    """Tables of the tiles of the three kernels."""


def _slots(lengths: Sequence[int]) -> int:
    return sum(-(-n // SLOT) * SLOT for n in lengths)


def _planned(q: Tensor, lengths: Sequence[int]) -> tuple[Launches, _Plan]:
    """Return how the kernels are launched for *q*, and the tables of tiles of those sizes."""
    launches = _launches(q.dtype, q.device)
    sizes = launches.forward.queries, launches.query.queries, launches.key.keys
    return launches, _plan(tuple(lengths), sizes, q.device)


@kept(64)
def _plan(lengths: tuple[int, ...], sizes: tuple[int, int, int], device: torch.device) -> _Plan:
    counts = [-(-n // sizes[2]) for n in lengths]
    pairs = sum(n * (n + 1) // 2 for n in counts)
    return _Plan(_slots(lengths), pairs, *(_tiles(lengths, size, device) for size in sizes))


def _gluon(q: Tensor, launches: Launches, widths: dict[str, Any]) -> bool:
    return launches is HOPPER_TILES and hopper.takes(q, widths["D"], widths["R"], widths["V"])


def _rows(k_pe: Tensor) -> Tensor:
    """Return ``[T, R]`` rows, copied only where their stride or place does not fit the kernels' 16-byte loads."""
    rows = k_pe.flatten(0, 1)
    fits = rows.stride(1) == 1 and rows.stride(0) * rows.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits or not rows.numel() else dense(rows)


def _matrix(x: Tensor, rows: int, width: int, bulk: bool) -> Any:
    """Return what a kernel loads ``[rows, width]`` tiles from: a descriptor of *x* as a matrix of its tokens."""
    if not bulk or not width:
        return x
    flat = x.flatten(1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, width])


def _vector(x: Tensor, rows: int, bulk: bool) -> Any:
    """Return what a kernel loads *rows* values of *x* from."""
    return TensorDescriptor(x.view(-1), [x.numel()], [1], [rows]) if bulk else x


def _widths(q: Tensor, kv: Tensor, k_pe: Tensor) -> dict[str, Any]:
    R = k_pe.shape[-1]
    D = q.shape[-1] - R
    return {
        "D": D,
        "R": R,
        "V": kv.shape[-1] - D,
        "OPERAND": operand_type(q.dtype),
        "PRECISION": "ieee" if q.dtype == torch.float32 else TF32.value,
    }


def _constants(launch: Launch, widths: dict[str, Any]) -> dict[str, Any]:
    return widths | {
        "M": launch.queries,
        "N": launch.keys,
        "BULK": launch.bulk,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


@operator(
    "tercet::mla_attention",
    schema="(Tensor q, Tensor kv, Tensor k_pe, float scale, int[] lengths) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor, kv: Tensor, k_pe: Tensor, scale: float, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, pe = dense(q).flatten(0, 1), dense(kv).flatten(0, 1), _rows(k_pe)
    T, H = q.shape[:2]
    widths, (launches, plan) = _widths(q, kv, pe), _planned(q, lengths)
    slots, tiles, launch = plan.slots, plan.forward, launches.forward
    out = torch.empty(*k_pe.shape[:2], H, widths["V"], dtype=torch.float32, device=q.device)
    lse = torch.empty(H, slots, dtype=torch.float32, device=q.device)
    row_max = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if T and _gluon(q, launches, widths):
        hopper.forward(q, kv, pe, scale, tiles, out, lse, row_max)
    elif T:
        matrices = ((kv, widths["D"]), (kv, widths["V"]), (pe, widths["R"]))
        forward_kernel[(len(tiles) * H,)](
            q, kv, pe, *(_matrix(x, launch.keys, width, launch.bulk) for x, width in matrices),
            out, lse, row_max, tiles, T, H, slots, pe.stride(0), scale, **_constants(launch, widths),
        )  # fmt: skip
    return out, lse, row_max


@_forward.register_fake
def _(q: Tensor, kv: Tensor, k_pe: Tensor, scale: float, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, width = q.shape
    V = kv.shape[-1] - (width - k_pe.shape[-1])
    lse, row_max = (q.new_empty(H, width, dtype=torch.float32) for width in (_slots(lengths), B * T))
    return q.new_empty(B, T, H, V, dtype=torch.float32), lse, row_max


@operator(
    "tercet::mla_attention_backward",
    schema="(Tensor grad, Tensor q, Tensor kv, Tensor k_pe, Tensor out, Tensor lse, float scale, int[] lengths)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    q, kv = dense(q), dense(kv)
    d_q, d_kv = torch.empty_like(q), torch.empty_like(kv)
    q, kv, pe, grad = q.flatten(0, 1), kv.flatten(0, 1), _rows(k_pe), dense(grad).flatten(0, 1)
    if not len(q):
        return d_q, d_kv, torch.zeros_like(k_pe)
    widths, (launches, plan) = _widths(q, kv, pe), _planned(q, lengths)
    if _gluon(q, launches, widths) and hopper.fits(plan.pairs):
        d_pe = hopper.backward(grad, q, kv, pe, out, lse, scale, plan.pairs, plan.key, d_q, d_kv)
    else:
        d_pe = _two_passes(grad, q, kv, pe, out, lse, scale, launches, plan, widths, d_q, d_kv)
    d_shared = torch.empty(k_pe.shape, dtype=k_pe.dtype, device=k_pe.device)
    count = d_shared.numel()
    if count:
        head_sum[(-(-count // 1024),)](d_pe, d_shared, len(d_pe), count, SIZE=1024)
    return d_q, d_kv, d_shared


def _two_passes(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    pe: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    launches: Launches,
    plan: _Plan,
    widths: dict[str, Any],
    d_q: Tensor,
    d_kv: Tensor,
) -> Tensor:
    """Fill *d_q* and *d_kv*, and return the shared keys' gradient of every head, ``[H, T, R]`` fp32."""
    T, H = q.shape[:2]
    D, R, V = (widths[name] for name in ("D", "R", "V"))
    query_tiles, key_tiles = plan.query, plan.key
    narrow, delta = torch.empty_like(grad, dtype=q.dtype), torch.empty_like(lse)
    launch, slots = launches.query, lse.shape[1]
    delta_kernel[(len(query_tiles) * H,)](out, grad, narrow, delta, query_tiles, H, slots, launch.queries, 16, V)
    query_kernel[(len(query_tiles) * H,)](
        q, kv, pe, narrow, *(_matrix(x, launch.keys, width, launch.bulk) for x, width in ((kv, D), (kv, V), (pe, R))),
        lse, delta, d_q, query_tiles, H, slots, pe.stride(0), scale, **_constants(launch, widths),
    )  # fmt: skip
    launch, d_pe = launches.key, torch.empty(H, T, R, dtype=torch.float32, device=q.device)
    key_kernel[(len(key_tiles) * H,)](
        q, kv, pe, narrow,
        *(_matrix(x, launch.queries, width, launch.bulk) for x, width in ((q, D), (q, R), (narrow, V))),
        lse, delta, *(_vector(x, launch.queries, launch.bulk) for x in (lse, delta)), d_kv, d_pe, key_tiles,
        T, H, slots, pe.stride(0), scale, STAGES=launch.stages, **_constants(launch, widths),
    )  # fmt: skip
    return d_pe


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape), k_pe.new_empty(k_pe.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, kv, k_pe, ctx.scale, ctx.lengths = inputs
    out, lse, row_max = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, row_max)
    ctx.save_for_backward(q, kv, k_pe, out, lse)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.lengths), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(q: Tensor, kv: Tensor, k_pe: Tensor, *, scale: float, lengths: tuple[int, ...]) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    R = k_pe.shape[-1]
    D = q.shape[-1] - R
    V = kv.shape[-1] - D
    if D not in WIDTHS or V not in WIDTHS or R not in (0, *WIDTHS[:-1]):
        return (
            f"head widths of content, shared part and values are {D}, {R} and {V}, not among {WIDTHS} (shared: 0 to 64)"
        )
    if kv.dtype != q.dtype or k_pe.dtype != q.dtype:
        return f"queries are {q.dtype}, keys and values {kv.dtype}, shared keys {k_pe.dtype}"
    if not scale > 0:
        return f"the scale must be positive, not {scale}"
    return float_refusal(q)


def call(q: Tensor, kv: Tensor, k_pe: Tensor, *, scale: float, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.attention.mla_attention`."""
    out, _, row_max = _forward(q, kv, k_pe, scale, lengths)
    return out, row_max
