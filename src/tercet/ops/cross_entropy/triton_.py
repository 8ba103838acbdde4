"""Linear cross-entropy in chunks of tokens: cuBLAS for the three products, one kernel for everything between them.

A chunk's logits leave the first product in fp32. One program a token then finds their log-sum-exp in one pass and
overwrites them with their gradient in a second, in x's type and in place: the bf16 gradient of column j lands in the
bytes of columns up to j/2, which have been read. The only large buffer is one chunk of fp32 logits (`CHUNK_BYTES`);
whole logits never exist. Memory traffic is 18 bytes a logit, against 6 D operations.

The head's gradient is summed over chunks in the head's own type; each addition rounds once. Deterministic.

`token_logprobs` runs the same kernel forward and, for the gradient, once more on recomputed logits.

Shapes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.ops.gpu import dense, float_refusal, operator

CHUNK_BYTES = 5 << 28
"""Largest buffer of fp32 logits: 1.25 GiB, 2048 tokens of a 163,840-word vocabulary."""
_BLOCK = 8192


@triton.jit
def _row_kernel(
    logits,
    gradient,
    targets,
    pull,
    entropy_pull,
    logprob,
    normaliser,
    entropy,
    vocab,
    gradient_stride,
    scale,
    BLOCK: tl.constexpr,
    MEASURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """Measure a row (log-sum-exp, log-probability, entropy), then replace it by its gradient; either part optional."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    logits += row * vocab
    if MEASURE:
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        moment = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            inside = first + column < vocab
            z = tl.load(logits + first + column, mask=inside, other=float("-inf")) * scale
            raised = tl.maximum(largest, z)
            base = tl.where(raised == float("-inf"), 0.0, raised)
            decay, weight = tl.exp(largest - base), tl.exp(z - base)
            mass = mass * decay + weight
            if ENTROPY:
                moment = moment * decay + weight * tl.where(inside, z, 0.0)
            largest = raised
        top = tl.max(largest, 0)
        lift = tl.exp(largest - top)
        total = tl.sum(mass * lift, 0)
        log_z = top + tl.log(total)
        picked = tl.load(logits + target, mask=target >= 0, other=0.0) * scale
        tl.store(logprob + row, tl.where(target >= 0, picked - log_z, 0.0))
        tl.store(normaliser + row, log_z)
        spread = log_z
        if ENTROPY:
            spread = log_z - tl.sum(moment * lift, 0) / total
            tl.store(entropy + row, tl.where(target >= 0, spread, 0.0))
    else:
        log_z = tl.load(normaliser + row)
        spread = tl.load(entropy + row)
    if GRADIENT:
        toward = tl.load(pull + row)
        sharpen = tl.full([], 0.0, tl.float32)
        if ENTROPY:
            sharpen = tl.load(entropy_pull + row)
        gradient += row * gradient_stride
        for first in range(0, vocab, BLOCK):
            inside = first + column < vocab
            log_p = tl.load(logits + first + column, mask=inside, other=0.0) * scale - log_z
            p = tl.exp(log_p)
            d = toward * (tl.where(first + column == target, 1.0, 0.0) - p)
            if ENTROPY:
                d -= sharpen * p * (log_p + spread)
            tl.debug_barrier()  # the stores below reuse bytes that other threads have just read
            tl.store(gradient + first + column, (d * scale).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    factor = tl.load(factor).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=0.0)
        tl.store(values + at, (value.to(tl.float32) * factor).to(value.dtype), mask=at < count)


class _Chunks:
    """Walks the tokens chunk by chunk; each step multiplies out fp32 logits and can take their gradient back."""

    def __init__(self, x: Tensor, weight: Tensor, *, need_x: bool, need_weight: bool):
        self.x, self.weight = dense(x), dense(weight)
        tokens, vocab = x.shape[0], weight.shape[0]
        limit = max(128, CHUNK_BYTES // (4 * vocab) // 128 * 128)
        pieces = max(1, triton.cdiv(tokens, limit))
        self.size = min(tokens, triton.cdiv(triton.cdiv(tokens, pieces), 128) * 128)
        self.buffer = torch.empty(self.size, vocab, dtype=torch.float32, device=x.device)
        self.gradient = self.buffer.view(x.dtype)[:, :vocab]
        self.d_x = torch.empty_like(self.x if need_x else self.x[:0])
        self.d_weight = torch.empty_like(self.weight if need_weight else self.weight[:0])
        self.need_x, self.need_weight = need_x, need_weight

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the tokens of a chunk, their logits, and where to leave the gradient of these."""
        for start in range(0, self.x.shape[0], self.size):
            here = slice(start, min(start + self.size, self.x.shape[0]))
            rows = self.x[here]
            logits, gradient = self.buffer[: len(rows)], self.gradient[: len(rows)]
            if rows.is_cuda and rows.dtype != torch.float32:
                torch.mm(rows, self.weight.t(), out_dtype=torch.float32, out=logits)
            else:
                torch.mm(rows.float(), self.weight.t().float(), out=logits)
            yield here, logits, gradient
            if self.need_x:
                torch.mm(gradient, self.weight, out=self.d_x[here])
            if self.need_weight and start == 0:
                torch.mm(gradient.t(), rows, out=self.d_weight)
            elif self.need_weight:
                self.d_weight.addmm_(gradient.t(), rows)
        if self.need_weight and self.x.shape[0] == 0:
            self.d_weight.zero_()


def _launch(
    logits: Tensor, gradient: Tensor, scale: float, here: slice, rows: dict[str, Tensor], **flags: bool
) -> None:
    vocab = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _row_kernel[(logits.shape[0],)](
        logits,
        gradient,
        *(value[here] for value in rows.values()),
        vocab,
        gradient.stride(0),
        scale,
        BLOCK=block,
        **flags,
        num_warps=max(1, min(16, block // 512)),
    )


@operator(
    "tercet::linear_cross_entropy",
    schema="(Tensor x, Tensor weight, Tensor targets, Tensor loss_weight, bool need_x, bool need_weight)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chunks = _Chunks(x, weight, need_x=need_x, need_weight=need_weight)
    factor = torch.where(targets >= 0, loss_weight.float(), 0.0)
    logprob = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    rows = {"targets": targets.contiguous(), "pull": -factor, "entropy_pull": factor, "logprob": logprob}
    rows["normaliser"] = rows["entropy"] = torch.empty_like(logprob)
    for here, logits, gradient in chunks:
        _launch(logits, gradient, 1.0, here, rows, MEASURE=True, ENTROPY=False, GRADIENT=need_x or need_weight)
    return -(logprob * factor).sum(), -logprob, chunks.d_x, chunks.d_weight


@_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = x.new_empty(x.shape[:1], dtype=torch.float32)
    d_x = x.new_empty(x.shape if need_x else (0, x.shape[1]))
    d_weight = weight.new_empty(weight.shape if need_weight else (0, weight.shape[1]))
    return losses.new_empty(()), losses, d_x, d_weight


@operator("tercet::scale_", mutates_args=("values",), schema="(Tensor(a!) values, Tensor factor) -> ()")
def _scale(values: Tensor, factor: Tensor) -> None:
    torch.autograd.graph.increment_version(values)
    if values.numel():
        _scale_kernel[(triton.cdiv(values.numel(), 4096),)](values, factor, values.numel(), BLOCK=4096)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, d_x, d_weight = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(losses, d_x, d_weight)
    ctx.save_for_backward(d_x, d_weight)
    ctx.needs = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    d_x, d_weight = ctx.saved_tensors
    _scale(d_x, grad)
    _scale(d_weight, grad)
    need_x, need_weight = ctx.needs
    return d_x if need_x else None, d_weight if need_weight else None, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)


@operator(
    "tercet::token_logprobs",
    schema="(Tensor x, Tensor weight, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)",
)
def _logprobs(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logprob = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    rows = {"targets": targets.contiguous(), "pull": logprob, "entropy_pull": logprob, "logprob": logprob}
    rows["normaliser"], rows["entropy"] = torch.empty_like(logprob), torch.empty_like(logprob)
    for here, logits, gradient in _Chunks(x, weight, need_x=False, need_weight=False):
        _launch(logits, gradient, 1.0 / temperature, here, rows, MEASURE=True, ENTROPY=True, GRADIENT=False)
    return logprob, rows["entropy"], rows["normaliser"]


@_logprobs.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logprob = x.new_empty(x.shape[:1], dtype=torch.float32)
    return logprob, torch.empty_like(logprob), torch.empty_like(logprob)


@operator(
    "tercet::token_logprobs_backward",
    schema="(Tensor x, Tensor weight, Tensor targets, float temperature, Tensor entropy, Tensor normaliser,"
    " Tensor d_logprob, Tensor d_entropy) -> (Tensor, Tensor)",
)
def _logprobs_backward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Tensor,
    normaliser: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor,
) -> tuple[Tensor, Tensor]:
    chunks = _Chunks(x, weight, need_x=True, need_weight=True)
    kept = targets >= 0
    rows = {
        "targets": targets.contiguous(),
        "pull": torch.where(kept, d_logprob.float(), 0.0),
        "entropy_pull": torch.where(kept, d_entropy.float(), 0.0),
        "logprob": normaliser,
        "normaliser": normaliser,
        "entropy": entropy,
    }
    for here, logits, gradient in chunks:
        _launch(logits, gradient, 1.0 / temperature, here, rows, MEASURE=False, ENTROPY=True, GRADIENT=True)
    return chunks.d_x, chunks.d_weight


@_logprobs_backward.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, ctx.temperature = inputs
    _, entropy, normaliser = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(normaliser)
    ctx.save_for_backward(x, weight, targets, entropy, normaliser)


def _differentiate_logprobs(
    ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None, _: Any
) -> tuple[Tensor, Tensor, None, None]:
    x, weight, targets, entropy, normaliser = ctx.saved_tensors
    pulls = [torch.zeros_like(entropy) if d is None else d for d in (d_logprob, d_entropy)]
    d_x, d_weight = _logprobs_backward(x, weight, targets, ctx.temperature, entropy, normaliser, *pulls)
    return d_x, d_weight, None, None


_logprobs.register_autograd(_differentiate_logprobs, setup_context=_save_logprobs)


def declines(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} and the head {weight.dtype}"
    return float_refusal(x)


def call(x: Tensor, weight: Tensor, targets: Tensor, loss_weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.linear_cross_entropy`."""
    wanted = torch.is_grad_enabled()
    need = (wanted and x.requires_grad, wanted and weight.requires_grad)
    loss, losses, _, _ = _cross_entropy(x, weight, targets, loss_weight, *need)
    return loss, losses


def call_logprobs(x: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """See `tercet.ops.cross_entropy.token_logprobs`."""
    logprob, entropy, _ = _logprobs(x, weight, targets, temperature)
    return logprob, entropy
