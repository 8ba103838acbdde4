"""Attention Residuals with their own backward (kernels.md §7): keeps p, scores and norms, not the mixture.

With δ the gradient of the mixture: ``ds_i = p_i (δ·v_i − δ·out)``, ``dv_i = p_i δ + ds_i r_i (w̃ − s_i r_i v_i / D)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.ops.compiling import result


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm_weight: Tensor, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        compute = torch.promote_types(sources[0].dtype, torch.float32)
        folded = norm_weight.to(compute) * query.to(compute)
        dim = folded.shape[0]
        wide = [v.to(compute) for v in sources]
        norms = [torch.linalg.vector_norm(v, dim=-1).square_().div_(dim).add_(eps).rsqrt_() for v in wide]
        scores = torch.stack([(v @ folded).mul_(r) for v, r in zip(wide, norms)])
        p = scores.softmax(0)
        out = wide[0] * p[0][..., None]
        for v, weight in zip(wide[1:], p[1:]):
            out.addcmul_(v, weight[..., None])
        ctx.save_for_backward(norm_weight, query, p, scores, *norms, *sources)
        return result(out, sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, query, p, scores, *rest = ctx.saved_tensors
        norms, sources = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        folded = norm_weight.to(p.dtype) * query.to(p.dtype)
        dim = folded.shape[0]
        delta = grads[0].to(p.dtype)
        wide = [v.to(p.dtype) for v in sources]
        dots = torch.stack([torch.linalg.vecdot(delta, v) for v in wide])
        d_scores = p * (dots - (p * dots).sum(0))
        d_folded = torch.zeros_like(folded)
        d_sources: list[Tensor] = []
        for i, v in enumerate(wide):
            pull = d_scores[i] * norms[i]
            d_folded += pull.flatten() @ v.flatten(0, -2)
            d_v = delta * p[i][..., None]
            d_v.addcmul_(pull[..., None], folded)
            d_v.addcmul_(v, (pull * scores[i] * norms[i])[..., None], value=-1.0 / dim)
            d_sources.append(d_v.to(sources[i].dtype))
        d_weight = (d_folded * query.to(p.dtype)).to(norm_weight.dtype)
        d_query = (d_folded * norm_weight.to(p.dtype)).to(query.dtype)
        return d_weight, d_query, None, *d_sources


def attn_res(*sources: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """See `tercet.ops.attn_res.attn_res`."""
    return _AttnRes.apply(norm_weight, query, eps, *sources)
