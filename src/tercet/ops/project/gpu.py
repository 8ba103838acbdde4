"""`project` on the GPU: cuBLAS products whose backward passes add into one gradient of the input."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tercet.ops.gpu import operator


@operator("tercet::project", schema="(Tensor x, Tensor[] weights) -> Tensor[]")
def _forward(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, w) for w in weights]


@_forward.register_fake
def _(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(w)) for w in weights]


@operator(
    "tercet::project_backward",
    schema="(Tensor x, Tensor[] weights, Tensor[] grads) -> (Tensor, Tensor[])",
)
def _backward(x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    rows = x.reshape(-1, x.shape[-1])
    flat = [g.reshape(-1, g.shape[-1]) for g in grads]
    d_x = flat[0] @ weights[0]
    for g, w in zip(flat[1:], weights[1:]):
        d_x.addmm_(g, w)
    return d_x.view(x.shape), [g.t() @ rows for g in flat]


@_backward.register_fake
def _(x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(x.shape), [w.new_empty(w.shape) for w in weights]


def _save(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: list[Tensor]) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    return _backward(x, weights, grads)


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(x: Tensor, *weights: Tensor) -> str | None:
    """Return why the shared gradient cannot be formed, or None."""
    if any(w.dtype != x.dtype for w in weights):
        return f"rows are {x.dtype} and the weights {sorted({str(w.dtype) for w in weights})}"
    return None


def call(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """See `tercet.ops.project.project`."""
    return tuple(_forward(x, list(weights)))
