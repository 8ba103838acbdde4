"""The short convolution on the GPU: a program walks along time and keeps the last rows in registers.

A program owns a stretch of `SPAN` tokens and a block of channels. Each input row is read once; the three
rows before it, and backward the growing gradients of the three rows before it, travel in registers, and the next four
rows are on their way while four are worked on. Where all four are at least the fourth token of their sequence, no tap
is cut; else a tap of lag a counts when the token is at least the a-th (earlier rows come from the carried state or are
zero), and the same condition says which rows a pre-activation's gradient reaches. Nothing but the inputs is saved. The
filters' gradient is summed in a fixed order: a program's tokens, then the programs.

Shapes: T flat tokens, N sequences, C channels, J taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.glu.triton_ import sigmoid
from tercet.ops.gpu import blocks, dense, float_refusal, operator
from tercet.ops.packing import positions
from tercet.ops.tables import kept
from tercet.ops.triton_sums import row_sum

MAX_TAPS = 4
_FORWARD, _BACKWARD = (64, 256, 2), (128, 256, 1)
"""Tokens and channels of a program, and its warps; measured best on an H200 for 1024 and for 12,288 channels."""


@kept(64)
def _places(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's index within its sequence, and its sequence."""
    count = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    return positions(lengths).to(device, torch.int32), sequence.to(device, torch.int32)


@triton.jit
def _filters(weight, channel, C: tl.constexpr, TAPS: tl.constexpr):
    """Load every channel's weights by lag; a lag that the filter does not have weighs nothing.

    Four taps a thread at once: a load for each lag would fetch 128 bytes a lane for four of them.
    """
    lag = 3 - tl.arange(0, 4)[None, :]
    at = weight + channel[:, None] * TAPS + (TAPS - 1) - lag
    taps = tl.load(at, mask=(channel < C)[:, None] & (lag < TAPS), other=0.0).to(tl.float32)
    return (
        tl.sum(tl.where(lag == 0, taps, 0.0), 1),
        tl.sum(tl.where(lag == 1, taps, 0.0), 1),
        tl.sum(tl.where(lag == 2, taps, 0.0), 1),
        tl.sum(tl.where(lag == 3, taps, 0.0), 1),
    )


@triton.jit
def _row(x, token, channel, C: tl.constexpr, tokens):
    """Load one row; zero outside of the tokens."""
    return tl.load(
        x + token.to(tl.int64) * C + channel, mask=(channel < C) & (token >= 0) & (token < tokens), other=0.0
    )


@triton.jit
def _four(x, token, channel, C: tl.constexpr, tokens):
    return (
        _row(x, token, channel, C, tokens),
        _row(x, token + 1, channel, C, tokens),
        _row(x, token + 2, channel, C, tokens),
        _row(x, token + 3, channel, C, tokens),
    )


@triton.jit
def _before(x, token, channel, C: tl.constexpr, tokens):
    """Load the three rows before *token*, newest first."""
    return (
        _row(x, token - 1, channel, C, tokens).to(tl.float32),
        _row(x, token - 2, channel, C, tokens).to(tl.float32),
        _row(x, token - 3, channel, C, tokens).to(tl.float32),
    )


@triton.jit
def _four_positions(positions, token, tokens):
    return (
        tl.load(positions + token, mask=token < tokens, other=0),
        tl.load(positions + token + 1, mask=token + 1 < tokens, other=0),
        tl.load(positions + token + 2, mask=token + 2 < tokens, other=0),
        tl.load(positions + token + 3, mask=token + 3 < tokens, other=0),
    )


@triton.jit
def _uncut(places):
    """Whether four tokens have three more of their sequence before each of them."""
    return tl.minimum(tl.minimum(places[0], places[1]), tl.minimum(places[2], places[3])) >= 3


@triton.jit
def _tap(
    row, state, place, sequence, channel, LAG: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, CARRIED: tl.constexpr
):
    """Return the row of a lag as the token sees it: its own sequence's, the carried state's, or zero."""
    past = 0.0
    if CARRIED and LAG < TAPS:
        at = (sequence.to(tl.int64) * (TAPS - 1) + place - LAG + (TAPS - 1)) * C + channel
        past = tl.load(state + at, mask=(channel < C) & (place < LAG), other=0.0).to(tl.float32)
    return tl.where(place >= LAG, row, past)


@triton.jit
def _seen(
    last, state, place, sequences, token, tokens, channel, C: tl.constexpr, TAPS: tl.constexpr, CARRIED: tl.constexpr
):
    """Return the three rows before a token as it sees them."""
    sequence = place
    if CARRIED:
        sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    return (
        _tap(last[0], state, place, sequence, channel, 1, C, TAPS, CARRIED),
        _tap(last[1], state, place, sequence, channel, 2, C, TAPS, CARRIED),
        _tap(last[2], state, place, sequence, channel, 3, C, TAPS, CARRIED),
    )


@triton.jit
def _filtered(w, x0, seen):
    return w[0] * x0 + w[1] * seen[0] + w[2] * seen[1] + w[3] * seen[2]


@triton.jit
def _forward_four(
    out,
    rows,
    places,
    last,
    w,
    state,
    sequences,
    first,
    tokens,
    channel,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Write four rows; return the three rows before the next one."""
    for i in tl.static_range(4):
        token, x0, seen = first + i, rows[i].to(tl.float32), last
        if CUT:
            seen = _seen(last, state, places[i], sequences, token, tokens, channel, C, TAPS, CARRIED)
        total = _filtered(w, x0, seen)
        y = (total * sigmoid(total)).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * C + channel, y, mask=(channel < C) & (token < tokens))
        last = (x0, last[0], last[1])
    return last


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
    SPAN: tl.constexpr,
    BC: tl.constexpr,
):
    first = tl.program_id(0) * SPAN
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    coming, coming_places = _four(x, first, channel, C, tokens), _four_positions(positions, first, tokens)
    last, w = _before(x, first, channel, C, tokens), _filters(weight, channel, C, TAPS)
    for start in range(0, SPAN, 4):
        rows, places, token = coming, coming_places, first + start
        coming, coming_places = _four(x, token + 4, channel, C, tokens), _four_positions(positions, token + 4, tokens)
        common = (out, rows, places, last, w, state, sequences, token, tokens, channel)
        if _uncut(places):
            last = _forward_four(*common, C, TAPS, CARRIED, False)
        else:
            last = _forward_four(*common, C, TAPS, CARRIED, True)


@triton.jit
def _backward_four(
    d_x,
    rows,
    grads,
    places,
    last,
    growing,
    sums,
    w,
    state,
    sequences,
    token,
    first,
    end,
    tokens,
    channel,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CARRIED: tl.constexpr,
    CUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """Take four rows: finish the gradients of the three before each, and with OWN add to the filters'."""
    for i in tl.static_range(4):
        x0, seen, place = rows[i].to(tl.float32), last, places[i]
        if CUT:
            seen = _seen(last, state, place, sequences, token + i, tokens, channel, C, TAPS, CARRIED)
        total = _filtered(w, x0, seen)
        s = sigmoid(total)
        d = grads[i].to(tl.float32) * (s + total * (s - s * s))
        if OWN:
            sums = (sums[0] + d * x0, sums[1] + d * seen[0], sums[2] + d * seen[1], sums[3] + d * seen[2])
        d1, d2, d3 = w[1] * d, w[2] * d, w[3] * d
        if CUT:
            d1, d2, d3 = tl.where(place >= 1, d1, 0.0), tl.where(place >= 2, d2, 0.0), tl.where(place >= 3, d3, 0.0)
        back = token + i - 3
        done = (growing[2] + d3).to(d_x.dtype.element_ty)
        tl.store(d_x + back.to(tl.int64) * C + channel, done, mask=(channel < C) & (back >= first) & (back < end))
        growing = (w[0] * d, growing[0] + d1, growing[1] + d2)
        last = (x0, last[0], last[1])
    return last, growing, sums


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
    SPAN: tl.constexpr,
    BC: tl.constexpr,
):
    first = tl.program_id(0) * SPAN
    end = tl.minimum(first + SPAN, tokens)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    coming, coming_d = _four(x, first, channel, C, tokens), _four(grad, first, channel, C, tokens)
    coming_places = _four_positions(positions, first, tokens)
    last, w = _before(x, first, channel, C, tokens), _filters(weight, channel, C, TAPS)
    zero = tl.zeros([BC], tl.float32)
    growing, sums = (zero, zero, zero), (zero, zero, zero, zero)
    for start in range(0, SPAN, 4):
        rows, grads, places, token = coming, coming_d, coming_places, first + start
        coming, coming_d = _four(x, token + 4, channel, C, tokens), _four(grad, token + 4, channel, C, tokens)
        coming_places = _four_positions(positions, token + 4, tokens)
        common = (
            d_x,
            rows,
            grads,
            places,
            last,
            growing,
            sums,
            w,
            state,
            sequences,
            token,
            first,
            end,
            tokens,
            channel,
        )
        if _uncut(places):
            last, growing, sums = _backward_four(*common, C, TAPS, CARRIED, False, True)
        else:
            last, growing, sums = _backward_four(*common, C, TAPS, CARRIED, True, True)
    rest = (d_x, coming, coming_d, coming_places, last, growing, sums, w, state, sequences)
    behind = (first + SPAN, first, end, tokens, channel)  # what the last three rows get from the rows behind them
    last, growing, sums = _backward_four(*rest, *behind, C, TAPS, CARRIED, True, False)
    to = partial + tl.program_id(0).to(tl.int64) * TAPS * C + channel
    for lag in tl.static_range(TAPS):
        tl.store(to + (TAPS - 1 - lag) * C, sums[lag], mask=channel < C)


def _launch(tokens: int, channels: int, tile: tuple[int, int, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the kernel's tile."""
    span, block, warps = tile
    return (blocks(tokens, span), blocks(channels, block)), {"SPAN": span, "BC": block, "num_warps": warps}


@operator(
    "tercet::short_conv",
    schema="(Tensor x, Tensor weight, Tensor? state, int[] lengths) -> Tensor",
)
def _forward(x: Tensor, weight: Tensor, state: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
    x, weight = dense(x), dense(weight)
    out = torch.empty_like(x)
    if x.numel():
        grid, tile = _launch(len(x), x.shape[1], _FORWARD)
        carried, shape = x if state is None else dense(state), {"C": x.shape[1], "TAPS": weight.shape[2]}
        _forward_kernel[grid](
            x,
            weight,
            carried,
            out,
            *_places(tuple(lengths), x.device),
            len(x),
            CARRIED=state is not None,
            **shape,
            **tile,
        )
    return out


@_forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    "tercet::short_conv_backward",
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor grad, int[] lengths) -> (Tensor, Tensor)",
)
def _backward(
    x: Tensor, weight: Tensor, state: Tensor | None, grad: Tensor, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    x, weight, grad = dense(x), dense(weight), dense(grad)
    (tokens, channels), taps = x.shape, weight.shape[2]
    d_x = torch.empty_like(x)
    grid, tile = _launch(tokens, channels, _BACKWARD)
    partial = torch.empty(grid[0], taps, channels, dtype=torch.float32, device=x.device)
    if x.numel():
        carried, shape = x if state is None else dense(state), {"C": channels, "TAPS": taps}
        _backward_kernel[grid](
            x,
            weight,
            carried,
            grad,
            d_x,
            partial,
            *_places(tuple(lengths), x.device),
            tokens,
            CARRIED=state is not None,
            **shape,
            **tile,
        )
    return d_x, row_sum(partial, weight.dtype)[:, None]


@_backward.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.lengths = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, state = ctx.saved_tensors
    d_x, d_weight = _backward(x, weight, state, grad, ctx.lengths)
    return d_x, d_weight, None, None


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
    y = _forward(flat, weight, state, lengths).view_as(x)
    return y, _tail(flat, weight.shape[2] - 1, state, lengths) if tail else None


@kept(64)
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
