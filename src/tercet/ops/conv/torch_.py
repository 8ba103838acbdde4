"""The short convolution over all packed sequences at once, with its own backward.

Every sequence is preceded by its ``taps − 1`` history rows in one extended array, so a tap is the whole array shifted:
it never reaches another sequence's tokens, and the rows computed at history positions are not read.

Shapes: T flat tokens, X extended rows, C channels, J taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.ops.compiling import result
from tercet.ops.packing import positions
from tercet.ops.tables import kept


@kept(64)
def _layout(lengths: tuple[int, ...], history: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the extended row of every token, of every history row ``[N, J-1]``, and of every state row."""
    count = torch.tensor(lengths)
    begin = torch.cat([count.new_zeros(1), (count + history).cumsum(0)])
    token = torch.repeat_interleave(begin[:-1] + history, count, output_size=sum(lengths)) + positions(lengths)
    offsets = torch.arange(history)
    return tuple(t.to(device) for t in (token, begin[:-1, None] + offsets, begin[1:, None] - history + offsets))  # type: ignore[return-value]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, lengths: tuple[int, ...]) -> Any:
        taps = weight.shape[-1]
        token, past, newest = _layout(lengths, taps - 1, x.device)
        extended = x.new_empty(x.shape[0] + past.numel(), x.shape[1])
        extended[token] = x
        extended[past.flatten()] = x.new_zeros(()) if state is None else state.flatten(0, 1).to(x.dtype)
        compute = torch.promote_types(x.dtype, torch.float32)
        w_JC = weight[:, 0].t().to(compute).contiguous()
        wide, rows = extended.to(compute), len(extended) - taps + 1
        total_XC = wide[taps - 1 :] * w_JC[taps - 1]
        for j in range(taps - 1):
            total_XC.addcmul_(wide[j : j + rows], w_JC[j])
        total = total_XC.index_select(0, token - taps + 1)
        ctx.save_for_backward(extended, w_JC, total)
        ctx.lengths, ctx.dtypes, ctx.has_state = lengths, (x.dtype, weight.dtype), state is not None
        return result(total * torch.sigmoid(total), x.dtype), extended[newest]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        extended, w_JC, total = ctx.saved_tensors
        taps = w_JC.shape[0]
        token, past, newest = _layout(ctx.lengths, taps - 1, total.device)
        sigmoid = torch.sigmoid(total)
        slope = (1 - sigmoid).mul_(total).add_(1).mul_(sigmoid)
        wide, rows = extended.to(total.dtype), len(extended) - taps + 1
        d_total = total.new_zeros(rows, total.shape[1])
        d_total[token - taps + 1] = slope.mul_(grads[0])
        d_extended = torch.zeros_like(wide)
        d_weight = torch.empty_like(w_JC)
        for j in range(taps):
            d_extended[j : j + rows].addcmul_(d_total, w_JC[j])
            d_weight[j] = torch.linalg.vecdot(d_total, wide[j : j + rows], dim=0)
        if grads[1] is not None:
            d_extended.index_add_(0, newest.flatten(), grads[1].to(total.dtype).flatten(0, 1))
        x_dtype, weight_dtype = ctx.dtypes
        d_state = d_extended[past].to(x_dtype) if ctx.has_state else None
        d_x = d_extended.index_select(0, token).to(x_dtype)
        return d_x, d_weight.t()[:, None].to(weight_dtype), d_state, None


def short_conv(
    x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...], tail: bool
) -> tuple[Tensor, Tensor | None]:
    """See `tercet.ops.conv.short_conv`."""
    y, final = _ShortConv.apply(x.flatten(0, 1), weight, state, lengths)
    return y.view_as(x), final if tail else None
