"""Routed experts on the GPU: sort, spread, two products forward, two back, two for the weights; no synchronisation.

Saved for the backward pass: the tokens, the plan and the two pre-activations of every row. Expert outputs are not:
with ``A = w2ᵀ dy``, the gradient of a combination weight is ``A·h`` (kernels.md §11). Rows of different experts never
share a tile, empty experts cost nothing forward and a tile of zeros in the weight gradient. Deterministic: rows are
sorted stably, and every sum has a fixed order.

Shapes: T tokens, k choices, R = T·k rows, E experts, L latent width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.ops.experts.triton_plan import plan_rows, tile_bound
from tercet.ops.experts.triton_products import gate_up_kernel, rows_kernel, weight_gradient_kernel
from tercet.ops.experts.triton_rows import combine_kernel, pull_kernel, spread_kernel
from tercet.ops.glu import Activation
from tercet.ops.gpu import (
    INTERPRETED,
    blocks,
    dense,
    float_refusal,
    operand_type,
    operator,
    power_of_two,
    takes_gluon,
)

_GROUP = 4
"""Row tiles that meet the weights together."""
_SPREAD = 2
"""Tokens a program spreads."""
_MANY_ROWS = 512
"""Rows an expert in the mean from which PyTorch's grouped product forms the weights' gradients as fast as any."""


@dataclass(frozen=True)
class Tile:
    """Shape of one program's work and how it is run."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    halved: bool = False
    """Tiles of which at most half the rows exist run at half height."""

    def launch(self) -> dict[str, int]:
        """Return the launch arguments."""
        shape = {"BM": self.rows, "BN": self.columns, "BK": self.depth}
        return {**shape, "num_warps": self.warps, "num_stages": self.stages}


def _height(rows: int, experts: int, dtype: torch.dtype) -> int:
    """Choose the rows of a tile from the mean rows an expert, which is known without asking the GPU."""
    if INTERPRETED:
        return 16
    mean = rows / experts
    height = 128 if mean > 96 else 64 if mean > 24 else 16
    return min(height, 64) if dtype == torch.float32 else height


@lru_cache(maxsize=64)
def _row_tile(height: int, depth: int, dtype: torch.dtype, *, sums: int = 1, few_rows: bool = False) -> Tile:
    """Choose a tile for products over rows.

    On an H200: 64 experts of 512 × 512 take 128 × 64 × 64 for both input projections. 112 experts of 3584 × 3072 with
    146 rows each take wide tiles, as reading operands from the L2 cache is what bounds them, and half-height last ones.
    A persistent schedule wins 2 to 9 % of single products, 1 % of the operator, and is left out.

    Args:
        height: rows of the tile.
        depth: values summed over: few are soon summed, and then two programs a multiprocessor hide each other's ends.
        dtype: type of rows and weights.
        sums: sums a value of the tile.
        few_rows: last tiles of experts are a good part of all.
    """
    if INTERPRETED:
        return Tile(16, 16, 16, 1, 1, halved=True)
    if dtype == torch.float32:
        return Tile(height, 64, 32, 4, 2)
    if height < 128:
        return Tile(height, 128, 64, 4, 4)
    if depth < 1024:
        return Tile(128, 128 // sums, 64, 4, 3)
    return Tile(128, 256 // sums, 64, 8, 4, halved=few_rows)


def _weight_tile(dtype: torch.dtype) -> Tile:
    if INTERPRETED:
        return Tile(16, 16, 16, 1, 1)
    return Tile(64, 64, 32, 4, 2) if dtype == torch.float32 else Tile(128, 128, 32, 4, 4)


@dataclass(frozen=True)
class _Work:
    """Rows cut into tiles, and what all products over rows share."""

    tiles: Tensor
    dtype: torch.dtype
    height: int
    few_rows: bool
    """Experts have fewer than four tiles in the mean."""

    @classmethod
    def of(cls, tiles: Tensor, rows: int, count: int, dtype: torch.dtype) -> _Work:
        height = _height(rows, count, dtype)
        return cls(tiles, dtype, height, rows < 4 * height * count)

    def run(
        self,
        kernel: Any,
        rows: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *scalars: float,
        tile: Tile,
        depth: int,
        columns: int,
        transposed: bool = False,
        **sizes: Any,
    ) -> None:
        """Launch a kernel of `triton_products` on rows ``[R, depth]`` and weights ``[E, ., .]``.

        A descriptor costs the CPU some microseconds, so an operand that a kernel does not read is None.
        """
        bulk = depth % tile.depth == columns % tile.columns == 0 and (INTERPRETED or self.dtype != torch.float32)
        across = [tile.depth, tile.columns] if transposed else [tile.columns, tile.depth]
        kernel[(len(self.tiles) // 3 * blocks(columns, tile.columns),)](
            *(_operand(x, [tile.rows, tile.depth], bulk) for x in rows),
            *(_operand(x, across, bulk) for x in weights),
            *(_operand(x, [tile.rows // 2, tile.depth], bulk) if tile.halved else None for x in rows),
            *outputs,
            self.tiles,
            *scalars,
            **sizes,
            GROUP=_GROUP,
            HALVE=tile.halved,
            BULK=bulk,
            OPERAND=operand_type(self.dtype),
            **tile.launch(),
        )


def _operand(x: Tensor | None, block: list[int], bulk: bool) -> TensorDescriptor | Tensor | None:
    """Describe rows, or the weights of all experts one below the other, in blocks."""
    return TensorDescriptor.from_tensor(x.flatten(0, -2), block) if bulk and x is not None else x


def _multiply(work: _Work, pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """``Σ rows @ wᵀ`` (or ``rows @ w``) of the row's own expert, of one or two pairs; weights are ``[E, out, in]``."""
    a, w = pairs[0]
    depth, columns = (w.shape[1], w.shape[2]) if transposed else (w.shape[2], w.shape[1])
    out = torch.empty(len(a), columns, dtype=dtype, device=a.device)
    second = pairs[1] if len(pairs) > 1 else (None, None)
    work.run(
        rows_kernel,
        (a, second[0]),
        (w, second[1]),
        (out,),
        tile=_row_tile(work.height, depth, a.dtype, few_rows=work.few_rows),
        depth=depth,
        columns=columns,
        transposed=transposed,
        DEPTH=depth,
        COLUMNS=columns,
        TRANSPOSED=transposed,
        TWO=len(pairs) > 1,
    )
    return out


def _weight_gradient(ends: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Per expert ``leftᵀ right`` over its rows; zeros for an expert without rows.

    In bf16 on a GPU with many rows an expert this is PyTorch's grouped product: on an H200, 64 of 512 × 512 take 0.166
    ms. With few rows an expert Hopper has a kernel of its own: 112 of 3072 × 3584 take 0.96 against 1.16 ms.
    """
    m, n, count = left.shape[1], right.shape[1], len(ends)
    if not INTERPRETED and left.dtype == torch.bfloat16 and m % 8 == n % 8 == 0:
        if len(left) < _MANY_ROWS * count and takes_gluon(left.device):
            from tercet.ops.experts import gluon_weights  # not every Triton has Gluon

            return gluon_weights.weight_gradient(ends, left, right)
        return F.grouped_mm(left.t(), right, offs=ends)
    tile = _weight_tile(left.dtype)
    out = torch.empty(count, m, n, dtype=left.dtype, device=left.device)
    weight_gradient_kernel[(count * blocks(m, tile.rows) * blocks(n, tile.columns),)](
        left, right, out, ends, M=m, N=n, OPERAND=operand_type(left.dtype), **tile.launch()
    )
    return out


def _spread(tokens: Tensor, slot: Tensor) -> Tensor:
    """Return every row's token."""
    (count, chosen), width = slot.shape, tokens.shape[1]
    out = torch.empty(slot.numel(), width, dtype=tokens.dtype, device=tokens.device)
    block = min(512, power_of_two(width))
    spread_kernel[(blocks(count, _SPREAD), blocks(width, block))](
        tokens, slot, out, count, WIDTH=width, CHOSEN=chosen, TOKENS=_SPREAD, BLOCK=block, num_warps=2
    )
    return out


def _combine(rows: Tensor, slot: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    tokens, chosen = slot.shape
    width = rows.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    block = min(2048, power_of_two(width))
    combine_kernel[(tokens, blocks(width, block))](
        rows,
        slot,
        slot if weights is None else weights,
        out,
        WIDTH=width,
        CHOSEN=chosen,
        WEIGHTED=weights is not None,
        BLOCK=block,
    )
    return out


@operator(
    "tercet::routed_experts",
    schema="(Tensor z, Tensor weights, Tensor experts, Tensor w1, Tensor w2, Tensor w3, bool situ, float beta,"
    " float linear_beta) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    z: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, ...]:
    z, weights, w1, w2, w3 = map(dense, (z, weights, w1, w2, w3))
    count, inner, latent = w1.shape
    rows = experts.numel()
    plan = plan_rows(experts, count, _height(rows, count, z.dtype))
    gate = torch.empty(rows, inner, dtype=z.dtype, device=z.device)
    up, hidden = torch.empty_like(gate), torch.empty_like(gate)
    if rows == 0:
        return torch.empty_like(z), gate, up, *plan
    work = _Work.of(plan.tiles, rows, count, z.dtype)
    work.run(
        gate_up_kernel,
        (_spread(z, plan.slot),),
        (w1, w3),
        (gate, up, hidden),
        beta,
        linear_beta,
        tile=_row_tile(work.height, latent, z.dtype, sums=2, few_rows=work.few_rows),
        depth=latent,
        columns=inner,
        L=latent,
        INNER=inner,
        SITU=situ,
    )
    y = _multiply(work, [(hidden, w2)], torch.float32, transposed=False)
    return _combine(y, plan.slot, weights, z.dtype), gate, up, *plan


@_forward.register_fake
def _(z: Tensor, weights: Tensor, experts: Tensor, w1: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows = experts.numel()
    gate = z.new_empty(rows, w1.shape[1])
    choice = experts.new_empty((rows,), dtype=torch.int32)
    slot = experts.new_empty(experts.shape, dtype=torch.int32)
    ends = experts.new_empty((w1.shape[0],), dtype=torch.int32)
    bound = tile_bound(rows, w1.shape[0], _height(rows, w1.shape[0], z.dtype))
    tiles = experts.new_empty((1 + 3 * bound,), dtype=torch.int32)
    return z.new_empty(z.shape), gate, torch.empty_like(gate), choice, slot, ends, tiles


@operator(
    "tercet::routed_experts_backward",
    schema="(Tensor d_out, Tensor z, Tensor weights, Tensor w1, Tensor w2, Tensor w3, Tensor gate, Tensor up,"
    " Tensor choice, Tensor slot, Tensor ends, Tensor tiles, bool situ, float beta, float linear_beta)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    d_out: Tensor,
    z: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    gate: Tensor,
    up: Tensor,
    choice: Tensor,
    slot: Tensor,
    ends: Tensor,
    tiles: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_out, z, weights, w1, w2, w3 = map(dense, (d_out, z, weights, w1, w2, w3))
    inner, rows = w1.shape[1], len(choice)
    if rows == 0:
        zeros = (torch.zeros_like(w1), torch.zeros_like(w2), torch.zeros_like(w3))
        return torch.empty_like(z), torch.empty_like(weights), *zeros
    work = _Work.of(tiles, rows, len(ends), z.dtype)
    rows_d_out = _spread(d_out, slot)
    d_gate = _multiply(work, [(rows_d_out, w2)], z.dtype, transposed=True)
    weighted, d_up, d_weights = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(weights)
    block = min(1024, power_of_two(inner))
    pull_kernel[(rows,)](
        d_gate,
        choice,
        weights,
        gate,
        up,
        weighted,
        d_gate,
        d_up,
        d_weights,
        beta,
        linear_beta,
        INNER=inner,
        SITU=situ,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )
    d_w2 = _weight_gradient(ends, rows_d_out, weighted)
    rows_z = _spread(z, slot)
    d_w1, d_w3 = _weight_gradient(ends, d_gate, rows_z), _weight_gradient(ends, d_up, rows_z)
    d_rows = _multiply(work, [(d_gate, w1), (d_up, w3)], torch.float32, transposed=True)
    return _combine(d_rows, slot, None, z.dtype), d_weights, d_w1, d_w2, d_w3


@_backward.register_fake
def _(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    z, weights, w1, w2, w3, *_ = inputs
    return tuple(x.new_empty(x.shape) for x in (z, weights, w1, w2, w3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, weights, _, w1, w2, w3, *ctx.settings = inputs
    _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(z, weights, w1, w2, w3, *saved)


def _differentiate(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    d_z, d_weights, d_w1, d_w2, d_w3 = _backward(d_out, *ctx.saved_tensors, *ctx.settings)
    return d_z, d_weights, None, d_w1, d_w2, d_w3, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def declines(z: Tensor, weights: Tensor, experts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, **_: Any) -> str | None:
    """Return why the kernels cannot take these inputs, or None."""
    if len({x.dtype for x in (z, w1, w2, w3)}) != 1:
        return f"rows are {z.dtype} and the experts {w1.dtype}, {w2.dtype}, {w3.dtype}"
    return float_refusal(z, weights)


def call(
    z: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    activation: Activation,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See `tercet.ops.experts.routed_experts`."""
    return _forward(z, weights, experts, w1, w2, w3, activation == "situ", beta, linear_beta)[0]
