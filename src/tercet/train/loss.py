"""The loss as a sum of components, each a weighted mean over the whole optimiser step (training.md §7).

A mean of micro-batch means would weigh tokens unevenly, so every component first says how much weight a batch carries;
the loop divides by the total of the step. Pre-training, fine-tuning and distillation differ in their components, not
in their loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tercet.config import TrainConfig
from tercet.data.batch import Batch
from tercet.model import CausalLM, Context, Features
from tercet.ops import IGNORE, linear_cross_entropy


class Component(ABC):
    """One term of the loss."""

    name: str
    layer: int | None = None
    """The decoder layer that only this component runs, if any: its router counts only rows valid here."""

    @abstractmethod
    def weight(self, batch: Batch) -> Tensor:
        """Return the summed token weight this component sees in *batch* (fp64 scalar)."""

    def valid(self, batch: Batch) -> Tensor:
        """Return which rows carry this component."""
        return batch.loss_weight > 0

    @abstractmethod
    def total(self, model: CausalLM, batch: Batch, features: Features, context: Context, scale: float) -> Tensor:
        """Return ``scale · Σ_t w_t loss_t`` over *batch*; differentiable."""

    def factor(self, progress: float) -> float:
        """Return the component's share of the loss at *progress* in [0, 1] of the run."""
        return 1.0


class NextToken(Component):
    """Cross-entropy of token t+1 at every position."""

    name = "loss"

    def weight(self, batch: Batch) -> Tensor:
        """See `Component.weight`."""
        return batch.loss_weight.double().sum()

    def total(self, model: CausalLM, batch: Batch, features: Features, context: Context, scale: float) -> Tensor:
        """See `Component.total`."""
        rows = features.hidden.flatten(0, 1)
        loss, _ = linear_cross_entropy(rows, model.lm_head.weight, batch.targets, batch.loss_weight * scale)
        return loss


class MultiToken(Component):
    """Cross-entropy of token t+2 through the MTP layer; positions without such a token carry none."""

    name = "mtp_loss"

    def __init__(self, layer: int, early: float, late: float):
        """Weigh the loss of MTP layer *layer* by *early*, and by *late* in the last third of the run."""
        self.layer, self.early, self.late = layer, early, late

    def factor(self, progress: float) -> float:
        """Return *early*, and *late* in the last third of the run (training.md §7)."""
        return self.early if progress < 2 / 3 else self.late

    def weight(self, batch: Batch) -> Tensor:
        """See `Component.weight`."""
        return self._targets(batch)[1].double().sum()

    def valid(self, batch: Batch) -> Tensor:
        """See `Component.valid`."""
        return self._targets(batch)[1] > 0

    def total(self, model: CausalLM, batch: Batch, features: Features, context: Context, scale: float) -> Tensor:
        """See `Component.total`."""
        targets, weight = self._targets(batch)
        rows = model.mtp_hidden(features.mixture, batch.targets.clamp(min=0)[None], context).flatten(0, 1)
        loss, _ = linear_cross_entropy(rows, model.lm_head.weight, targets, weight * scale)
        return loss

    @staticmethod
    def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
        """Token t+2 of every row: the next row's target, unless the next row starts another sequence."""
        following = torch.cat([batch.targets[1:], batch.targets.new_full((1,), IGNORE)])
        last = batch.cu_seqlens[1:].long() - 1
        following[last[last >= 0]] = IGNORE
        targets = torch.where(batch.targets >= 0, following, IGNORE)
        return targets, batch.loss_weight * (targets >= 0)


def components(model: CausalLM, settings: TrainConfig) -> list[Component]:
    """Return the pre-training components of *model*."""
    parts: list[Component] = [NextToken()]
    if model.config.num_nextn_predict_layers:
        parts.append(MultiToken(model.config.num_layers, settings.mtp_weight, settings.mtp_weight_final))
    return parts
