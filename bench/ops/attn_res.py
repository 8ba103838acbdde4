"""Attention Residuals, 8192 tokens of 7168: training, with the next norm in the same pass, and two-phase inference."""

from __future__ import annotations

import torch
from harness import Case, compare, gradients, importable, relative_error

from tercet.ops import attn_res, attn_res_bank, attn_res_merge, attn_res_read, rms_norm, use_tier
from tercet.ops.attn_res import reference

LIMITS = {"out": 4e-3, "gradients": 5e-3}


def cases(device: torch.device) -> list[Case]:
    """Return forward and forward + backward for 4 and 12 sources, and the two phases for a block of 24 sub-layers."""
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
    made += [_normed(tokens, dim, n, device) for n in (4, 12)]
    made += [_normed(32_768, 1024, n, device) for n in (3, 5)] if big else []  # the `base` preset
    return made + [case for rows in ((128, tokens) if big else (16,)) for case in _two_phases(rows, dim, device)]


def _normed(tokens: int, dim: int, n: int, device: torch.device) -> Case:
    """The sub-layer's own norm in the same pass, beside the two operators one after the other."""
    weight, query = torch.rand(dim, device=device) + 0.5, torch.randn(dim, device=device) / dim**0.5
    sources = [torch.randn(tokens, dim, device=device).bfloat16() for _ in range(n)]

    def run(weight, query, *sources):
        return attn_res_read(sources, weight, query, weight)[0]

    def apart(weight, query, *sources):
        return rms_norm(attn_res(sources, weight, query), weight, eps=1e-5)

    def formula(weight, query, *sources):
        mixed = reference.attn_res(*sources, norm_weight=weight, query=query, eps=1e-5)
        return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5) * weight

    def check():
        few = {f"v{i}": v[:200] for i, v in enumerate(sources)}
        return compare(run, formula, {"weight": weight, "query": query} | few, LIMITS)

    inputs, row = [weight, query, *sources], 2 * tokens * dim
    others = {"attn_res, then rms_norm": gradients(apart, inputs)}
    name = f"AttnRes + norm, f+b, {tokens} × {dim}, {n}"
    return Case(name, gradients(run, inputs), others, check, bytes=(3 * n + 4) * row)


def _two_phases(tokens: int, dim: int, device: torch.device) -> list[Case]:
    """8 bank slots and 24 queries, beside 24 direct mixes; and one merge beside one direct mix."""
    slots, queries, row = 8, 24, 2 * tokens * dim
    folded = torch.randn(queries, dim, device=device) / dim**0.5
    bank = [torch.randn(tokens, dim, device=device).bfloat16() for _ in range(slots)]
    prefix, ones = torch.randn(tokens, dim, device=device).bfloat16(), torch.ones(dim, device=device)
    partial = attn_res_bank(bank, folded)

    def direct(j: int) -> torch.Tensor:
        return attn_res([*bank, prefix], ones, folded[j])

    def check():
        merged = attn_res_merge(partial, 3, prefix, folded[3])
        wide = [v.double() for v in (*bank, prefix)]
        exact = reference.attn_res(*wide, norm_weight=ones.double(), query=folded[3].double(), eps=1e-5)
        return {"out": (relative_error(merged, exact), LIMITS["out"])}

    name = f"{tokens} tokens, 8 slots, 24 queries"
    return [
        Case(
            f"AttnRes bank, {name}",
            lambda: attn_res_bank(bank, folded),
            {"24 direct mixes": lambda: [direct(j) for j in range(queries)]},
            check,
            bytes=(slots + 2 * queries) * row,
        ),
        Case(
            f"AttnRes merge, {tokens} tokens",
            lambda: attn_res_merge(partial, 3, prefix, folded[3]),
            {"a direct mix": lambda: direct(3)},
            bytes=4 * row,
            graph=tokens < 1000,
        ),
    ]
