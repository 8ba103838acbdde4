"""The short convolution on the GPU: a program walks along time and keeps the last rows in registers.

A program owns `SEGMENTS` stretches of `SPAN` tokens and a block of channels. Step by step it takes one row of every
stretch, so each input is read once; the three rows before it, and backward the gradients of the three rows before it,
travel in registers, and the next four rows are on their way while four are worked on. A tap of lag a counts when the
token is at least the a-th of its sequence (earlier rows come from the carried state or are zero); the same condition
says which rows a pre-activation's gradient reaches. Nothing but the inputs is saved. The filters' gradient is summed in
a fixed order: a program's tokens, then the programs.

Shapes: T flat tokens, N sequences, C channels, J taps; S stretches a program.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.glu.triton_ import sigmoid
from tercet.ops.gpu import dense, float_refusal, operator
from tercet.ops.packing import positions

MAX_TAPS = 4
_SEGMENTS, _SPAN, _CHANNELS, _WARPS = 2, 64, 256, 4
"""Measured best on an H200 for 1024 and for 12,288 channels."""


@lru_cache(maxsize=64)
def _places(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's index within its sequence, and its sequence."""
    count = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    return positions(lengths).to(device, torch.int32), sequence.to(device, torch.int32)


@triton.jit
def _filter(weight, channel, LAG: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr):
    """Load the weight of one lag for every channel; a lag that the filter does not have weighs nothing."""
    at = weight + channel * TAPS + (TAPS - 1 - LAG)
    return tl.load(at, mask=(channel < C) & (LAG < TAPS), other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rows(x, token, channel, C: tl.constexpr, tokens):
    """Load one row of every stretch; zero outside of the tokens."""
    mask = ((token >= 0) & (token < tokens))[:, None] & (channel < C)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _four(x, token, channel, C: tl.constexpr, tokens):
    return (
        _rows(x, token, channel, C, tokens),
        _rows(x, token + 1, channel, C, tokens),
        _rows(x, token + 2, channel, C, tokens),
        _rows(x, token + 3, channel, C, tokens),
    )


@triton.jit
def _before(x, token, channel, C: tl.constexpr, tokens):
    """Load the three rows before every stretch, newest first."""
    return (
        _rows(x, token - 1, channel, C, tokens).to(tl.float32),
        _rows(x, token - 2, channel, C, tokens).to(tl.float32),
        _rows(x, token - 3, channel, C, tokens).to(tl.float32),
    )


@triton.jit
def _tap(
    row,
    state,
    position,
    sequence,
    channel,
    LAG: tl.constexpr,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
):
    """Return the row of a lag as the token sees it: its own sequence's, the carried state's, or zero."""
    past = 0.0
    if CARRIED and LAG < TAPS:
        at = (sequence.to(tl.int64) * (TAPS - 1) + position - LAG + (TAPS - 1))[:, None] * C + channel[None, :]
        mask = (position < LAG)[:, None] & (channel < C)[None, :]
        past = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where((position >= LAG)[:, None], row, past)


@triton.jit
def _forward_kernel(
    x,
    weight,
    state,
    out,
    positions,
    sequences,
    tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr,
    BC: tl.constexpr,
):
    first = (tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)) * SPAN
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    w0, w1 = _filter(weight, channel, 0, C, TAPS), _filter(weight, channel, 1, C, TAPS)
    w2, w3 = _filter(weight, channel, 2, C, TAPS), _filter(weight, channel, 3, C, TAPS)
    x1, x2, x3 = _before(x, first, channel, C, tokens)
    coming = _four(x, first, channel, C, tokens)
    for start in range(0, SPAN, 4):
        rows = coming
        coming = _four(x, first + start + 4, channel, C, tokens)
        for i in tl.static_range(4):
            token = first + start + i
            position = tl.load(positions + token, mask=token < tokens, other=0)
            sequence = tl.load(sequences + token, mask=token < tokens, other=0) if CARRIED else position
            x0 = rows[i].to(tl.float32)
            total = w0 * x0 + w1 * _tap(x1, state, position, sequence, channel, 1, C, TAPS, CARRIED)
            total += w2 * _tap(x2, state, position, sequence, channel, 2, C, TAPS, CARRIED)
            total += w3 * _tap(x3, state, position, sequence, channel, 3, C, TAPS, CARRIED)
            mask = (token < tokens)[:, None] & (channel < C)[None, :]
            to = token.to(tl.int64)[:, None] * C + channel[None, :]
            tl.store(out + to, (total * sigmoid(total)).to(out.dtype.element_ty), mask=mask)
            x3, x2, x1 = x2, x1, x0


@triton.jit
def _backward_kernel(
    x,
    weight,
    state,
    grad,
    d_x,
    partial,
    positions,
    sequences,
    tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr,
    BC: tl.constexpr,
):
    first = (tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)) * SPAN
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    w0, w1 = _filter(weight, channel, 0, C, TAPS), _filter(weight, channel, 1, C, TAPS)
    w2, w3 = _filter(weight, channel, 2, C, TAPS), _filter(weight, channel, 3, C, TAPS)
    x1, x2, x3 = _before(x, first, channel, C, tokens)
    d1, d2, d3 = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)  # growing gradients of the last three rows
    s0, s1, s2, s3 = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)  # of the filters
    coming, coming_d = _four(x, first, channel, C, tokens), _four(grad, first, channel, C, tokens)
    for start in range(0, SPAN + 4, 4):  # beyond the stretch for what its last three rows get from behind
        rows, grads = coming, coming_d
        coming = _four(x, first + start + 4, channel, C, tokens)
        coming_d = _four(grad, first + start + 4, channel, C, tokens)
        for i in tl.static_range(4):
            token = first + start + i
            position = tl.load(positions + token, mask=token < tokens, other=0)
            sequence = tl.load(sequences + token, mask=token < tokens, other=0) if CARRIED else position
            x0 = rows[i].to(tl.float32)
            r1 = _tap(x1, state, position, sequence, channel, 1, C, TAPS, CARRIED)
            r2 = _tap(x2, state, position, sequence, channel, 2, C, TAPS, CARRIED)
            r3 = _tap(x3, state, position, sequence, channel, 3, C, TAPS, CARRIED)
            total = w0 * x0 + w1 * r1
            total += w2 * r2
            total += w3 * r3
            s = sigmoid(total)
            d = grads[i].to(tl.float32) * (s * (1.0 + total * (1.0 - s)))
            own = tl.where(start < SPAN, d, 0.0)
            s0 += own * x0
            s1 += own * r1
            s2 += own * r2
            s3 += own * r3
            lag = position[:, None]
            done = d3 + tl.where(lag >= 3, w3 * d, 0.0)
            back = token - 3
            mask = (back >= first) & (back < first + SPAN) & (back < tokens)
            to = back.to(tl.int64)[:, None] * C + channel[None, :]
            tl.store(d_x + to, done.to(d_x.dtype.element_ty), mask=mask[:, None] & (channel < C)[None, :])
            d3 = d2 + tl.where(lag >= 2, w2 * d, 0.0)
            d2 = d1 + tl.where(lag >= 1, w1 * d, 0.0)
            d1 = w0 * d
            x3, x2, x1 = x2, x1, x0
    to = partial + tl.program_id(0).to(tl.int64) * 4 * C + channel
    tl.store(to, tl.sum(s0, 0), mask=channel < C)
    tl.store(to + C, tl.sum(s1, 0), mask=channel < C)
    tl.store(to + 2 * C, tl.sum(s2, 0), mask=channel < C)
    tl.store(to + 3 * C, tl.sum(s3, 0), mask=channel < C)


def _launch(tokens: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the kernels' tile."""
    grid = triton.cdiv(tokens, _SEGMENTS * _SPAN), triton.cdiv(channels, _CHANNELS)
    return grid, {"SEGMENTS": _SEGMENTS, "SPAN": _SPAN, "BC": _CHANNELS, "num_warps": _WARPS}


@operator(
    "tercet::short_conv",
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor positions, Tensor sequences) -> Tensor",
)
def _forward(x: Tensor, weight: Tensor, state: Tensor | None, positions: Tensor, sequences: Tensor) -> Tensor:
    x, weight = dense(x), dense(weight)
    out = torch.empty_like(x)
    if x.numel():
        grid, tile = _launch(*x.shape)
        carried, shape = x if state is None else dense(state), {"C": x.shape[1], "TAPS": weight.shape[2]}
        _forward_kernel[grid](
            x, weight, carried, out, positions, sequences, len(x), CARRIED=state is not None, **shape, **tile
        )
    return out


@_forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    "tercet::short_conv_backward",
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor grad, Tensor positions, Tensor sequences)"
    " -> (Tensor, Tensor)",
)
def _backward(
    x: Tensor, weight: Tensor, state: Tensor | None, grad: Tensor, positions: Tensor, sequences: Tensor
) -> tuple[Tensor, Tensor]:
    x, weight, grad = dense(x), dense(weight), dense(grad)
    (tokens, channels), taps = x.shape, weight.shape[2]
    d_x = torch.empty_like(x)
    grid, tile = _launch(tokens, channels)
    partial = torch.empty(grid[0], 4, channels, dtype=torch.float32, device=x.device)
    if x.numel():
        carried, shape = x if state is None else dense(state), {"C": channels, "TAPS": taps}
        _backward_kernel[grid](
            x,
            weight,
            carried,
            grad,
            d_x,
            partial,
            positions,
            sequences,
            tokens,
            CARRIED=state is not None,
            **shape,
            **tile,
        )
    by_lag = partial.sum(0)[:taps].flip(0)
    return d_x, by_lag.t()[:, None].to(weight.dtype).contiguous()


@_backward.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, state, *places = ctx.saved_tensors
    d_x, d_weight = _backward(x, weight, state, grad, *places)
    return d_x, d_weight, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...], tail: bool) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if state is not None and state.requires_grad and torch.is_grad_enabled():
        return "the carried rows need a gradient"
    if weight.shape[2] > MAX_TAPS:
        return f"{weight.shape[2]} taps, more than {MAX_TAPS}"
    return float_refusal(x, weight)


def call(
    x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...], tail: bool
) -> tuple[Tensor, Tensor | None]:
    """See `tercet.ops.conv.short_conv`."""
    flat = x.flatten(0, 1)
    y = _forward(flat, weight, state, *_places(lengths, x.device)).view_as(x)
    return y, _tail(flat, weight.shape[2] - 1, state, lengths) if tail else None


@lru_cache(maxsize=64)
def _tail_places(lengths: tuple[int, ...], history: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return each tail row's token, its row of the old state, and whether it is that one; all ``[N, history]``."""
    count = torch.tensor(lengths)
    back = torch.arange(history, 0, -1)
    missing = back - count[:, None]
    token = count.cumsum(0)[:, None] - back
    row = (history - missing).clamp(0, max(0, history - 1))
    return token.clamp(min=0).to(device), row.to(device), (missing > 0).to(device)


def _tail(x: Tensor, history: int, state: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
    """Return the newest *history* rows of every sequence; a shorter sequence keeps rows of the old state."""
    token, row, older = _tail_places(lengths, history, x.device)
    newest = x[token] if len(x) else x.new_zeros(*token.shape, x.shape[1])
    past = torch.zeros_like(newest) if state is None else state.to(x.dtype).gather(1, row[..., None].expand_as(newest))
    return torch.where(older[..., None], past, newest)
