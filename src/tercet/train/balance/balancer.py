"""Expert load balancing: when tokens count, and when a router's bias changes (training.md §2.4).

A step goes ``begin_step`` → for each micro-batch ``begin_micro_batch`` and its forward pass → ``finish``. What a
forward pass routes is counted once per (layer, micro-batch): a recomputed forward repeats the key and adds nothing,
even when a pipeline interleaves micro-batches, because each micro-batch has an observer of its own. Evaluation carries
no observer. The new bias acts from the next step on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tercet.config import BalanceConfig
from tercet.errors import CheckpointError, ShapeError
from tercet.model.context import Observer
from tercet.model.moe import Router
from tercet.ops import Routing, count_choices

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold distinct tokens, and over no replica."""


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class LayerBalance:
    """How evenly one layer's experts were used over one optimiser step."""

    max_violation: float
    """MaxVio of the step: largest load over mean load, minus 1; 0 is perfect."""
    load_cv: float
    """Standard deviation of the loads over their mean."""
    dead: int
    """Experts with less than a tenth of the mean load."""
    bias_range: float
    """Largest minus smallest bias after the step."""
    occupancy: float | None
    """Largest share of a target load inside one histogram bin; None without a histogram."""
    loads: tuple[int, ...]
    """Tokens dispatched to each expert."""


class BalanceObserver(Observer):
    """Feeds the routing of one micro-batch to a `Balancer`."""

    def __init__(self, balancer: Balancer, micro_batch: int, valid: Tensor | None, by_layer: Mapping[int, Tensor]):
        self._balancer, self._micro_batch = balancer, micro_batch
        self._valid, self._by_layer = valid, by_layer

    def routing(self, layer: int, routing: Routing) -> None:
        """Count this layer's tokens, unless they have been counted already."""
        self._balancer.observe(layer, self._micro_batch, routing, self._by_layer.get(layer, self._valid))


class Balancer:
    """Counts loads and leaves the bias alone (``kind = "none"``); the rules are its subclasses."""

    kind = "none"

    def __init__(self, config: BalanceConfig, routers: Mapping[int, Router], top_k: int, *, reduce: Reduce = _alone):
        """Balance *routers*.

        Args:
            config: rule and constants.
            routers: router of every MoE layer, by layer index; their bias is read and written.
            top_k: experts per token.
            reduce: sum over data ranks, called with one integer or fp64 tensor ``[layers, …]``.
        """
        self.config, self.routers, self.top_k = config, dict(sorted(routers.items())), top_k
        self._reduce = reduce
        self._counting = False
        self._counted: set[tuple[int, int]] = set()
        self._checked: set[int] = set()
        self._loads: dict[int, Int[Tensor, "experts"]] = {}
        self._occupancy: dict[int, float] = {}

    def bias(self, layer: int) -> Float[Tensor, "experts"]:
        """Return the selection bias of *layer*, the model's own buffer."""
        return self.routers[layer].e_score_correction_bias

    def begin_step(self) -> None:
        """Start counting from zero."""
        self._counting = True
        self._counted.clear()
        self._occupancy = {}
        self._loads = {
            layer: torch.zeros(self.bias(layer).shape, dtype=torch.int64, device=self.bias(layer).device)
            for layer in self.routers
        }
        for layer in self.routers:
            self._open(layer)

    def begin_micro_batch(
        self,
        index: int,
        *,
        valid: Bool[Tensor, "tokens"] | None = None,
        valid_by_layer: Mapping[int, Bool[Tensor, "tokens"]] | None = None,
    ) -> BalanceObserver:
        """Return the observer to put into the `Context` of micro-batch *index*'s forward pass.

        Args:
            index: distinct within the step on this rank.
            valid: rows that are real tokens; None counts all.
            valid_by_layer: other masks for single layers (the multi-token-prediction layer counts only rows that have
                a target for it).
        """
        return BalanceObserver(self, index, valid, valid_by_layer or {})

    @torch.no_grad()
    def observe(self, layer: int, micro_batch: int, routing: Routing, valid: Bool[Tensor, "tokens"] | None) -> None:
        """Count one layer's routing of one micro-batch; a repetition or a pass outside a step counts nothing.

        Raises:
            ShapeError: the scores are not sigmoid outputs, or *valid* is not one flag per token.
        """
        if not self._counting:
            return
        if (layer, micro_batch) in self._counted:
            self._repeat(routing, valid)
            return
        self._check_scores(layer, routing.scores)
        count_choices(self._loads[layer], routing.experts, valid)
        self._counted.add((layer, micro_batch))
        self._count(layer, micro_batch, routing, valid)

    def _check_scores(self, layer: int, scores: Tensor) -> None:
        """Refuse raw logits; looked at once per layer, because it waits for the device."""
        if layer in self._checked or not scores.numel():
            return
        low, high = (float(x) for x in scores.aminmax())
        if low < 0.0 or high > 1.0:
            raise ShapeError(
                f"router scores of layer {layer} span [{low:.3g}, {high:.3g}]; "
                "balancing needs sigmoid outputs in (0, 1), not logits"
            )
        self._checked.add(layer)

    def auxiliary_loss(self) -> Tensor | None:
        """Return the differentiable term of the current micro-batch, or None where the rule has none."""
        return None

    @torch.no_grad()
    def finish(self, *, accepted: bool) -> dict[int, LayerBalance]:
        """End the step: after an accepted one write the new biases, after a skipped one drop the counts.

        Returns:
            The balance of every layer that saw tokens in this step.
        """
        self._counting = False
        if not self._loads:
            return {}
        summed = self._reduce(torch.stack(list(self._loads.values())))
        self._loads = dict(zip(self._loads, summed))
        if accepted:
            self._solve()
        report = self._describe()
        self._loads = {}
        return report

    def _describe(self) -> dict[int, LayerBalance]:
        """Measure all layers together, so that the device is read once."""
        loads_LN = torch.stack(list(self._loads.values())).double()
        bias_LN = torch.stack([self.bias(layer) for layer in self._loads]).double()
        mean_L = loads_LN.mean(1)
        measured_LC = torch.stack(
            [
                loads_LN.amax(1) / mean_L - 1.0,
                loads_LN.std(1, correction=0) / mean_L,
                (loads_LN < 0.1 * mean_L[:, None]).sum(1),
                bias_LN.amax(1) - bias_LN.amin(1),
            ],
            dim=1,
        )
        report = {}
        for layer, row in zip(self._loads, torch.cat([measured_LC, loads_LN], dim=1).tolist()):
            violation, variation, dead, spread, *counts = row
            loads = tuple(int(count) for count in counts)
            if any(loads):
                occupancy = self._occupancy.get(layer)
                report[layer] = LayerBalance(violation, variation, int(dead), spread, occupancy, loads)
        return report

    def _open(self, layer: int) -> None:
        """Prepare what `_count` adds to; called for every layer at the start of a step."""

    def _count(self, layer: int, micro_batch: int, routing: Routing, valid: Tensor | None) -> None:
        """Add one micro-batch of one layer."""

    def _repeat(self, routing: Routing, valid: Tensor | None) -> None:
        """See the recomputation of a counted forward pass."""

    def _solve(self) -> None:
        """Turn the counts of the step into new biases."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers beside the biases, which the model's own state holds.

        Raises:
            CheckpointError: called inside a step, when counts would be lost.
        """
        if self._counting:
            raise CheckpointError("balance state can be saved only between steps: call finish() first")
        return {"kind": self.kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            CheckpointError: the state was written by another rule.
        """
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"the balance state was written by {state['kind']!r}, this run balances by {self.kind!r}; "
                "set balance.kind as it was"
            )
