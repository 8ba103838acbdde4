"""KDA decode in one launch a layer: short convolution, SiLU, L2 norm, gate, recurrence, output norm and output gate.

A program owns one head of one request. The state ``[V, K]`` is read once and written once (64 KiB a head each way in
fp32), which is the cost, and everything else rides along: the state passes through the program in tiles of value
channels that run ahead through shared memory, while registers hold only the tile in work. So five programs share a
multiprocessor, some of which always load while others compute, and since a program sees the whole head it norms and
gates the output by itself. (Two programs a head, each with half a state in registers, wait for each other at the end:
a fence behind 32 KiB of stores, which cost a tenth of the time.)

A window of more than one token serves speculative decoding: the state is written after the first `commit` tokens only,
and the rest of the window continues from it on chip. That is replay: the next call feeds the accepted tokens again, and
no per-token snapshot of the state ever exists. What the tokens bring besides the state is computed once, ahead of the
tiles, and kept in memory (2.5 KiB a token and head, read back from the cache).

Shapes: B requests, W tokens of window, H heads, D channels a head, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import capped, float_refusal
from tercet.ops.kda.triton_gate import softplus_gate
from tercet.ops.kda.triton_math import LOG2E, sigmoid
from tercet.ops.triton_math import exp2

WIDTHS = (16, 32, 64, 128)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _history(conv_state, at, stride_row):
    """The three newest rows of one projection, oldest first."""
    old0 = tl.load(conv_state + at).to(tl.float32)
    old1 = tl.load(conv_state + at + stride_row).to(tl.float32)
    return old0, old1, tl.load(conv_state + at + 2 * stride_row).to(tl.float32)


@triton.jit
def _convolve(x, weight, at, channel, old, LOG2E: tl.constexpr):
    """Return SiLU of the filtered row, rounded to the input's dtype as a stored row would be, and the new history."""
    new = tl.load(x + at)
    taps = tl.load(weight + channel[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(taps, [channel.shape[0], 2, 2]))
    oldest, third = tl.split(even)
    second, newest = tl.split(odd)
    total = oldest * old[0] + second * old[1] + third * old[2] + newest * new.to(tl.float32)
    return (total * sigmoid(total, LOG2E)).to(new.dtype).to(tl.float32), (old[1], old[2], new.to(tl.float32))


@triton.jit
def _token(inputs, weights, at, logit, channel, histories, gates, scale, BOUNDED: tl.constexpr, LOG2E: tl.constexpr):
    """What a token needs besides the state — ``s q, k, v, α, β, s q·k`` — and the histories after it."""
    slope, bias, floor2 = gates
    q_K, q_old = _convolve(inputs[0], weights[0], at, channel, histories[0], LOG2E)
    k_K, k_old = _convolve(inputs[1], weights[1], at, channel, histories[1], LOG2E)
    v_V, v_old = _convolve(inputs[2], weights[2], at, channel, histories[2], LOG2E)
    q_square, k_square = tl.reduce((q_K * q_K, k_K * k_K), 0, _add_pairs)
    q_K = q_K * (tl.rsqrt(q_square + 1e-6) * scale)
    k_K = k_K * tl.rsqrt(k_square + 1e-6)
    biased = tl.load(inputs[3] + at).to(tl.float32) + bias
    if BOUNDED:
        decay_K = exp2(floor2 * sigmoid(slope * biased, LOG2E))
    else:
        decay_K = exp2(softplus_gate(biased, slope, LOG2E))
    beta = sigmoid(tl.load(inputs[4] + logit).to(tl.float32), LOG2E)
    return (q_K, k_K, v_V, decay_K, beta, tl.sum(q_K * k_K, 0)), (q_old, k_old, v_old)


@triton.jit
def _put_token(at, token, lane, D: tl.constexpr):
    """Leave a token of a window in memory for all tiles."""
    for i in tl.static_range(4):
        tl.store(at + i * D + lane, token[i])
    tl.store(at + 4 * D, token[4])
    tl.store(at + 4 * D + 1, token[5])


@triton.jit
def _get_token(at, lane, D: tl.constexpr):
    q_K, k_K, v_V = tl.load(at + lane), tl.load(at + D + lane), tl.load(at + 2 * D + lane)
    return q_K, k_K, v_V, tl.load(at + 3 * D + lane), tl.load(at + 4 * D), tl.load(at + 4 * D + 1)


@triton.jit
def _step(S_VK, token, v_V):
    """The recurrence on some rows of the state and of v; returns those rows and the output.

    Both products are taken of the decayed state, in one reduction: ``o = S'q + (k·q) u``.
    """
    q_K, k_K, _, decay_K, beta, overlap = token
    S_VK = S_VK * decay_K[None, :]
    held_V, seen_V = tl.reduce((S_VK * k_K[None, :], S_VK * q_K[None, :]), 1, _add_pairs)
    u_V = beta * (v_V - held_V)
    return S_VK + u_V[:, None] * k_K[None, :], seen_V + overlap * u_V


@triton.jit
def _keep_rows(conv_state, at, stride_row, stride_part, histories):
    """Write the newest three rows of q, k and v."""
    for part in tl.static_range(3):
        for age in tl.static_range(3):
            row = histories[part][age].to(conv_state.dtype.element_ty)
            tl.store(conv_state + at + part * stride_part + age * stride_row, row)


@triton.jit
def _keep_tile(pointers, S_VK):
    tl.store(pointers, S_VK.to(pointers.dtype.element_ty))


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
    tokens,
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
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
    BOUNDED: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Run the window of one (head, request); see the module. Rows are contiguous ``[B, W, H, D]``."""
    BV: tl.constexpr = ROWS if ROWS < D else D
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, D)
    channel = head * D + lane
    row = request * (W * H * D) + channel
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0 or slot == null_slot:
        for t in range(W):
            tl.store(o + row + t * (H * D), tl.zeros([D], o.dtype.element_ty))
        return
    pool = state + head * stride_head
    at = slot * stride_conv_slot + head * stride_conv_head + lane
    q_old = _history(conv_state, at, stride_conv_row)
    k_old = _history(conv_state, at + stride_conv_part, stride_conv_row)
    v_old = _history(conv_state, at + 2 * stride_conv_part, stride_conv_row)
    before = (q_old, k_old, v_old)
    gates = (tl.exp(tl.load(A_log + head).to(tl.float32)), tl.load(dt_bias + channel).to(tl.float32), floor2)
    commit = tl.load(commits + request) if commits is not None else W
    copy = tl.load(copies + request).to(tl.int64) if copies is not None else tl.full([], -1, tl.int64)
    inputs, weights = (q, k, v, z, b), (q_weight, k_weight, v_weight)
    logit = request * (W * H) + head
    kept = before
    if W == 1:
        token, kept = _token(inputs, weights, row, logit, channel, before, gates, scale, BOUNDED, LOG2E)
    else:
        tokens += (request * H + head) * (W * 5 * D)
        past = before
        for t in range(W):
            shift = t * (H * D)
            token, past = _token(
                inputs, weights, row + shift, logit + t * H, channel, past, gates, scale, BOUNDED, LOG2E
            )
            _put_token(tokens + t * (5 * D), token, lane, D)
            if t + 1 == commit:
                kept = past
        tl.debug_barrier()

    value = tl.arange(0, BV)
    matrix = value[:, None] * D + lane[None, :]
    for first in tl.range(0, D, BV, num_stages=STAGES):
        S_VK = tl.load(pool + slot * stride_slot + first * D + matrix).to(tl.float32)
        for t in range(W):
            if W == 1:
                v_V = tl.gather(token[2], first + value, 0)
            else:
                token = _get_token(tokens + t * (5 * D), lane, D)
                v_V = tl.load(tokens + t * (5 * D) + 2 * D + first + value)
            S_VK, o_V = _step(S_VK, token, v_V)
            if t + 1 == commit:
                _keep_tile(pool + slot * stride_slot + first * D + matrix, S_VK)
                if copy >= 0:
                    _keep_tile(pool + copy * stride_slot + first * D + matrix, S_VK)
            tl.store(o + request * (W * H * D) + (t * H + head) * D + first + value, o_V.to(o.dtype.element_ty))

    norm = tl.load(norm_weight + lane).to(tl.float32)
    tl.debug_barrier()
    for t in range(W):
        o_D = tl.load(o + row + t * (H * D)).to(tl.float32)
        o_D = o_D * tl.rsqrt(tl.sum(o_D * o_D, 0) / D + epsilon) * norm
        o_D = o_D * sigmoid(tl.load(gate + row + t * (H * D)).to(tl.float32), LOG2E)
        tl.debug_barrier()
        tl.store(o + row + t * (H * D), o_D.to(o.dtype.element_ty))
    if commit > 0:
        _keep_rows(conv_state, at, stride_conv_row, stride_conv_part, kept)
        if copy >= 0:
            to = copy * stride_conv_slot + head * stride_conv_head + lane
            _keep_rows(conv_state, to, stride_conv_row, stride_conv_part, kept)


ONE = {"ROWS": 16, "STAGES": 5, "num_warps": 4} | capped(96)
"""One token: four tiles of 8 KiB under way in each of the five programs that 96 registers a thread let onto a
multiprocessor. More in flight makes an H200's memory slower, not faster."""
WINDOW = {"ROWS": 32, "STAGES": 1, "num_warps": 4} | capped(128)
"""Several tokens: work on a tile outweighs its transfer, and a larger tile reads the tokens less often."""


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
    weights = [w.contiguous() for w in conv_weights]
    o = torch.empty_like(rows[2])
    if not o.numel():
        return o
    tokens = torch.empty(B, H, W, 5, D, dtype=torch.float32, device=q.device) if W > 1 else None
    decode_window[(H, B)](
        *(
            *rows,
            *weights,
            A_log,
            dt_bias.contiguous(),
            norm_weight,
            state,
            conv_state,
            slots,
            commits,
            copies,
            o,
            tokens,
        ),
        *(*state.stride()[:2], *conv_state.stride()[:4], scale, (lower_bound or 0.0) * LOG2E, eps, null_slot),
        H=H,
        D=D,
        W=W,
        BOUNDED=lower_bound is not None,
        LOG2E=LOG2E,
        **(ONE if W == 1 else WINDOW),
    )
    return o
