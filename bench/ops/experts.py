"""Routed experts: a rank of K3 (skewed, few rows an expert) and a layer of `base` (many rows); the router's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from grouped import eager_situ, grouped_experts
from harness import Case, compare, gradients

from tercet.ops import routed_experts, router_logits, situ_glu
from tercet.ops.experts import reference


def cases(device: torch.device) -> list[Case]:
    """Return forward, and forward + backward; peers are PyTorch's grouped products around an activation."""
    if device.type != "cuda":
        return [*_cases(device, "tiny", 6, 32, 48, 40, 2), *_logits(device, 40, 32, 6)]
    return [
        *_cases(device, "112 × 3584 × 3072, 16,384 rows", 112, 3584, 3072, 1024, 16),
        *_cases(device, "64 × 512 × 512, 196,608 rows", 64, 512, 512, 32768, 6),
        *_logits(device, 32768, 1024, 64),
    ]


def _cases(device: torch.device, name: str, count: int, latent: int, inner: int, tokens: int, k: int) -> list[Case]:
    big = device.type == "cuda"
    dtype = torch.bfloat16 if big else torch.float32
    z = torch.randn(tokens, latent, device=device).to(dtype)
    weights = torch.rand(tokens, k, device=device)
    popularity = torch.arange(1, count + 1, device=device).float() ** -0.5
    experts = torch.multinomial(popularity.expand(tokens, -1), k)
    shapes = ((inner, latent), (latent, inner), (inner, latent))
    matrices = [(torch.randn(count, *s, device=device) / s[1] ** 0.5).to(dtype) for s in shapes]

    def ours(z, weights, *matrices):
        return routed_experts(z, weights, experts, *matrices)

    def grouped(activation):
        return lambda z, weights, *w: grouped_experts(z, weights, experts, *w, activation=activation)

    def check():
        few = min(count, 9)
        chosen = experts[:100] % few
        part = 8 if latent > 1024 else 1
        small = [m[:few, : m.shape[1] // part, : m.shape[2] // part].contiguous() for m in matrices]
        tensors = {"z": z[:100, : latent // part], "weights": weights[:100]}
        tensors |= dict(zip(("w1", "w2", "w3"), small))

        def run(z, p, *w):
            return routed_experts(z, p, chosen, *w)

        def formula(z, p, *w):
            return reference.routed_experts(z, p, chosen, *w, activation="situ", beta=4.0, linear_beta=25.0)

        return compare(run, formula, tensors, {"out": 5e-3, "gradients": 5e-3})

    inputs = [z, weights, *matrices]
    peers = {"grouped_mm + eager activation": grouped(eager_situ), "grouped_mm + SiTU kernel": grouped(situ_glu)}
    peers = peers if big else {}
    size = 2 * sum(m.numel() for m in matrices)
    flops = 2 * tokens * k * 3 * latent * inner
    with torch.no_grad():
        forward = {name: (lambda f=f: f(*inputs)) for name, f in peers.items()}
    both = {name: gradients(f, inputs) for name, f in peers.items()}
    return [
        Case(f"experts forward, {name}", lambda: ours(*inputs), forward, check, size, flops),
        Case(f"experts forward + backward, {name}", gradients(ours, inputs), both, bytes=3 * size, flops=3 * flops),
    ]


def _logits(device: torch.device, tokens: int, hidden: int, count: int) -> list[Case]:
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    weight = 0.02 * torch.randn(count, hidden, device=device)

    def plain(x, weight):
        return F.linear(x.to(weight.dtype), weight)

    def check():
        bounds = {"out": 1e-6, "weight": 1e-6, "gradients": 5e-3}
        return compare(router_logits, plain, {"x": x[:500], "weight": weight}, bounds)

    inputs = [x, weight]
    size = 2 * x.numel() + 4 * (weight.numel() + tokens * count)
    flops = 2 * tokens * hidden * count
    name = f"{tokens} × {hidden} → {count}"
    peer, both = {"fp32 product": lambda: plain(*inputs)}, {"fp32 product": gradients(plain, inputs)}
    ours = gradients(router_logits, inputs)
    return [
        Case(f"router logits forward, {name}", lambda: router_logits(*inputs), peer, check, size, flops),
        Case(f"router logits forward + backward, {name}", ours, both, bytes=3 * size, flops=3 * flops),
    ]
