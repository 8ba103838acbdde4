"""What travels beside the activations through one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tercet.model.state import LayerState
from tercet.ops import Routing

Place = Literal["attention", "mlp", "output"]


class Observer:
    """Looks at a forward pass without changing it: balancing, QK-Clip and reports are observers.

    A recomputed forward calls again with the same layer; whoever counts must key by layer and micro-batch.
    """

    def routing(self, layer: int, routing: Routing) -> None:
        """Receive a router's decision for all tokens of the micro-batch."""

    def attention(
        self,
        layer: int,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        row_max: Tensor | None,
    ) -> None:
        """Receive an MLA layer's queries ``[B, T, H, D + R]``, its keys ``[B, T, H, D]``, the part ``[B, T, R]`` of the
        keys that all heads share and, where attention tells it, the largest logit of every query ``[H, B · T]``.
        """

    def mixing(self, layer: int, place: Place, sources: Sequence[Tensor], norm_weight: Tensor, query: Tensor) -> None:
        """Receive the inputs of an Attention-Residuals mix."""

    def decay(self, layer: int, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> None:
        """Receive the gate logits ``[B, T, H, K]`` of a KDA layer."""


@dataclass
class Context:
    """One forward pass: packing, carried states, and who watches."""

    cu_seqlens: Tensor | None = None
    """Bounds of packed sequences; without it every row of the batch is one sequence."""
    states: Sequence[LayerState] | None = None
    """One state a decoder layer, updated in place; None computes from empty states and keeps nothing."""
    observer: Observer = field(default_factory=Observer)
    forced_routing: Mapping[int, Tensor] | None = None
    """Expert choice ``[tokens, k]`` by layer, for parity tests against other implementations."""
    recompute: bool = False
    """Recompute decoder layers in the backward pass."""
