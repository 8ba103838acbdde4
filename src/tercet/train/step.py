"""One optimiser step: micro-batches (forward, loss, backward), optimiser, balancing and QK-Clip.

`Trainer` takes its steps here, and `timing` measures the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.config import RunConfig
from tercet.data.batch import Batch
from tercet.model import CausalLM, Context, Observer, build, to_compute_dtype
from tercet.parallel import Ranks
from tercet.train.balance import LayerBalance, balancer_for
from tercet.train.loss import components
from tercet.train.observers import Observers
from tercet.train.optimizer import Optimizer, StepReport
from tercet.train.qk_clip import ClipReport, QKClip
from tercet.train.workers import Workers


@dataclass(frozen=True)
class StepOutcome:
    """What one optimiser step found and did."""

    losses: dict[str, float]
    """Mean of every component over the step's tokens, before its factor."""
    update: StepReport
    balance: dict[int, LayerBalance]
    clip: ClipReport | None


class Stepper:
    """Everything that changes a model in a step, and the order in which it does."""

    def __init__(self, model: CausalLM, config: RunConfig, ranks: Ranks):
        """Set up the optimiser, the balancer, QK-Clip and the components of the loss of *config*."""
        self.model, self.config, self.ranks = model, config, ranks
        self.optimizer = Optimizer(model, config.optim, ranks=ranks)
        self.balancer = balancer_for(model, config.balance, reduce=ranks.sum)
        threshold = config.optim.qk_clip
        self.qk_clip = None if threshold is None else QKClip(config.model, threshold, reduce_max=ranks.max)
        self.components = components(model, config.train)
        self.device = next(model.parameters()).device
        self.workers = Workers(_worker_count(config, self.device, ranks.world))

    def step(self, batches: Sequence[Batch], lr: float, progress: float) -> StepOutcome:
        """Do one step.

        Args:
            batches: this rank's micro-batches, on the model's device.
            lr: learning rate of this step.
            progress: share of the run that is done, in [0, 1].

        Raises:
            NumericsError: the third step in a row had a non-finite gradient norm.
        """
        self.balancer.begin_step()
        if self.qk_clip is not None:
            self.qk_clip.begin_step()
        losses = self._forward_backward(batches, progress)
        update = self.optimizer.step(lr)
        accepted = not update.skipped
        balance = self.balancer.finish(accepted=accepted)
        clip = None if self.qk_clip is None else self.qk_clip.end_step(self.optimizer, accepted=accepted)
        return StepOutcome(losses, update, balance, clip)

    def _forward_backward(self, batches: Sequence[Batch], progress: float) -> dict[str, float]:
        """Accumulate the gradient of the whole step's mean loss; returns the mean of every component.

        Micro-batches may run side by side; their gradients are added in the order of the micro-batches all the same.
        """
        parts = [(part, part.factor(progress)) for part in self.components]
        weights = [sum(part.weight(batch) for batch in batches) for part, _ in parts]
        summed = self.ranks.sum(torch.stack([torch.as_tensor(weight) for weight in weights])).tolist()
        totals = {part.name: max(1.0, total) for (part, _), total in zip(parts, summed)}
        parameters = list(self.model.parameters())

        def micro_step(index: int) -> tuple[tuple[Tensor | None, ...], Tensor]:
            batch = batches[index]
            context = self._context(batch, index)
            features = self.model.features(batch.tokens[None], context)
            values = torch.stack(
                [part.total(self.model, batch, features, context, factor / totals[part.name]) for part, factor in parts]
            )
            loss = values.sum()
            if (auxiliary := self.balancer.auxiliary_loss()) is not None:
                loss = loss + auxiliary / self.config.micro_batches
            return torch.autograd.grad(loss, parameters, allow_unused=True), values.detach().double()

        # Losses stay on the device until the end of the step: reading one waits for everything queued before it.
        losses = torch.zeros(len(parts), dtype=torch.float64, device=self.device)
        factors = losses.new_tensor([factor for _, factor in parts])
        for gradients, values in self.workers.map(micro_step, range(len(batches))):
            for parameter, gradient in zip(parameters, gradients):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self.optimizer.accumulate()
            losses += values / factors
            del gradients, gradient  # summed already; kept, they would lie beside the next micro-batch
        return dict(zip((part.name for part, _ in parts), self.ranks.sum(losses).tolist()))

    def _context(self, batch: Batch, index: int) -> Context:
        by_layer = {part.layer: part.valid(batch) for part in self.components if part.layer is not None}
        watching: list[Observer] = [self.balancer.begin_micro_batch(index, valid_by_layer=by_layer)]
        if self.qk_clip is not None:
            watching.append(self.qk_clip)
        observer = Observers(*watching, lock=self.workers.lock)
        return Context(cu_seqlens=batch.cu_seqlens, observer=observer, recompute=self.config.train.recompute)


def new_model(config: RunConfig, device: torch.device) -> CausalLM:
    """Return the run's model with its first weights, in the type that it computes in on *device*."""
    model = build(config.model, seed=config.train.seed, device=device)
    wanted = config.train.dtype
    if wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda"):
        to_compute_dtype(model, torch.bfloat16)
    return model


def _worker_count(config: RunConfig, device: torch.device, world: int) -> int:
    """Cores to give a micro-batch each: one on a GPU, and for `aux`, whose term belongs to the pass under way."""
    if device.type != "cpu" or config.balance.kind == "aux":
        return 1
    return min(config.train.workers or torch.get_num_threads(), -(-config.micro_batches // world))
