"""KDA decode in one launch a layer: short convolution, SiLU, L2 norm, gate, recurrence, output norm and output gate.

A program owns `BV` value channels of one head of one request and keeps that part of the state ``[BV, K]`` in registers;
the state is read once and written once (64 KiB a head each way in fp32), which is the cost, and everything else rides
along. Two programs share a head: half a state leaves room for three programs on a multiprocessor, so that one loads
while another computes. The one that finishes second takes both halves of the output through norm and gate and writes
the rows of q and k that both have read. Which one that is changes nothing in the numbers.

A window of more than one token serves speculative decoding: the state is written after the first `commit` tokens only,
and the rest of the window continues from it on chip. That is replay: the next call feeds the accepted tokens again, and
no per-token snapshot of the state ever exists.

Shapes: B requests, W tokens of window, H heads, D channels a head, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import float_refusal
from tercet.ops.kda.triton_gate import softplus_gate
from tercet.ops.kda.triton_math import LOG2E, exp2, sigmoid

WIDTHS = (16, 32, 64, 128)
_SHARED_FROM = 64
"""Head width from which two programs share a head."""


@triton.jit
def _history(conv_state, at, stride_row):
    """The three newest rows, oldest first."""
    old0 = tl.load(conv_state + at).to(tl.float32)
    old1 = tl.load(conv_state + at + stride_row).to(tl.float32)
    return old0, old1, tl.load(conv_state + at + 2 * stride_row).to(tl.float32)


@triton.jit
def _convolve(x, weight, at, channel, old, LOG2E: tl.constexpr):
    """Return SiLU of the filtered row, rounded to the input's dtype as a stored row would be, and the new history."""
    new = tl.load(x + at)
    taps = weight + channel * 4
    total = tl.load(taps) * old[0] + tl.load(taps + 1) * old[1] + tl.load(taps + 2) * old[2]
    total += tl.load(taps + 3) * new.to(tl.float32)
    return (total * sigmoid(total, LOG2E)).to(new.dtype).to(tl.float32), (old[1], old[2], new.to(tl.float32))


@triton.jit
def _keep_rows(conv_state, at, stride_row, history):
    """Write the newest three rows of one projection."""
    for age in tl.static_range(3):
        tl.store(conv_state + at + age * stride_row, history[age].to(conv_state.dtype.element_ty))


@triton.jit
def _keep_matrix(pointers, S_VK):
    tl.store(pointers, S_VK.to(pointers.dtype.element_ty))


@triton.jit
def _through_memory(pointers, x):
    """Return *x* as loaded from *pointers*: computed once, instead of again by every thread that needs it elsewhere.

    Left alone, the compiler repeats the convolution of v in the layout of the matrix: 16 rows a thread instead of one.
    """
    tl.store(pointers, x.to(pointers.dtype.element_ty))
    tl.debug_barrier()
    return tl.load(pointers).to(tl.float32)


@triton.jit
def decode_window(
    q,
    k,
    v,
    z,
    b,
    gate,
    q_weight,
    k_weight,
    v_weight,
    A_log,
    dt_bias,
    norm_weight,
    state,
    conv_state,
    slots,
    commits,
    copies,
    o,
    arrivals,
    stride_slot,
    stride_head,
    stride_conv_slot,
    stride_conv_row,
    stride_conv_part,
    stride_conv_head,
    scale,
    floor2,
    epsilon,
    null_slot,
    H: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_COMMITS: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Run the window of one (part of a head, request); see the module. Rows are contiguous ``[B, W, H, D]``."""
    PARTS: tl.constexpr = D // BV
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0 or slot == null_slot:
        return
    lane, own = tl.arange(0, D), part * BV + tl.arange(0, BV)
    channel = head * D + lane
    matrix = tl.arange(0, BV)[:, None] * D + lane[None, :]
    head_state = state + head * stride_head + part * (BV * D)
    S_VK = tl.load(head_state + slot * stride_slot + matrix).to(tl.float32)
    rows = head * stride_conv_head
    at = slot * stride_conv_slot + rows
    q_old = _history(conv_state, at + lane, stride_conv_row)
    k_old = _history(conv_state, at + stride_conv_part + lane, stride_conv_row)
    v_old = _history(conv_state, at + 2 * stride_conv_part + own, stride_conv_row)
    slope = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + channel).to(tl.float32)
    commit = tl.load(commits + request) if HAS_COMMITS else W
    copy = tl.load(copies + request).to(tl.int64) if HAS_COPIES else tl.full([], -1, tl.int64)
    q_kept, k_kept = q_old, k_old

    for t in range(W):
        row = (request * W + t) * (H * D) + head * D
        q_K, q_old = _convolve(q, q_weight, row + lane, channel, q_old, LOG2E)
        k_K, k_old = _convolve(k, k_weight, row + lane, channel, k_old, LOG2E)
        v_V, v_old = _convolve(v, v_weight, row + own, head * D + own, v_old, LOG2E)
        v_V = _through_memory(o + row + own, v_V)
        q_K = q_K * (tl.rsqrt(tl.sum(q_K * q_K, 0) + 1e-6) * scale)
        k_K = k_K * tl.rsqrt(tl.sum(k_K * k_K, 0) + 1e-6)
        biased = tl.load(z + row + lane).to(tl.float32) + bias
        if BOUNDED:
            decay_K = exp2(floor2 * sigmoid(slope * biased, LOG2E))
        else:
            decay_K = exp2(softplus_gate(biased, slope, LOG2E))
        beta = sigmoid(tl.load(b + (request * W + t) * H + head).to(tl.float32), LOG2E)
        S_VK = S_VK * decay_K[None, :]
        u_V = beta * (v_V - tl.sum(S_VK * k_K[None, :], 1))
        S_VK += u_V[:, None] * k_K[None, :]
        if t + 1 == commit:
            q_kept, k_kept = q_old, k_old
            _keep_matrix(head_state + slot * stride_slot + matrix, S_VK)
            _keep_rows(conv_state, at + 2 * stride_conv_part + own, stride_conv_row, v_old)
            if copy >= 0:
                _keep_matrix(head_state + copy * stride_slot + matrix, S_VK)
                to = copy * stride_conv_slot + rows + 2 * stride_conv_part + own
                _keep_rows(conv_state, to, stride_conv_row, v_old)
        o_V = tl.sum(S_VK * q_K[None, :], 1)
        tl.debug_barrier()
        tl.store(o + row + own, o_V.to(o.dtype.element_ty))

    tl.debug_barrier()
    earlier = tl.atomic_add(arrivals + request * H + head, 1, sem="acq_rel") if PARTS > 1 else 0
    if earlier == PARTS - 1:
        tl.debug_barrier()
        norm = tl.load(norm_weight + lane).to(tl.float32)
        for t in range(W):
            row = (request * W + t) * (H * D) + head * D
            o_D = tl.load(o + row + lane, cache_modifier=".cg").to(tl.float32)
            o_D = o_D * tl.rsqrt(tl.sum(o_D * o_D, 0) / D + epsilon) * norm
            o_D = o_D * sigmoid(tl.load(gate + row + lane).to(tl.float32), LOG2E)
            tl.store(o + row + lane, o_D.to(o.dtype.element_ty))
        if commit > 0:
            _keep_rows(conv_state, at + lane, stride_conv_row, q_kept)
            _keep_rows(conv_state, at + stride_conv_part + lane, stride_conv_row, k_kept)
            if copy >= 0:
                to = copy * stride_conv_slot + rows + lane
                _keep_rows(conv_state, to, stride_conv_row, q_kept)
                _keep_rows(conv_state, to + stride_conv_part, stride_conv_row, k_kept)


DECODE = {"num_warps": 4, "maxnreg": 168}
"""So many registers that three programs of half a head fit a multiprocessor; measured best on an H200. Eight warps are
slower, and quarters of a head gain nothing over halves."""


def declines(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, gate: Tensor, *, state: Tensor, **others: object
) -> str | None:
    """Return why these inputs cannot run here, or None."""
    if refusal := float_refusal(q, k, v, z, b, gate, state):
        return refusal
    if q.shape[-1] not in WIDTHS:
        return f"the head width must be one of {WIDTHS}, not {q.shape[-1]}"
    if state.stride()[-2:] != (q.shape[-1], 1):
        return "the [value, key] matrix of a slot must be contiguous"
    return None


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    gate: Tensor,
    *,
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    commits: Tensor | None,
    copies: Tensor | None,
    scale: float,
    lower_bound: float | None,
    eps: float,
    null_slot: int,
) -> Tensor:
    """See `tercet.ops.kda.kda_decode`."""
    B, W, H, D = q.shape
    rows = [x.contiguous() for x in (q, k, v, z, b, gate)]
    weights = [w.float().contiguous() for w in conv_weights]
    size = rows[2].numel() * rows[2].element_size()
    zeros = torch.zeros(size + 4 * B * H, dtype=torch.uint8, device=q.device)
    o, arrivals = zeros[:size].view(v.dtype).view(v.shape), zeros[size:].view(torch.int32)
    if not o.numel():
        return o
    block = D // 2 if D >= _SHARED_FROM else D
    decode_window[(H * (D // block), B)](
        *(*rows, *weights, A_log, dt_bias.contiguous(), norm_weight, state, conv_state, slots, commits, copies),
        *(o, arrivals, *state.stride()[:2], *conv_state.stride()[:4]),
        *(scale, (lower_bound or 0.0) * LOG2E, eps, null_slot),
        H=H,
        D=D,
        BV=block,
        W=W,
        BOUNDED=lower_bound is not None,
        LOG2E=LOG2E,
        **{"HAS_COMMITS": commits is not None, "HAS_COPIES": copies is not None, **DECODE},
    )
    return o
