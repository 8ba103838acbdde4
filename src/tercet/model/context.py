"""What travels beside the activations through one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from tercet.model.state import LayerState
from tercet.ops import Routing

Place = Literal["attention", "mlp", "output"]


class Attended(NamedTuple):
    """What an MLA layer attends with."""

    q: Float[Tensor, "batch tokens heads width"]
    k_nope: Float[Tensor, "batch tokens heads content"]
    """Keys of each head, without the part that all share."""
    k_pe: Float[Tensor, "batch tokens shared"]
    scale: float
    cu_seqlens: Int[Tensor, "bounds"] | None
    row_max: Float[Tensor, "heads tokens"] | None
    """Largest logit of every query, scale included, where attention tells it."""


class Observer:
    """Looks at a forward pass without changing it: balancing, QK-Clip and reports are observers.

    A recomputed forward calls again with the same layer; whoever counts must key by layer and micro-batch.
    """

    def routing(self, layer: int, routing: Routing) -> None:
        """Receive a router's decision for all tokens of the micro-batch."""

    def attention(self, layer: int, attended: Attended) -> None:
        """Receive what an MLA layer attends with."""

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


PLAIN = Context()
"""Nothing beside the activations. One for all, as a compiler cannot make one."""
