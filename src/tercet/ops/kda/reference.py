"""KDA token by token: the recurrence of the report, eq. 1, in plain PyTorch.

Shapes: B rows, T tokens, H heads, K key width, V value width, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.ops.packing import sequence_lengths


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_floor: float | None = None,  # a promise that the recurrence does not need
) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.kda.kda`."""
    batch, tokens, heads, width_k = q.shape
    width_v = v.shape[-1]
    lengths = sequence_lengths(batch, tokens, cu_seqlens)
    compute = torch.promote_types(q.dtype, torch.float32)
    q_THK, k_THK, v_THV, g_THK, beta_TH = (x.flatten(0, 1).to(compute) for x in (q, k, v, g, beta))
    outputs, states, start = [], [], 0
    for n, length in enumerate(lengths):
        S_HVK = q_THK.new_zeros(heads, width_v, width_k) if state is None else state[n].to(compute)
        for t in range(start, start + length):
            S_HVK = S_HVK * g_THK[t].exp()[:, None, :]
            u_HV = beta_TH[t][:, None] * (v_THV[t] - torch.einsum("hvk,hk->hv", S_HVK, k_THK[t]))
            S_HVK = S_HVK + u_HV[:, :, None] * k_THK[t][:, None, :]
            outputs.append(torch.einsum("hvk,hk->hv", S_HVK, q_THK[t] * scale))
        states.append(S_HVK)
        start += length
    o_THV = torch.stack(outputs) if outputs else q_THK.new_zeros(0, heads, width_v)
    final = torch.stack(states) if states else q_THK.new_zeros(0, heads, width_v, width_k)
    return o_THV.view(batch, tokens, heads, width_v).to(v.dtype), final
