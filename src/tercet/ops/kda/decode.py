"""One decode step of a KDA layer written with the other operators: what the fused kernel must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.conv import short_conv
from tercet.ops.norm import gated_rms_norm


def kda_decode(
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
    from tercet.ops.kda import fused_kda

    window, heads, width = q.shape[1:]
    output = torch.zeros_like(v)
    live = ((slots >= 0) & (slots != null_slot)).nonzero().flatten()
    if not len(live):
        return output
    slot = slots[live].long()
    S = state[slot]
    tails = [conv_state[slot][:, :, part].flatten(2) for part in range(3)]
    for t in range(window):
        rows = []
        for part, (x, weight) in enumerate(zip((q, k, v), conv_weights)):
            y, tail = short_conv(x[live, t : t + 1].flatten(2), weight, state=tails[part])
            assert tail is not None
            tails[part] = tail
            rows.append(y.view(len(live), 1, heads, width))
        now = (live, slice(t, t + 1))
        q_t, k_t, v_t = rows
        o, S = fused_kda(q_t, k_t, v_t, z[now], b[now], A_log, dt_bias, scale=scale, lower_bound=lower_bound, state=S)
        output[now] = gated_rms_norm(o, gate[now], norm_weight, eps=eps)
        done = torch.full_like(live, window) if commits is None else commits[live]
        written = (done == t + 1).nonzero().flatten()
        targets = [(written, slot[written])]
        if copies is not None:
            copied = written[copies[live[written]] >= 0]
            targets.append((copied, copies[live[copied]].long()))
        for source, target in targets:
            state[target] = S[source].to(state.dtype)
            for part in range(3):
                tail = tails[part][source].unflatten(2, (heads, width))
                conv_state[target, :, part] = tail.to(conv_state.dtype)
    return output
