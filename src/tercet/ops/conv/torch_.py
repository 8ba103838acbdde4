"""The short convolution over all packed sequences at once, with its own backward.

Every sequence is preceded by its ``taps − 1`` history rows in one extended array; tap j of token t is then row
``slot(t) + j``. When all sequences have one length the extended array is a plain ``[N, taps − 1 + L, C]`` view.

Shapes: N sequences, L tokens a sequence, C channels, J taps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tercet.ops.packing import positions


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...], history: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the extended row of every token, of every history row ``[N, J-1]``, and of every state row."""
    count = torch.tensor(lengths)
    begin = torch.cat([count.new_zeros(1), (count + history).cumsum(0)])
    token = torch.repeat_interleave(begin[:-1] + history, count) + positions(lengths)
    offsets = torch.arange(history)
    return tuple(t.to(device) for t in (token, begin[:-1, None] + offsets, begin[1:, None] - history + offsets))  # type: ignore[return-value]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, lengths: tuple[int, ...]) -> Any:
        taps = weight.shape[-1]
        token, past, newest = _layout(lengths, taps - 1, x.device)
        extended = x.new_zeros(x.shape[0] + past.numel(), x.shape[1])
        extended[token] = x
        if state is not None:
            extended[past.flatten()] = state.flatten(0, 1).to(x.dtype)
        compute = torch.promote_types(x.dtype, torch.float32)
        w_JC = weight[:, 0].t().to(compute).contiguous()
        total = _filter(extended.to(compute), w_JC, token, lengths)
        ctx.save_for_backward(extended, w_JC, total)
        ctx.lengths, ctx.dtypes, ctx.has_state = lengths, (x.dtype, weight.dtype), state is not None
        y = (total * torch.sigmoid(total)).to(x.dtype)
        final = extended[newest]
        return y, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        extended, w_JC, total = ctx.saved_tensors
        taps = w_JC.shape[0]
        token, past, newest = _layout(ctx.lengths, taps - 1, total.device)
        sigmoid = torch.sigmoid(total)
        d_total = grads[0].to(total.dtype) * (sigmoid * (1 + total * (1 - sigmoid)))
        d_extended = torch.zeros_like(extended, dtype=total.dtype)
        d_weight = torch.empty_like(w_JC)
        wide = extended.to(total.dtype)
        for j in range(taps):
            rows = token - (taps - 1 - j)
            d_weight[j] = (d_total * wide[rows]).sum(0)
            d_extended.index_add_(0, rows, d_total * w_JC[j])
        if grads[1] is not None:
            d_extended.index_add_(0, newest.flatten(), grads[1].to(total.dtype).flatten(0, 1))
        x_dtype, weight_dtype = ctx.dtypes
        d_state = d_extended[past].to(x_dtype) if ctx.has_state else None
        return d_extended[token].to(x_dtype), d_weight.t()[:, None].to(weight_dtype), d_state, None


def _filter(extended: Tensor, w_JC: Tensor, token: Tensor, lengths: tuple[int, ...]) -> Tensor:
    taps = w_JC.shape[0]
    if len(set(lengths)) == 1:
        length = lengths[0]
        view = extended.view(len(lengths), taps - 1 + length, extended.shape[1])
        total = view[:, taps - 1 :] * w_JC[taps - 1]
        for j in range(taps - 1):
            total.addcmul_(view[:, j : j + length], w_JC[j])
        return total.flatten(0, 1)
    total = extended[token] * w_JC[taps - 1]
    for j in range(taps - 1):
        total.addcmul_(extended[token - (taps - 1 - j)], w_JC[j])
    return total


def short_conv(x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.conv.short_conv`."""
    y, final = _ShortConv.apply(x.flatten(0, 1), weight, state, lengths)
    return y.view_as(x), final
