"""The short convolution written as its sum, sequence by sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(
    x: Tensor, weight: Tensor, *, state: Tensor | None, lengths: tuple[int, ...], tail: bool
) -> tuple[Tensor, Tensor | None]:
    """See `tercet.ops.conv.short_conv`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    taps = weight.shape[-1]
    outputs, states = [], []
    for n, rows in enumerate(x.flatten(0, 1).split(list(lengths))):
        history = x.new_zeros(taps - 1, x.shape[-1]) if state is None else state[n].to(x.dtype)
        padded = torch.cat([history, rows])
        wide = padded.to(compute)
        y = torch.stack([weight[:, 0, j].to(compute) * wide[j : j + len(rows)] for j in range(taps)]).sum(0)
        outputs.append(F.silu(y).to(x.dtype))
        states.append(padded[len(padded) - taps + 1 :])
    return torch.cat(outputs).view_as(x), torch.stack(states) if tail else None
