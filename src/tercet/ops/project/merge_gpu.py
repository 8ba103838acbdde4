"""`merge` on the GPU: every product but the first adds to the sum where it leaves the tensor cores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tercet.ops.gpu import operator


@operator("tercet::merge", schema="(Tensor[] rows, Tensor[] weights) -> Tensor")
def _forward(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    flat = [x.reshape(-1, x.shape[-1]) for x in rows]
    y = flat[0] @ weights[0].t()
    for x, w in zip(flat[1:], weights[1:]):
        y.addmm_(x, w.t())
    return y.view(*rows[0].shape[:-1], -1)


@_forward.register_fake
def _(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    return rows[0].new_empty(*rows[0].shape[:-1], len(weights[0]))


@operator("tercet::merge_backward", schema="(Tensor grad, Tensor[] rows, Tensor[] weights) -> (Tensor[], Tensor[])")
def _backward(grad: Tensor, rows: list[Tensor], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    flat = grad.reshape(-1, grad.shape[-1])
    d_rows = [(flat @ w).view(x.shape) for x, w in zip(rows, weights)]
    return d_rows, [flat.t() @ x.reshape(-1, x.shape[-1]) for x in rows]


@_backward.register_fake
def _(grad: Tensor, rows: list[Tensor], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [x.new_empty(x.shape) for x in rows], [w.new_empty(w.shape) for w in weights]


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Tensor) -> None:
    rows, weights = inputs
    ctx.count = len(rows)
    ctx.save_for_backward(*rows, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    saved = ctx.saved_tensors
    return _backward(grad, list(saved[: ctx.count]), list(saved[ctx.count :]))


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(*tensors: Tensor) -> str | None:
    """Return why the products cannot share one sum, or None."""
    if len({x.dtype for x in tensors}) > 1:
        return f"rows and weights are of several types: {sorted({str(x.dtype) for x in tensors})}"
    return None


def call(*tensors: Tensor) -> Tensor:
    """See `tercet.ops.project.merge`."""
    count = len(tensors) // 2
    return _forward(list(tensors[:count]), list(tensors[count:]))
