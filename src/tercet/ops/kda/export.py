"""Prefill that also returns the state at requested tokens, by running up to each of them in turn."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tercet.ops.packing import sequence_lengths


def fused_kda_export(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    exports: tuple[tuple[int, int], ...],
    scale: float | None,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `tercet.ops.kda.fused_kda_export`."""
    from tercet.ops.kda import fused_kda

    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    flat = [x.flatten(0, 1)[None] for x in (q, k, v, z, b)]
    outputs, finals, found, start = [], [], {}, 0
    for n, length in enumerate(lengths):
        S = None if state is None else state[n : n + 1]
        cuts = sorted({0, length, *(offset for sequence, offset in exports if sequence == n)})
        for low, high in pairwise(cuts):
            q_n, k_n, v_n, z_n, b_n = (x[:, start + low : start + high] for x in flat)
            o, S = fused_kda(q_n, k_n, v_n, z_n, b_n, A_log, dt_bias, scale=scale, lower_bound=lower_bound, state=S)
            outputs.append(o)
            found[n, high] = S
        finals.append(torch.zeros(1, *v.shape[2:], k.shape[3], device=q.device) if S is None else S)
        start += length
    exported = [found[n, offset] for n, offset in exports]
    o = torch.cat(outputs, dim=1) if outputs else flat[2]
    return o.view(v.shape), torch.cat(finals), torch.cat(exported) if exported else finals[0][:0]
