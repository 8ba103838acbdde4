"""The short convolution on the GPU: every input row is read from memory once and from cache by the taps that share it.

Each token knows where its sequence begins; a tap before that reads the carried rows or zero. The backward pass forms
the pre-activation of a token and of the taps − 1 tokens behind it again instead of storing it. The filters' gradient
is summed in a fixed order: a program's tokens, then the programs.

Shapes: T flat tokens, N sequences, C channels, J taps.
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

_TOKENS, _CHANNELS = 32, 128


@lru_cache(maxsize=64)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's sequence, and each sequence's first token and end."""
    count = torch.tensor(lengths)
    ends = count.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    return tuple(t.to(device, torch.int32) for t in (sequence, ends - count, ends))  # type: ignore[return-value]


@triton.jit
def _row(x, state, token, begin, sequence, channel, mask, C: tl.constexpr, TAPS: tl.constexpr, CARRIED: tl.constexpr):
    """Load input rows; rows before a sequence come from its carried state, or are zero."""
    inside = token >= begin
    value = tl.load(x + token.to(tl.int64)[:, None] * C + channel[None, :], mask=mask & inside[:, None], other=0.0)
    value = value.to(tl.float32)
    if CARRIED:
        past = sequence.to(tl.int64) * (TAPS - 1) + token - begin + (TAPS - 1)
        carried = tl.load(state + past[:, None] * C + channel[None, :], mask=mask & ~inside[:, None], other=0.0)
        value += carried.to(tl.float32)
    return value


@triton.jit
def _forward_kernel(
    x,
    weight,
    state,
    out,
    sequences,
    begins,
    tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (token < tokens)[:, None] & (channel < C)[None, :]
    sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    begin = tl.load(begins + sequence)
    total = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(TAPS):
        w = tl.load(weight + channel * TAPS + j, mask=channel < C, other=0.0).to(tl.float32)
        total += w[None, :] * _row(x, state, token - (TAPS - 1 - j), begin, sequence, channel, mask, C, TAPS, CARRIED)
    y = total * sigmoid(total)
    tl.store(out + token.to(tl.int64)[:, None] * C + channel[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x,
    weight,
    state,
    grad,
    d_x,
    partial,
    sequences,
    begins,
    ends,
    tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    first = tl.program_id(0) * BT
    token = first + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    real = (channel < C)[None, :]
    sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    begin = tl.load(begins + sequence)
    end = tl.where(token < tokens, tl.load(ends + sequence), 0)
    d_input = tl.zeros([BT, BC], tl.float32)
    for ahead in tl.static_range(TAPS):
        later = token + ahead
        mask = (later < end)[:, None] & real
        total = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(TAPS):
            w = tl.load(weight + channel * TAPS + j, mask=channel < C, other=0.0).to(tl.float32)
            row = _row(x, state, later - (TAPS - 1 - j), begin, sequence, channel, mask, C, TAPS, CARRIED)
            total += w[None, :] * row
        s = sigmoid(total)
        d = tl.load(grad + later.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        d *= s * (1.0 + total * (1.0 - s))
        w = tl.load(weight + channel * TAPS + (TAPS - 1 - ahead), mask=channel < C, other=0.0).to(tl.float32)
        d_input += w[None, :] * d
        if ahead == 0:
            for j in tl.static_range(TAPS):
                row = _row(x, state, token - (TAPS - 1 - j), begin, sequence, channel, mask, C, TAPS, CARRIED)
                to = (tl.program_id(0).to(tl.int64) * TAPS + j) * C + channel
                tl.store(partial + to, tl.sum(d * row, 0), mask=channel < C)
    to = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(d_x + to, d_input.to(d_x.dtype.element_ty), mask=(token < tokens)[:, None] & real)


def _grid(tokens: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS)


@operator(
    "tercet::short_conv",
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor sequences, Tensor begins, Tensor ends) -> Tensor",
)
def _forward(
    x: Tensor, weight: Tensor, state: Tensor | None, sequences: Tensor, begins: Tensor, ends: Tensor
) -> Tensor:
    x, weight = dense(x), dense(weight)
    out = torch.empty_like(x)
    carried = x if state is None else dense(state)
    if x.numel():
        _forward_kernel[_grid(*x.shape)](
            x,
            weight,
            carried,
            out,
            sequences,
            begins,
            len(x),
            C=x.shape[1],
            TAPS=weight.shape[2],
            CARRIED=state is not None,
            BT=_TOKENS,
            BC=_CHANNELS,
        )
    return out


@_forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    "tercet::short_conv_backward",
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor grad, Tensor sequences, Tensor begins, Tensor ends)"
    " -> (Tensor, Tensor)",
)
def _backward(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    grad: Tensor,
    sequences: Tensor,
    begins: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor]:
    x, weight, grad = dense(x), dense(weight), dense(grad)
    (tokens, channels), taps = x.shape, weight.shape[2]
    d_x = torch.empty_like(x)
    grid = _grid(tokens, channels)
    partial = torch.zeros(grid[0], taps, channels, dtype=torch.float32, device=x.device)
    carried = x if state is None else dense(state)
    if x.numel():
        _backward_kernel[grid](
            x,
            weight,
            carried,
            grad,
            d_x,
            partial,
            sequences,
            begins,
            ends,
            tokens,
            C=channels,
            TAPS=taps,
            CARRIED=state is not None,
            BT=_TOKENS,
            BC=_CHANNELS,
        )
    return d_x, partial.sum(0).t()[:, None].to(weight.dtype).contiguous()


@_backward.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, state, *bounds = ctx.saved_tensors
    d_x, d_weight = _backward(x, weight, state, grad, *bounds)
    return d_x, d_weight, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...]) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if state is not None and state.requires_grad and torch.is_grad_enabled():
        return "the carried rows need a gradient"
    return float_refusal(x, weight)


def call(x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.conv.short_conv`."""
    flat, history = x.flatten(0, 1), weight.shape[2] - 1
    bounds = _bounds(lengths, x.device)
    y = _forward(flat, weight, state, *bounds)
    offset = torch.arange(-history, 0, device=x.device)
    token = bounds[2][:, None] + offset
    newest = flat[token.clamp(min=0)] if len(flat) else flat.new_zeros(*token.shape, x.shape[2])
    before = bounds[1][:, None] - token
    if state is None:
        past = torch.zeros_like(newest)
    else:
        row = (history - before).clamp(0, history - 1)[..., None].expand_as(newest)
        past = state.to(x.dtype).gather(1, row.long())
    return y.view_as(x), torch.where((before > 0)[..., None], past, newest)
