"""Attention Residuals on the GPU, forward: one pass over the sources (backward: `triton_backward`).

A program owns whole tokens, so a token's n sources are read once: their norm and score come from the same registers
that feed an online softmax, in fp32, with one cast at the end. All sources of all its tokens are one loop, so that
loads run ahead of the reductions through shared memory, from one token into the next; a loop that stays a loop is what
lets the compiler do that (`source`). Of wide rows a multiprocessor holds two programs, which wait for their reductions
in turn; a narrow row belongs to one warp, and every token to a program of its own.

With `attn_res_read` the norm in front of the next sub-layer happens in the same registers: forward it spares a pass
over the mixture, backward three. It also hands its sources on: whoever reads them next gives their gradient so far, to
which the backward kernel adds in fp32 with one rounding. So a bank slot's gradient grows in a fixed order without
passes of its own (kernels.md §7).

Bytes a token: forward ``n + 1`` rows (with the norm ``n + 2``), backward ``2n + 2`` rows and one for every gradient
handed in. Deterministic for one device.

Shapes: n sources, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.attn_res import triton_backward
from tercet.ops.attn_res.triton_backward import attn_res_backward, folded_query, source, sum_two
from tercet.ops.compiling import traced
from tercet.ops.gpu import chip, dense, fitted, float_refusal, operator, power_of_two

MAX_SOURCES = 32
MAX_WIDTH = 16384
_VALUES, _RESIDENT = 64, 2
"""Values of a wide row that a thread holds, and programs on a multiprocessor; best on an H200, as are the stages."""
_STAGES, _STAGES_NORMED = 4, 3
"""Sources in flight."""


@fitted
@triton.jit
def _forward_kernel(
    sources,
    weight,
    query,
    next_weight,
    out,
    normed,
    numbers,
    tokens,
    eps,
    next_eps,
    NORMED: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = column < D
    folded = folded_query(weight, query, column, inside)
    total = tl.zeros([BLOCK], tl.float32)
    scores = tl.full([SLOTS], float("-inf"), tl.float32)
    norms = tl.zeros([SLOTS], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    for step in tl.range(0, tl.cdiv(tokens - program, programs) * N, num_stages=STAGES):
        i = step % N
        token = (program + step // N * programs).to(tl.int64)
        at = token * D + column
        v = tl.load(source(sources, i, N) + at, mask=inside, other=0.0).to(tl.float32)
        square, product = tl.reduce((v * v, v * folded), 0, sum_two)
        r = tl.rsqrt(square / D + eps)
        score = r * product
        scores = tl.where(slot == i, score, scores)
        norms = tl.where(slot == i, r, norms)
        raised = tl.maximum(largest, score)
        total = total * tl.exp(largest - raised) + v * tl.exp(score - raised)
        largest = raised
        if i == N - 1:
            p = tl.exp(scores - largest)
            mass = tl.sum(p, 0)
            to = numbers + token * (2 * N + 1)
            mixed = (total * (1.0 / mass)).to(out.dtype.element_ty)
            tl.store(out + at, mixed, mask=inside)
            if NORMED:
                wide = mixed.to(tl.float32)
                next_r = tl.rsqrt(tl.sum(wide * wide, 0) / D + next_eps)
                unit = (wide * next_r).to(mixed.dtype).to(tl.float32)
                w = tl.load(next_weight + column, mask=inside, other=0.0).to(mixed.dtype).to(tl.float32)
                tl.store(normed + at, (unit * w).to(mixed.dtype), mask=inside)
                tl.store(to + 2 * N, next_r)
            tl.store(to + slot, p / mass, mask=slot < N)
            tl.store(to + N + slot, norms, mask=slot < N)
            total = tl.zeros([BLOCK], tl.float32)
            largest = tl.full([], float("-inf"), tl.float32)


@operator(
    "tercet::attn_res",
    schema="(Tensor[] sources, Tensor norm_weight, Tensor query, Tensor? next_weight, float eps, float next_eps)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward(
    sources: list[Tensor],
    norm_weight: Tensor,
    query: Tensor,
    next_weight: Tensor | None,
    eps: float,
    next_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mixture, numbers ``[…, 2n + 1]``, and with *next_weight* the mixture's norm (empty without).

    A token's numbers are p and r of its sources and r of the norm behind the mixture.
    """
    sources = [dense(v) for v in sources]
    first, count, normed = sources[0], len(sources), next_weight is not None
    dim, tokens = first.shape[-1], first.numel() // first.shape[-1]
    out = torch.empty_like(first)
    numbers = first.new_empty((*first.shape[:-1], 2 * count + 1), dtype=torch.float32)
    y = torch.empty_like(first) if normed else first.new_empty(0)
    block = power_of_two(dim)
    resident = _RESIDENT * chip(first.device).multiprocessors
    if tokens:
        _forward_kernel[(min(tokens, resident) if block > triton_backward.WARP_ROW else tokens,)](
            tuple(sources),
            dense(norm_weight),
            dense(query),
            query if next_weight is None else dense(next_weight),
            out,
            y,
            numbers,
            tokens,
            eps,
            next_eps,
            NORMED=normed,
            N=count,
            SLOTS=power_of_two(count),
            D=dim,
            BLOCK=block,
            STAGES=_STAGES_NORMED if normed else _STAGES,
            num_warps=max(1, block // (32 * _VALUES)),
        )
    return out, numbers, y


@_forward.register_fake
def _(
    sources: list[Tensor], norm_weight: Tensor, query: Tensor, next_weight: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    first = sources[0]
    numbers = first.new_empty((*first.shape[:-1], 2 * len(sources) + 1), dtype=torch.float32)
    return first.new_empty(first.shape), numbers, first.new_empty(0 if next_weight is None else first.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, norm_weight, query, next_weight, _, ctx.next_eps = inputs
    out, numbers, y = output
    ctx.normed = next_weight is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(numbers, out if ctx.normed else y)
    ctx.save_for_backward(norm_weight, query, next_weight, out, numbers, *sources)


def _differentiate(ctx: Any, d_out: Tensor, _: None, d_y: Tensor) -> tuple[Any, ...]:
    norm_weight, query, next_weight, out, numbers, *sources = ctx.saved_tensors
    saved = norm_weight, query, next_weight, out, d_y if ctx.normed else d_out, numbers
    grads, d_weight, d_query, d_next = attn_res_backward(sources, [None] * len(sources), *saved, ctx.next_eps)
    return list(grads.unbind(0)), d_weight, d_query, d_next if ctx.normed else None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


class _HandOn(torch.autograd.Function):
    """`attn_res_read`, which gives its sources out again and adds their gradients to its own.

    Not an operator of torch.library, which must not return its inputs; a compiler sees `_forward`.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *parameters, eps, next_eps = args[:5]
        sources = list(args[5:])
        out, numbers, y = _forward.function(sources, *parameters, eps, next_eps)
        ctx.set_materialize_grads(False)
        ctx.next_eps = next_eps
        ctx.save_for_backward(*parameters, out, numbers, *sources)
        return y, *sources

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, *handed = grads
        if grad is None:
            return None, None, None, None, None, *handed
        norm_weight, query, next_weight, out, numbers, *sources = ctx.saved_tensors
        saved = norm_weight, query, next_weight, out, grad, numbers
        d_sources, *d_parameters = attn_res_backward(sources, handed, *saved, ctx.next_eps)
        return *d_parameters, None, None, *d_sources.unbind(0)


def declines(
    *sources: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    eps: float,
    next_weight: Tensor | None = None,
    next_eps: float = 0.0,
) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if len({v.dtype for v in sources}) != 1:
        return f"sources of several types: {sorted({str(v.dtype) for v in sources})}"
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)} sources, more than {MAX_SOURCES}"
    if sources[0].shape[-1] > MAX_WIDTH:
        return f"width {sources[0].shape[-1]} exceeds {MAX_WIDTH}"
    return float_refusal(sources[0], norm_weight, query, *([] if next_weight is None else [next_weight]))


def call(
    *sources: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    eps: float,
    next_weight: Tensor | None = None,
    next_eps: float = 0.0,
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """See `tercet.ops.attn_res.attn_res` and, with *next_weight*, `tercet.ops.attn_res.attn_res_read`."""
    if next_weight is None:
        return _forward(list(sources), norm_weight, query, None, eps, next_eps)[0]
    wanted = any(x.requires_grad for x in (norm_weight, query, next_weight, *sources))
    if torch.is_grad_enabled() and wanted and not traced():
        y, *handed = _HandOn.apply(norm_weight, query, next_weight, eps, next_eps, *sources)
        return y, handed
    return _forward(list(sources), norm_weight, query, next_weight, eps, next_eps)[2], list(sources)
