"""KDA decode in one launch a layer: short convolution, SiLU, L2 norm, gate, recurrence, output norm and output gate.

One program owns one head of one request and keeps its whole state ``[V, K]`` in registers; the state is read once and
written once (64 KiB each way in fp32), which is the cost, and everything else rides along.

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
from tercet.ops.kda.triton_math import LOG2E, exp2, sigmoid

WIDTHS = (16, 32, 64, 128)


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
def _keep(state, conv_state, matrix, S_VK, rows, stride_row, stride_part, histories):
    """Write the matrix and the newest rows of q, k and v to a slot."""
    tl.store(state + matrix, S_VK.to(state.dtype.element_ty))
    for part in tl.static_range(3):
        for age in tl.static_range(3):
            at = conv_state + rows + part * stride_part + age * stride_row
            tl.store(at, histories[part][age].to(conv_state.dtype.element_ty))


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
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_COMMITS: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Run the window of one (head, request); see the module. Rows are contiguous ``[B, W, H, D]``."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0 or slot == null_slot:
        return
    lane = tl.arange(0, D)
    channel = head * D + lane
    matrix = head * stride_head + lane[:, None] * D + lane[None, :]
    S_VK = tl.load(state + slot * stride_slot + matrix).to(tl.float32)
    rows = head * stride_conv_head + lane
    at = slot * stride_conv_slot + rows
    q_old = _history(conv_state, at, stride_conv_row)
    k_old = _history(conv_state, at + stride_conv_part, stride_conv_row)
    v_old = _history(conv_state, at + 2 * stride_conv_part, stride_conv_row)
    slope = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + channel).to(tl.float32)
    norm = tl.load(norm_weight + lane).to(tl.float32)
    commit = tl.load(commits + request) if HAS_COMMITS else W

    for t in range(W):
        row = (request * W + t) * (H * D) + channel
        q_K, q_old = _convolve(q, q_weight, row, channel, q_old, LOG2E)
        k_K, k_old = _convolve(k, k_weight, row, channel, k_old, LOG2E)
        v_V, v_old = _convolve(v, v_weight, row, channel, v_old, LOG2E)
        q_K = q_K * (tl.rsqrt(tl.sum(q_K * q_K, 0) + 1e-6) * scale)
        k_K = k_K * tl.rsqrt(tl.sum(k_K * k_K, 0) + 1e-6)
        biased = tl.load(z + row).to(tl.float32) + bias
        if BOUNDED:
            decay_K = exp2(floor2 * sigmoid(slope * biased, LOG2E))
        else:
            softplus = tl.maximum(biased, 0.0) + tl.log2(1.0 + exp2(-LOG2E * tl.abs(biased))) / LOG2E
            decay_K = exp2(-LOG2E * slope * softplus)
        beta = sigmoid(tl.load(b + (request * W + t) * H + head).to(tl.float32), LOG2E)
        S_VK = S_VK * decay_K[None, :]
        u_V = beta * (v_V - tl.sum(S_VK * k_K[None, :], 1))
        S_VK += u_V[:, None] * k_K[None, :]
        o_V = tl.sum(S_VK * q_K[None, :], 1).to(o.dtype.element_ty).to(tl.float32)
        o_V = o_V * tl.rsqrt(tl.sum(o_V * o_V, 0) / D + epsilon) * norm
        o_V = o_V * sigmoid(tl.load(gate + row).to(tl.float32), LOG2E)
        tl.store(o + row, o_V.to(o.dtype.element_ty))
        if t + 1 == commit:
            old = (q_old, k_old, v_old)
            at = slot * stride_conv_slot + rows
            base = slot * stride_slot + matrix
            _keep(state, conv_state, base, S_VK, at, stride_conv_row, stride_conv_part, old)
            if HAS_COPIES:
                copy = tl.load(copies + request).to(tl.int64)
                if copy >= 0:
                    at = copy * stride_conv_slot + rows
                    base = copy * stride_slot + matrix
                    _keep(state, conv_state, base, S_VK, at, stride_conv_row, stride_conv_part, old)


DECODE = {"num_warps": 4}
"""Measured: 8 and 16 warps take 1.8 and 1.9 times as long, for one program then fills a multiprocessor's registers."""


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
    o = torch.zeros_like(rows[2])
    if not o.numel():
        return o
    decode_window[(H, B)](
        *(*rows, *weights, A_log, dt_bias.contiguous(), norm_weight, state, conv_state, slots, commits, copies, o),
        *(*state.stride()[:2], *conv_state.stride()[:4], scale, (lower_bound or 0.0) * LOG2E, eps, null_slot),
        H=H,
        D=D,
        W=W,
        BOUNDED=lower_bound is not None,
        LOG2E=LOG2E,
        **{"HAS_COMMITS": commits is not None, "HAS_COPIES": copies is not None, **DECODE},
    )
    return o
