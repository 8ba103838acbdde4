"""The triton tier of `tercet.ops.kda.fused_kda`: kernels behind one `torch.library` operator with its own gradient.

Forward is two launches, `triton_prepare` (parallel over tiles) and `triton_recurrence` (serial over tiles). Backward
keeps only the raw inputs and a state at every slab boundary; `triton_backward` redoes a slab of tiles at a time, last
slab first, so the states and adjoints it holds do not grow with the length. Where heads × sequences cannot fill the
GPU, long sequences are walked in pieces side by side, whose start states `triton_fold` finds first.

Shapes: T flat tokens, N sequences, X tiles of C = 16 tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.ops.gpu import capped, chip, float_refusal, operator
from tercet.ops.kda.triton_backward import rebuild_states, tile_gradients, walk_back
from tercet.ops.kda.triton_fold import chain, fold, fold_adjoint
from tercet.ops.kda.triton_math import LOG2E, TILE
from tercet.ops.kda.triton_plan import (
    BLOCK_V,
    Pieces,
    Slab,
    Tiles,
    count_slots,
    plan_pieces,
    plan_splits,
    plan_tiles,
    tile_counts,
    wanted_pieces,
)
from tercet.ops.kda.triton_prepare import prepare_tile
from tercet.ops.kda.triton_recurrence import walk_tiles
from tercet.ops.packing import sequence_lengths

WIDTHS = (16, 32, 64, 128)
"""Key and value widths the kernels are built for."""
PREPARE = {"VECTOR": 0, "num_warps": 2}
PREPARE_BOUNDED = PREPARE | capped(168)
WALK = {"STAGES": 4, "num_warps": 4}
WALK_BACK = {"STAGES": 3, "num_warps": 4}
GRADIENTS = {"BV": 32, "STAGES": 3, "num_warps": 4}


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
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    inputs = q, k, v, z, b, A_log, dt_bias, state
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in inputs if x is not None)
    o, final, *_ = _forward(*inputs, lengths, wanted_pieces(), scale, lower_bound, trained)
    return o, final


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor z, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? state"


@operator(
    "tercet::fused_kda",
    schema=f"({_INPUTS}, int[] lengths, int pieces, float scale, float? lower_bound, bool trained) -> "
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
    pieces: int,
    scale: float,
    lower_bound: float | None,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward on tokens ``[B, T, H, …]``; *pieces* as in `use_pieces`.

    Returns:
        o, the final state ``[N, H, V, K]``, the bits of the largest ``|v|`` per sequence and head, and the state at
        every inner edge between pieces.
    """
    rows = unit_stride(*(x.flatten(0, 1) for x in (q, k, v, z, b)))
    tiles = plan_tiles(tuple(lengths), q.device)
    plan = cut(lengths, pieces, v, q.shape[3], trained)
    work = prepare(rows, A_log, dt_bias, tiles, rows[2], scale, lower_bound, save=False)
    o, final, edges = walk(rows[2], work, plan, state, len(lengths))
    return o.view(v.shape), final, work[4], edges


@_forward.register_fake
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, lengths, pieces, _, _, trained = others
    H, V, K, N = *v.shape[2:], q.shape[3], len(lengths)
    slots = count_slots(tuple(lengths), _splits(lengths, pieces, v, K), H, trained)
    return (
        v.new_empty(v.shape),
        v.new_empty(N, H, V, K, dtype=torch.float32),
        v.new_empty(N, H, dtype=torch.int32),
        v.new_empty(slots, H, V, K, dtype=torch.float32),
    )


@operator(
    "tercet::fused_kda_backward",
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUTS}, Tensor v_max, Tensor edges, "
    f"int[] lengths, int pieces, float scale, float? lower_bound) -> ({', '.join(['Tensor'] * 8)})",
)
def _backward(
    d_o: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    v_max: Tensor,
    edges: Tensor,
    lengths: tuple[int, ...],
    pieces: int,
    scale: float,
    lower_bound: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, z, b, A_log, dt_bias and the initial state; empty for that where there is none."""
    rows = unit_stride(*(x.flatten(0, 1) for x in (q, k, v, z, b)))
    (d_o,) = unit_stride(d_o.flatten(0, 1))
    H, K = q.shape[2:]
    tiles = plan_tiles(tuple(lengths), q.device)
    plan = cut(lengths, pieces, v, K, True)
    d_final = None if d_final is None else d_final.to(torch.float32).contiguous()
    d_state, d_edges = _state_gradient(state, d_final, v), torch.empty_like(edges)
    wanted = [x.new_empty(x.shape) for x in (q, k, v, z, b)]
    grads = [x.flatten(0, 1) for x in wanted]
    d_bias = torch.empty(tiles.total, H, K, dtype=torch.float32, device=q.device)
    d_slope = torch.empty(tiles.total, H, dtype=torch.float32, device=q.device)
    blocks = v.shape[3] // min(BLOCK_V, v.shape[3])
    d_write = torch.empty(blocks, tiles.total, H, TILE, dtype=torch.float32, device=q.device)
    work = prepare(rows, A_log, dt_bias, tiles, d_o, scale, lower_bound, save=True)
    initial = state if state is None else state.contiguous()
    for slab in reversed(plan.slabs):
        if len(slab.folds):
            transitions = edges.new_empty(plan.slots, H, K, K)
            fold_adjoint(d_o, work, slab.folds, d_final, d_edges, transitions)
            chain(d_edges, transitions, slab.chains, reverse=True)
        adjoints = d_final, d_edges, d_state
        kept = _walk_slab(rows[2], d_o, grads[2], d_write, work, v_max, slab, initial, edges, adjoints)
        _gradients(rows, A_log, dt_bias, d_o, grads, kept, d_write, (d_bias, d_slope), tiles, scale, lower_bound, slab)
    return (*wanted, d_slope.sum(0).to(A_log.dtype), d_bias.sum(0).to(dt_bias.dtype), d_state)


@_backward.register_fake
def _gradient_shapes(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    A_log, dt_bias, state = others[:3]
    rows = (x.new_empty(x.shape) for x in (q, k, v, z, b))
    d_state = v.new_empty(0 if state is None else state.shape, dtype=torch.float32)
    return (*rows, A_log.new_empty(A_log.shape), dt_bias.new_empty(dt_bias.shape), d_state)


def _state_gradient(state: Tensor | None, d_final: Tensor | None, v: Tensor) -> Tensor:
    """Return what the walk fills with the initial states' gradient: a sequence without tokens passes d_final on."""
    if state is None:
        return v.new_empty(0, dtype=torch.float32)
    return torch.zeros_like(state, dtype=torch.float32).contiguous() if d_final is None else d_final.clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, lengths, pieces, scale, lower_bound, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.constants = lengths, pieces, scale, lower_bound
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # unpacked once: checkpointing allows no second time
    state = saved[7]
    if d_o is None:
        d_o = torch.zeros(saved[2].shape, dtype=saved[2].dtype, device=saved[2].device)
    *grads, d_state = _backward(d_o, d_final, *saved, *ctx.constants)
    return (*grads, None if state is None else d_state.to(state.dtype), None, None, None, None, None)


_forward.register_autograd(_gradient, setup_context=_setup)


def unit_stride(*rows: Tensor) -> tuple[Tensor, ...]:
    """Copy what has a strided last axis; every other layout is read in place."""
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in rows)


def _splits(lengths: tuple[int, ...], pieces: int, v: Tensor, width: int) -> tuple[int, ...]:
    """Return into how many pieces every sequence is cut."""
    if pieces:
        return (pieces,) * len(lengths)
    counts = tile_counts(tuple(lengths))
    H, V = v.shape[-2:]
    blocks, fold_blocks = V // min(BLOCK_V, V), (V + width) // min(BLOCK_V, V, width)
    return plan_splits(counts, H, blocks, fold_blocks, chip(v.device).multiprocessors)


def cut(lengths: tuple[int, ...], pieces: int, v: Tensor, width: int, trained: bool) -> Pieces:
    """Return the pieces of a batch with values *v* ``[…, H, V]`` and keys of *width*; *pieces* as in `use_pieces`."""
    return plan_pieces(tuple(lengths), _splits(lengths, pieces, v, width), v.shape[-2], trained, v.device)


def prepare(
    rows: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    plan: Tiles,
    ranged: Tensor,
    scale: float,
    lower_bound: float | None,
    *,
    save: bool,
) -> tuple[Tensor, ...]:
    """Run `prepare_tile`: its workspace, the largest magnitude of *ranged* by sequence and head, and β and norms."""
    q, k, _, z, b = rows
    H, K = q.shape[1:]
    X = plan.total
    wide = q.new_empty(X, H, 2, TILE, K, dtype=torch.float16)
    k_hat = q.new_empty(X, H, TILE, K, dtype=torch.float16)
    small = q.new_empty(X, H, 5 if save else 2, TILE, TILE, dtype=torch.float16)
    decay = q.new_empty(X, H, K, dtype=torch.float32)
    largest = q.new_zeros(len(plan.counts), H, dtype=torch.int32)
    write = q.new_empty(X if save else 0, H, 3, TILE, dtype=torch.float32)
    strides = [n for x in (q, k, ranged, z) for n in x.stride()[:2]]
    prepare_tile[(H * X,)](
        *(q, k, ranged, z, b, A_log, dt_bias.contiguous(), plan.tiles, wide, k_hat, small, decay, largest, write),
        *(*strides, b.stride(0), scale, (lower_bound or 0.0) * LOG2E),
        H=H,
        K=K,
        V=ranged.shape[2],
        C=TILE,
        BOUNDED=lower_bound is not None,
        SAVE=save,
        LOG2E=LOG2E,
        **(PREPARE if lower_bound is None else PREPARE_BOUNDED),
    )
    return wide, k_hat, small, decay, largest, write


def walk(
    v: Tensor,
    work: tuple[Tensor, ...],
    plan: Pieces,
    state: Tensor | None,
    sequences: int,
    exports: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `walk_tiles`, where something is split after finding every piece's state with `fold` and `chain`.

    *exports* is a table of slots by tile and what receives the states, both as in `walk_tiles`.

    Returns:
        Output, final state, and the states at the edges of *plan*.
    """
    T, H, V = v.shape
    K = work[3].shape[-1]
    o = v.new_empty(T, H, V)
    final = v.new_empty(sequences, H, V, K, dtype=torch.float32)
    edges = v.new_empty(plan.slots, H, V, K, dtype=torch.float32)
    initial = state if state is None else state.contiguous()
    if len(plan.folds):
        transitions = v.new_empty(plan.slots, H, K, K, dtype=torch.float32)
        fold(v, work, plan.folds, initial, edges, transitions)
        chain(edges, transitions, plan.chains)
    table, exported = (plan.exports, edges) if exports is None else exports
    block = min(BLOCK_V, V)
    walk_tiles[(V // block, H, len(plan.runs))](
        *(v, o, *work[:5], plan.runs, initial, edges, final, table, exported, *v.stride()[:2]),
        H=H,
        K=K,
        V=V,
        BV=block,
        C=TILE,
        MATRICES=work[2].shape[2],
        HAS_INITIAL=state is not None,
        **dict(HAS_STARTS=len(plan.folds) > 0, HAS_EXPORTS=table is not None, EXACT=v.dtype == torch.float32, **WALK),
    )
    return o, final, edges


def _walk_slab(
    v: Tensor,
    d_o: Tensor,
    d_v: Tensor,
    d_write: Tensor,
    work: tuple[Tensor, ...],
    v_max: Tensor,
    slab: Slab,
    initial: Tensor | None,
    edges: Tensor,
    adjoints: tuple[Tensor | None, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Return S before and D after every tile of a slab, e, β and norms, and γ_C.

    Fills its part of *d_v*, *d_write* and *adjoints*, which are those of the final states, of the edges and of the
    initial states.
    """
    *planes, d_o_max, write = work
    H, V = v.shape[1:]
    K = work[3].shape[-1]
    count = slab.high - slab.low
    states, after = (v.new_empty(count, H, V, K, dtype=torch.bfloat16) for _ in range(2))
    errors = v.new_empty(count, H, TILE, V, dtype=torch.bfloat16)
    block = min(BLOCK_V, V)
    grid = (V // block, H, len(slab.pieces))
    shape = {"H": H, "K": K, "V": V, "BV": block, "C": TILE, "EXACT": v.dtype == torch.float32}
    rebuild_states[grid](
        *(v, *planes, v_max, slab.pieces, initial, edges, write, states, errors, *v.stride()[:2], slab.low),
        **dict(HAS_INITIAL=initial is not None, HAS_STARTS=len(edges) > 0, **shape, **WALK),
    )
    walk_back[grid](
        *(d_o, d_v, *planes, d_o_max, slab.pieces, write, errors, *adjoints, after, d_write, *d_o.stride()[:2]),
        *(slab.low, d_write.shape[1]),
        **dict(HAS_FINAL=adjoints[0] is not None, HAS_ENDS=len(edges) > 0, HAS_INITIAL=initial is not None, **shape),
        **WALK_BACK,
    )
    return states, after, errors, write, planes[3]


def _gradients(
    rows: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    d_o: Tensor,
    grads: list[Tensor],
    kept: tuple[Tensor, ...],
    d_write: Tensor,
    parts: tuple[Tensor, Tensor],
    tiles: Tiles,
    scale: float,
    lower_bound: float | None,
    slab: Slab,
) -> None:
    """Run `tile_gradients` on the tiles of a slab."""
    q, k, v, z, b = rows
    d_q, d_k, d_v, d_z, d_b = grads
    H, K = q.shape[1:]
    V = v.shape[2]
    strides = [n for x in (q, k, z, d_o) for n in x.stride()[:2]]
    tile_gradients[(H * (slab.high - slab.low),)](
        *(q, k, z, b, A_log, dt_bias.contiguous(), d_o, d_v, tiles.tiles, *kept, d_write, d_q, d_k, d_z, d_b, *parts),
        *(*strides, b.stride(0), scale, (lower_bound or 0.0) * LOG2E, slab.low, d_write.shape[1]),
        H=H,
        K=K,
        V=V,
        C=TILE,
        SHARES=d_write.shape[0],
        BOUNDED=lower_bound is not None,
        LOG2E=LOG2E,
        **GRADIENTS | {"BV": min(GRADIENTS["BV"], V)},
    )
