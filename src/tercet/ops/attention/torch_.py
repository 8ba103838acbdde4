"""Causal attention through ``scaled_dot_product_attention``, sequences grouped by length.

Sequences whose lengths share a power of two are padded to one ``[N, H, L, D]`` batch (at most twice their tokens);
a causal mask alone then keeps real tokens from reading the padding behind them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.ops.attention.reference import split
from tercet.ops.tables import kept


@kept(64)
def _groups(lengths: tuple[int, ...], device: torch.device) -> tuple[list[tuple[Tensor, int]], Tensor]:
    """Return per length class its token table ``[N, L]`` (padding repeats the row's own first token, so that
    nothing crosses between sequences), and the slot of every token.
    """
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    classes: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
        if length:
            classes.setdefault(length.bit_length(), []).append(n)
    groups, slot, used = [], torch.empty(total, dtype=torch.long), 0
    for members in classes.values():
        width = max(lengths[n] for n in members)
        table = torch.empty(len(members), width, dtype=torch.long)
        for row, n in enumerate(members):
            table[row] = starts[n]
            table[row, : lengths[n]] = torch.arange(starts[n], starts[n] + lengths[n])
            slot[starts[n] : starts[n] + lengths[n]] = used + row * width + torch.arange(lengths[n])
        groups.append((table.to(device), width))
        used += table.numel()
    return groups, slot.to(device)


def mla_attention(
    q: Tensor, kv: Tensor, k_pe: Tensor, *, scale: float, lengths: tuple[int, ...]
) -> tuple[Tensor, None]:
    """See `tercet.ops.attention.mla_attention`; forms whole keys, and the output was rounded before it is widened."""
    o = _causal_attention(q, *split(q, kv, k_pe), scale, lengths)
    return o.to(torch.promote_types(o.dtype, torch.float32)), None


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]) -> Tensor:
    """Return ``[B, T, H, V]`` in the inputs' type."""
    q_THD, k_THD, v_THV = (x.flatten(0, 1) for x in (q, k, v))
    if len(set(lengths)) == 1 and lengths[0]:
        shape = (len(lengths), lengths[0])
        q_NLHD, k_NLHD, v_NLHV = (x.view(*shape, *x.shape[1:]) for x in (q_THD, k_THD, v_THV))
        return _sdpa(q_NLHD, k_NLHD, v_NLHV, scale).reshape(v.shape)
    groups, slot = _groups(lengths, q.device)
    if not groups:
        return v.clone()
    outputs = [_sdpa(q_THD[table], k_THD[table], v_THV[table], scale).flatten(0, 1) for table, _ in groups]
    return torch.cat(outputs).index_select(0, slot).view(v.shape)


def _sdpa(q_NLHD: Tensor, k_NLHD: Tensor, v_NLHV: Tensor, scale: float) -> Tensor:
    """Attend within rows; v is widened to q's width on the CPU, whose fused kernel wants equal widths."""
    width = v_NLHV.shape[-1]
    missing = q_NLHD.shape[-1] - width
    if missing > 0 and v_NLHV.device.type == "cpu":
        v_NLHV = F.pad(v_NLHV, (0, missing))
    q, k, v = (x.transpose(1, 2) for x in (q_NLHD, k_NLHD, v_NLHV))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return o.transpose(1, 2)[..., :width]
