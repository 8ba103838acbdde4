"""MLA's training attention with fp32 output and its output gate, beside PyTorch's fused attention with its copies."""

from __future__ import annotations

from typing import Any

import torch
from harness import Case, compare, gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tercet.ops import mla_attention, sigmoid_gate, use_tier
from tercet.ops.attention import reference
from tercet.ops.gate import sigmoid_gate_reference

LIMITS = {"out": 5e-3, "gradients": 8e-3}
CONTENT, SHARED, VALUE = 128, 64, 128


def cases(device: torch.device) -> list[Case]:
    """Return forward and forward + backward for the shapes of base and K3 and for mixed lengths, then the gate."""
    big = device.type == "cuda"
    shapes = (
        {"base 8 × 4096": ((4096,) * 8, 8), "K3 1 × 8192": ((8192,), 96), "6 mixed": (_MIXED, 96)}
        if big
        else {"2 × 20": ((20, 20), 2)}
    )
    made = []
    for name, (lengths, heads) in shapes.items():
        made += _attention(name, lengths, heads, device)
    return [*made, *_gate(8192 if big else 16, 96 if big else 2, device)]


_MIXED = (1300, 547, 2048, 963, 271, 3063)


def _draw(lengths: tuple[int, ...], heads: int, device: torch.device) -> list[torch.Tensor]:
    tokens = sum(lengths)
    widths = ((heads, CONTENT + SHARED), (heads, CONTENT + VALUE), (SHARED,))
    return [torch.randn(1, tokens, *width, device=device).bfloat16() for width in widths]


def _bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def _attention(name: str, lengths: tuple[int, ...], heads: int, device: torch.device) -> list[Case]:
    scale, inputs = (CONTENT + SHARED) ** -0.5, _draw(lengths, heads, device)

    def run(*inputs: Any, lengths: tuple[int, ...] = lengths) -> torch.Tensor:
        return mla_attention(*inputs, scale=scale, cu_seqlens=_bounds(lengths))[0]

    def torch_tier(*inputs: Any) -> torch.Tensor:
        with use_tier("torch"):
            return run(*inputs)

    def fused(q: torch.Tensor, kv: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
        """Attention of equal lengths with keys formed and values as they are: bf16 output."""
        shape = (len(lengths), lengths[0])
        k = torch.cat([kv[..., :CONTENT], pe[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
        q, k, v = (x.view(*shape, *x.shape[2:]).transpose(1, 2) for x in (q, k, kv[..., CONTENT:]))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def check() -> dict[str, tuple[float, float]]:
        few = (40, 0, 1, 150)
        tensors = dict(zip(("q", "kv", "k_pe"), _draw(few, 2, device)))

        def formula(*inputs: torch.Tensor) -> torch.Tensor:
            return reference.mla_attention(*inputs, scale=scale, lengths=few)[0]

        return compare(lambda *x: run(*x, lengths=few), formula, tensors, LIMITS)

    others = {"torch tier": torch_tier}
    if device.type == "cuda" and len(set(lengths)) == 1:
        others["cuDNN with copies, bf16 output"] = fused
    pairs = sum(n * (n + 1) / 2 for n in lengths) * heads
    forward = 2 * pairs * (CONTENT + SHARED + VALUE)
    backward = 2 * pairs * (3 * (CONTENT + SHARED) + 2 * VALUE)
    return [
        Case(
            f"MLA attention forward, {name}",
            lambda: run(*inputs),
            {label: lambda f=f: f(*inputs) for label, f in others.items()},
            check,
            flops=forward,
        ),
        Case(
            f"MLA attention f+b, {name}",
            gradients(run, inputs),
            {label: gradients(f, inputs) for label, f in others.items()},
            flops=forward + backward,
        ),
    ]


def _gate(tokens: int, heads: int, device: torch.device) -> list[Case]:
    o = torch.randn(1, tokens, heads, VALUE, device=device)
    gate = torch.randn(1, tokens, heads * VALUE, device=device).bfloat16()

    def run(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return sigmoid_gate(o, gate, dtype=torch.bfloat16)

    def eager(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return sigmoid_gate_reference(o, gate, dtype=torch.bfloat16)

    def check() -> dict[str, tuple[float, float]]:
        def formula(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return o * torch.sigmoid(gate.view_as(o))

        return compare(run, formula, {"o": o[:, :50], "gate": gate[:, :50]}, LIMITS)

    others = {"eager": gradients(eager, [o, gate])}
    return [
        Case(f"sigmoid gate, f+b, {heads} × {VALUE}", gradients(run, [o, gate]), others, check, bytes=24 * o.numel())
    ]
