"""The triton tier of `tercet.ops.kda.fused_kda`: kernels behind one `torch.library` operator with its own gradient.

Forward is two launches, `triton_prepare` (parallel over tiles) and `triton_recurrence` (serial over tiles). Backward
keeps only the raw inputs and a state at every slab boundary; `triton_backward` redoes a slab of tiles at a time, last
slab first, so the states and adjoints it holds do not grow with the length.

Shapes: T flat tokens, N sequences, X tiles of C = 16 tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tercet.ops.gpu import float_refusal, operator
from tercet.ops.kda.triton_backward import rebuild_states, tile_gradients, walk_back
from tercet.ops.kda.triton_math import LOG2E, TILE
from tercet.ops.kda.triton_plan import Tiles, plan_slabs, plan_tiles, slab_count
from tercet.ops.kda.triton_prepare import prepare_tile
from tercet.ops.kda.triton_recurrence import walk_tiles
from tercet.ops.packing import sequence_lengths

WIDTHS = (16, 32, 64, 128)
"""Key and value widths the kernels are built for."""
BLOCK_V = 64
"""Value channels a recurrence program owns: one warp group's rows of the state."""
PREPARE = {"VECTOR": 0, "num_warps": 2}
WALK = {"STAGES": 5, "num_warps": 4}
WALK_BACK = {"STAGES": 3, "num_warps": 4}
GRADIENTS = {"num_warps": 4}


def declines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str | None:
    """Return why these inputs cannot run here, or None."""
    if lower_bound is None:
        return "the softplus gate is unbounded, and 16-token tiles need every gate ≥ −5 to stay in range"
    if refusal := float_refusal(q, k, v, z, b):
        return refusal
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"key and value widths must be one of {WIDTHS}, not {q.shape[-1]} and {v.shape[-1]}"
    if not q.numel():
        return "there are no tokens or no heads"
    if q.shape[0] > 65_535 or (cu_seqlens is not None and len(cu_seqlens) > 65_536):
        return "there are more than 65,535 sequences"
    others = [x for x in (k, v, z, b, A_log, dt_bias, state, cu_seqlens) if x is not None]
    if any(x.device != q.device for x in others if x is not cu_seqlens):
        return "the tensors are on different devices"
    return None


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.kda.fused_kda`."""
    assert lower_bound is not None
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    rows = [x.flatten(0, 1) for x in (q, k, v, z, b)]
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, A_log, dt_bias, state) if x is not None)
    o, final, _, _ = _forward(*rows, A_log, dt_bias, state, lengths, scale, lower_bound, trained)
    return o.view(v.shape), final


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor z, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? state"


@operator(
    "tercet::fused_kda",
    schema=f"({_INPUTS}, int[] lengths, float scale, float lower_bound, bool trained) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    lengths: tuple[int, ...],
    scale: float,
    lower_bound: float,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward on flat tokens ``[T, H, …]``.

    Returns:
        o, the final state ``[N, H, V, K]``, the state at every slab boundary (empty unless *trained*), and the bits of
        the largest ``|v|`` per sequence and head.
    """
    rows = unit_stride(q, k, v, z, b)
    plan = plan_tiles(tuple(lengths), q.device)
    work = prepare(rows, A_log, dt_bias, plan, rows[2], scale, lower_bound, save=False)
    slabs = plan_slabs(plan, q.shape[1]) if trained else ((0, plan.total),)
    exports = _slab_ends(plan, slabs) if len(slabs) > 1 else None
    o, final, boundaries = walk(rows[2], work, plan, state, exports, len(slabs) - 1)
    return o, final, boundaries, work[4]


@_forward.register_fake
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, lengths, _, _, trained = others
    H, V, K, N = *v.shape[1:], q.shape[2], len(lengths)
    boundaries = slab_count(sum(-(-n // TILE) for n in lengths), H) - 1 if trained else 0
    return (
        v.new_empty(v.shape),
        v.new_empty(N, H, V, K, dtype=torch.float32),
        v.new_empty(boundaries, H, V, K, dtype=torch.float32),
        v.new_empty(N, H, dtype=torch.int32),
    )


@operator(
    "tercet::fused_kda_backward",
    schema=f"(Tensor d_o, Tensor d_final, {_INPUTS}, Tensor boundaries, Tensor v_max, int[] lengths, float scale, "
    f"float lower_bound) -> ({', '.join(['Tensor'] * 8)})",
)
def _backward(
    d_o: Tensor,
    d_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    boundaries: Tensor,
    v_max: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    lower_bound: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, z, b, A_log, dt_bias and the initial state."""
    rows = unit_stride(q, k, v, z, b)
    (d_o,) = unit_stride(d_o)
    plan = plan_tiles(tuple(lengths), q.device)
    carry = d_final.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in rows]
    H, K = q.shape[1:]
    d_bias = torch.empty(plan.total, H, K, dtype=torch.float32, device=q.device)
    d_slope = torch.empty(plan.total, H, dtype=torch.float32, device=q.device)
    d_write = torch.empty(
        v.shape[2] // min(BLOCK_V, v.shape[2]), plan.total, H, TILE, dtype=torch.float32, device=q.device
    )
    work = prepare(rows, A_log, dt_bias, plan, d_o, scale, lower_bound, save=True)
    for slab, (low, high) in reversed(list(enumerate(plan_slabs(plan, H)))):
        boundary = boundaries[slab - 1] if slab else carry
        kept = _walk_slab(rows[2], d_o, grads[2], d_write, work, v_max, plan, state, boundary, carry, low, high)
        _gradients(rows, A_log, dt_bias, d_o, grads, kept, (d_bias, d_slope), plan, scale, lower_bound, low, high)
    grads[4].copy_(_write_gradient(d_write.sum(0), b, plan))
    return (*grads, d_slope.sum(0).to(A_log.dtype), d_bias.sum(0).to(dt_bias.dtype), carry)


@_backward.register_fake
def _gradient_shapes(
    d_o: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    A_log, dt_bias = others[:2]
    rows = (x.new_empty(x.shape) for x in (q, k, v, z, b))
    return (*rows, A_log.new_empty(A_log.shape), dt_bias.new_empty(dt_bias.shape), d_final.new_empty(d_final.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, lengths, scale, lower_bound, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.constants = lengths, scale, lower_bound
    ctx.mark_non_differentiable(*output[2:])


def _gradient(ctx: Any, d_o: Tensor, d_final: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    lengths, scale, lower_bound = ctx.constants
    saved = ctx.saved_tensors  # unpacked once: checkpointing allows no second time
    state = saved[7]
    grads_of = torch.ops.tercet.fused_kda_backward
    *grads, d_state = grads_of(d_o, d_final, *saved, lengths, scale, lower_bound)
    return (*grads, None if state is None else d_state.to(state.dtype), None, None, None, None)


_forward.register_autograd(_gradient, setup_context=_setup)


def unit_stride(*rows: Tensor) -> tuple[Tensor, ...]:
    """Copy what has a strided last axis; every other layout is read in place."""
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in rows)


def prepare(
    rows: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    plan: Tiles,
    ranged: Tensor,
    scale: float,
    lower_bound: float,
    *,
    save: bool,
) -> tuple[Tensor, ...]:
    """Run `prepare_tile`: its workspace, the largest magnitude of *ranged* by sequence and head, β (with *save*)."""
    q, k, _, z, b = rows
    H, K = q.shape[1:]
    X = plan.total
    wide = q.new_empty(X, H, 2, TILE, K, dtype=torch.float16)
    k_hat = q.new_empty(X, H, TILE, K, dtype=torch.float16)
    small = q.new_empty(X, H, 5 if save else 2, TILE, TILE, dtype=torch.float16)
    decay = q.new_empty(X, H, K, dtype=torch.float32)
    largest = q.new_zeros(len(plan.counts), H, dtype=torch.int32)
    write = q.new_empty(X if save else 0, H, TILE, dtype=torch.float32)
    strides = [n for x in (q, k, ranged, z) for n in x.stride()[:2]]
    prepare_tile[(H * X,)](
        *(q, k, ranged, z, b, A_log, dt_bias.contiguous(), plan.tiles, wide, k_hat, small, decay, largest, write),
        *(*strides, b.stride(0), scale, lower_bound * LOG2E),
        **dict(H=H, K=K, V=ranged.shape[2], C=TILE, SAVE=save, LOG2E=LOG2E, **PREPARE),
    )
    return wide, k_hat, small, decay, largest, write


def walk(
    v: Tensor, work: tuple[Tensor, ...], plan: Tiles, state: Tensor | None, exports: Tensor | None, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `walk_tiles`: output, final state, and the states asked for by *exports*."""
    T, H, V = v.shape
    K, N = work[3].shape[-1], len(plan.counts)
    o = v.new_empty(T, H, V)
    final = v.new_empty(N, H, V, K, dtype=torch.float32)
    exported = v.new_empty(slots, H, V, K, dtype=torch.float32)
    block = min(BLOCK_V, V)
    walk_tiles[(V // block, H, N)](
        *(v, o, *work[:5], plan.sequences, state if state is None else state.contiguous(), final, exports, exported),
        *v.stride()[:2],
        H=H,
        K=K,
        V=V,
        BV=block,
        C=TILE,
        MATRICES=work[2].shape[2],
        **dict(HAS_INITIAL=state is not None, HAS_EXPORTS=exports is not None, **WALK),
    )
    return o, final, exported


def _walk_slab(
    v: Tensor,
    d_o: Tensor,
    d_v: Tensor,
    d_write: Tensor,
    work: tuple[Tensor, ...],
    v_max: Tensor,
    plan: Tiles,
    state: Tensor | None,
    boundary: Tensor,
    carry: Tensor,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return S before and D after every tile of a slab, e, and β; fills its part of *d_v*, *d_write*; moves *carry*."""
    *planes, d_o_max, write = work
    H, V = v.shape[1:]
    K = work[3].shape[-1]
    first, last = plan.sequences_of(low, high)
    states, adjoints = (v.new_empty(high - low, H, V, K, dtype=torch.bfloat16) for _ in range(2))
    errors = v.new_empty(high - low, H, TILE, V, dtype=torch.bfloat16)
    block = min(BLOCK_V, V)
    grid = (V // block, H, last - first)
    shape = {"H": H, "K": K, "V": V, "BV": block, "C": TILE}
    span = (first, low, high)
    initial = state if state is None else state.contiguous()
    rebuild_states[grid](
        *(v, *planes, v_max, plan.sequences, initial, boundary, write, states, errors, *v.stride()[:2], *span),
        **dict(HAS_INITIAL=state is not None, **shape, **WALK),
    )
    walk_back[grid](
        *(d_o, d_v, *planes, d_o_max, plan.sequences, write, errors, carry, adjoints, d_write, *d_o.stride()[:2]),
        *(*span, plan.total),
        **dict(**shape, **WALK_BACK),
    )
    return states, adjoints, errors, write


def _write_gradient(d_beta: Tensor, b: Tensor, plan: Tiles) -> Tensor:
    """Turn dβ ``[X, H, C]`` of tiles into the gradient of the write logits ``[T, H]``."""
    d_beta_TH = d_beta.transpose(1, 2).flatten(0, 1).index_select(0, plan.slots)
    return d_beta_TH * torch.sigmoid(b.float()) * torch.sigmoid(-b.float())


def _gradients(
    rows: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    d_o: Tensor,
    grads: list[Tensor],
    kept: tuple[Tensor, ...],
    parts: tuple[Tensor, Tensor],
    plan: Tiles,
    scale: float,
    lower_bound: float,
    low: int,
    high: int,
) -> None:
    """Run `tile_gradients` on tiles [low, high)."""
    q, k, v, z, _ = rows
    d_q, d_k, d_v, d_z, _ = grads
    H, K = q.shape[1:]
    strides = [n for x in (q, k, z, d_o) for n in x.stride()[:2]]
    tile_gradients[(H * (high - low),)](
        *(q, k, z, A_log, dt_bias.contiguous(), d_o, d_v, plan.tiles, *kept, d_q, d_k, d_z, *parts, *strides),
        *(scale, lower_bound * LOG2E, low),
        **dict(H=H, K=K, V=v.shape[2], C=TILE, LOG2E=LOG2E, **GRADIENTS),
    )


@lru_cache(maxsize=64)
def _slab_ends(plan: Tiles, slabs: tuple[tuple[int, int], ...]) -> Tensor:
    """Export table: the last tile of every slab but the last writes its state to that slab's slot."""
    slots = torch.full((plan.total,), -1, dtype=torch.int32)
    for slot, (_, high) in enumerate(slabs[:-1]):
        slots[high - 1] = slot
    return slots.to(plan.tiles.device)
