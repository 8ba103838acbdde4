"""Attention Residuals, 8192 tokens of 7168."""

from __future__ import annotations

import torch
from harness import Case, compare, gradients, importable

from tercet.ops import attn_res, use_tier
from tercet.ops.attn_res import reference

LIMITS = {"out": 4e-3, "gradients": 5e-3}


def cases(device: torch.device) -> list[Case]:
    """Return forward and forward + backward for 4 and 12 sources."""
    big = device.type == "cuda"
    tokens, dim = (8192, 7168) if big else (64, 128)
    made = []
    for n in (4, 12):
        weight, query = torch.rand(dim, device=device) + 0.5, torch.randn(dim, device=device) / dim**0.5
        sources = [torch.randn(tokens, dim, device=device).bfloat16() for _ in range(n)]
        row = 2 * tokens * dim

        def run(weight, query, *sources):
            return attn_res(sources, weight, query)

        def torch_tier(*inputs):
            with use_tier("torch"):
                return run(*inputs)

        def check(weight=weight, query=query, sources=sources):
            few = {f"v{i}": v[:200] for i, v in enumerate(sources)}

            def formula(weight, query, *sources):
                return reference.attn_res(*sources, norm_weight=weight, query=query, eps=1e-5)

            return compare(run, formula, {"weight": weight, "query": query} | few, LIMITS)

        def fla(backward, weight=weight, query=query, sources=sources):
            from fla.ops.attnres import fused_attnres

            def peer(weight, query, *sources):
                out = fused_attnres(query, sources, weight, rms_eps=1e-5)
                return out[0] if isinstance(out, tuple) else out

            inputs = [weight.bfloat16(), query.bfloat16(), *sources]
            return gradients(peer, inputs) if backward else lambda: peer(*inputs)

        inputs = [weight, query, *sources]
        forward = {"torch tier": lambda inputs=inputs: torch_tier(*inputs)}
        forward |= importable({"fla": lambda fla=fla: fla(False)})
        both = {"torch tier": gradients(torch_tier, inputs)} | importable({"fla": lambda fla=fla: fla(True)})
        made.append(
            Case(f"AttnRes forward, {n} sources", lambda i=inputs: run(*i), forward, check, bytes=(n + 1) * row)
        )
        made.append(Case(f"AttnRes forward + backward, {n}", gradients(run, inputs), both, bytes=(3 * n + 2) * row))
    return made
