"""KDA at K3's sizes, 96 heads of 128: prefill, training and decode, beside fla where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Case, gradients, importable, relative_error

from tercet.ops import fused_kda, kda_gate, l2_norm, use_tier
from tercet.ops.kda import kda_decode, reference
from tercet.ops.kda.triton_plan import use_pieces

LIMITS = {"o": 5e-3, "final": 2e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "z": 1e-2, "b": 1e-2, "state": 5e-3}
FORWARD_BYTES, BOTH_BYTES = 1280, 3584
"""Mandatory bytes per token and head (kernels.md §16)."""
RECORD = 67_840
"""Bytes of one slot and head: the fp32 matrix and three rows of q, k and v in bf16."""


def cases(device: torch.device) -> list[Case]:
    """Return prefill and training on three packings, a long sequence of few heads, softplus, decode at four sizes."""
    big = device.type == "cuda"
    heads, width = (96, 128) if big else (2, 16)
    packings = (
        {"1 × 8192": (8192,), "6 mixed": (1300, 547, 2048, 963, 271, 3063), "8 × 1024": (1024,) * 8}
        if big
        else {"2 × 20": (20, 20)}
    )
    made = []
    for name, lengths in packings.items():
        inputs = _draw(lengths, heads, width, device)
        cu = _bounds(lengths)

        def run(*inputs, cu=cu):
            return fused_kda(*inputs, cu_seqlens=cu)[0]

        both = importable({"fla": lambda i=inputs, c=cu: _fla(i, c, backward=True)})
        forward = importable(
            {"fla": lambda i=inputs, c=cu: _fla(i, c, backward=False), "FlashKDA": lambda i=inputs, c=cu: _flash(i, c)}
        )
        units = sum(lengths) * heads
        made.append(
            Case(
                f"KDA forward, {name}",
                lambda i=inputs, run=run: run(*i),
                forward,
                lambda: _check(device, width),
                bytes=FORWARD_BYTES * units,
                flops=110e3 * units,
            )
        )
        made.append(
            Case(f"KDA f+b, {name}", gradients(run, inputs), both, bytes=BOTH_BYTES * units, flops=426e3 * units)
        )
    made += _few_heads((65536,) if big else (64,), 8 if big else 1, width, device)
    made += _softplus((8192,) if big else (20,), 32 if big else 1, width, device)
    batches = (1, 32, 128, 256) if big else (2,)
    return made + [_decode_case(batch, heads, width, device) for batch in batches]


def _few_heads(lengths: tuple[int, ...], heads: int, width: int, device: torch.device) -> list[Case]:
    """One long sequence whose heads cannot fill the GPU: in pieces as planned, beside the same kernels in one."""
    inputs = _draw(lengths, heads, width, device)
    units = sum(lengths) * heads

    def run(*inputs):
        return fused_kda(*inputs)[0]

    def whole(*inputs):
        with use_pieces(1):
            return run(*inputs)

    both, alone = gradients(run, inputs), gradients(whole, inputs)
    forward = {"unsplit": lambda: whole(*inputs)}
    name = f"{lengths[0]} tokens × {heads} heads"
    return [
        Case(f"KDA forward, {name}", lambda: run(*inputs), forward, bytes=FORWARD_BYTES * units, flops=110e3 * units),
        Case(f"KDA f+b, {name}", both, {"unsplit": alone}, bytes=BOTH_BYTES * units, flops=426e3 * units),
    ]


def _softplus(lengths: tuple[int, ...], heads: int, width: int, device: torch.device) -> list[Case]:
    """The gate of Kimi Linear, beside the torch tier."""
    inputs = _draw(lengths, heads, width, device)
    units = sum(lengths) * heads

    def run(*inputs):
        return fused_kda(*inputs, lower_bound=None)[0]

    def plain(*inputs):
        with use_tier("torch"):
            return run(*inputs)

    both, torch_both = gradients(run, inputs), gradients(plain, inputs)
    name = f"softplus gate, {lengths[0]} × {heads} heads"
    forward = {"torch": lambda: plain(*inputs)}
    return [
        Case(f"KDA forward, {name}", lambda: run(*inputs), forward, bytes=FORWARD_BYTES * units, flops=110e3 * units),
        Case(f"KDA f+b, {name}", both, {"torch": torch_both}, bytes=BOTH_BYTES * units, flops=426e3 * units),
    ]


def _draw(lengths: tuple[int, ...], heads: int, width: int, device: torch.device) -> list[torch.Tensor]:
    shape = (1, sum(lengths), heads, width)
    q, k, v, z = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    b = torch.randn(shape[:3], device=device).bfloat16()
    return [q, k, v, 2 * z, b, 0.3 * torch.randn(heads, device=device), torch.randn(heads, width, device=device)]


def _bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def _check(device: torch.device, width: int) -> dict[str, tuple[float, float]]:
    """Forward, final state and gradients against fp64 autograd of the recurrence, on short packed sequences."""
    lengths = (100, 0, 1, 15, 16, 17)
    inputs = [*_draw(lengths, 2, width, device), torch.randn(len(lengths), 2, width, width, device=device)]
    cu = _bounds(lengths)

    def ours(q, k, v, z, b, A_log, dt_bias, state):
        return fused_kda(q, k, v, z, b, A_log, dt_bias, state=state, cu_seqlens=cu)

    def formula(q, k, v, z, b, A_log, dt_bias, state):
        g = kda_gate(z, A_log, dt_bias, lower_bound=-5.0)
        return reference.kda(l2_norm(q), l2_norm(k), v, g, b.sigmoid(), scale=width**-0.5, state=state, cu_seqlens=cu)

    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    (o, final), (o_exact, final_exact) = ours(*leaves), formula(*wide)
    pulls = torch.randn_like(o), torch.randn_like(final)
    grads = torch.autograd.grad((o, final), leaves, pulls)
    exact = torch.autograd.grad((o_exact, final_exact), wide, [p.double() for p in pulls])
    errors = {"o": relative_error(o, o_exact), "final": relative_error(final, final_exact)}
    names = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
    errors |= {name: relative_error(a, e) for name, a, e in zip(names, grads, exact)}
    return {name: (errors[name], limit) for name, limit in LIMITS.items()}


def _fla(inputs: list[torch.Tensor], cu: torch.Tensor, *, backward: bool) -> Callable[[], Any]:
    from fla.ops.kda import chunk_kda

    bounds = cu.to(inputs[0].device)

    def peer(q, k, v, z, b, A_log, dt_bias):
        inside = {f"use_{part}_in_kernel": True for part in ("qk_l2norm", "gate", "beta_sigmoid")}
        gate = {"A_log": A_log, "dt_bias": dt_bias.flatten(), "safe_gate": True, "lower_bound": -5.0}
        return chunk_kda(q, k, v, z, b, **gate, **inside, output_final_state=True, cu_seqlens=bounds)[0]

    return gradients(peer, inputs) if backward else lambda: peer(*inputs)


def _flash(inputs: list[torch.Tensor], cu: torch.Tensor) -> Callable[[], Any]:
    """Moonshot's CUTLASS kernels, forward only; the final state in fp32, as ours."""
    import flash_kda

    q, k, v, z, b, A_log, dt_bias = inputs
    heads, width = dt_bias.shape
    bounds = cu.to(q.device)
    out, final = torch.empty_like(v), torch.empty(len(cu) - 1, heads, width, width, device=q.device)
    fixed = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0, "final_state": final, "cu_seqlens": bounds}
    return lambda: flash_kda.fwd(q, k, v, z, b, width**-0.5, out, **fixed)


def _decode_case(batch: int, heads: int, width: int, device: torch.device) -> Case:
    slots = batch + 2
    record = torch.zeros(slots, heads, width * width + 9 * width // 2, device=device)
    state = record[:, :, : width * width].unflatten(2, (width, width))
    state.normal_()
    tail = record.view(torch.bfloat16)[:, :, 2 * width * width :].unflatten(2, (3, 3, width)).permute(0, 2, 3, 1, 4)
    tail.copy_(torch.randn(tail.shape, device=device))
    q, k, v, z, gate = (torch.randn(batch, 1, heads, width, device=device).bfloat16() for _ in range(5))
    b = torch.randn(batch, 1, heads, device=device).bfloat16()
    settings = {
        "conv_weights": tuple(torch.randn(heads * width, 1, 4, device=device) for _ in range(3)),
        "A_log": 0.3 * torch.randn(heads, device=device),
        "dt_bias": torch.randn(heads, width, device=device),
        "norm_weight": torch.randn(width, device=device),
        "slots": torch.randperm(slots, device=device)[:batch].int(),
    }

    def run(state=state, tail=tail):
        return kda_decode(q, k, v, z, b, gate, state=state, conv_state=tail, **settings)

    def check():
        pools = state.clone(), tail.clone()
        with use_tier("reference"):
            expected = run(*pools)
        again = state.clone(), tail.clone()
        o = run(*again)
        return {"o": (relative_error(o, expected), 5e-3), "state": (relative_error(again[0], pools[0]), 2e-3)}

    moved = 2 * batch * heads * RECORD
    return Case(f"KDA decode, batch {batch}", run, {}, check, bytes=moved, graph=True)
