"""The balancing rules: Quantile Balancing, and what it is compared with (training.md §2.3, §2.10).

==============  ======================================================================================
``qb``          k/n-quantile of the needed bias from a histogram over the whole step (the default)
``bip``         the same with both duals kept non-negative: cools hot experts, does not revive cold ones
``qb_micro``    exact quantile of every micro-batch, averaged
``sign``        ``b += γ sign(q − load)``
``sign_centred``  the same minus its mean
``aux``         ``c · n · Σ f_j P_j`` added to the loss; the bias stays
``none``        nothing
==============  ======================================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import CheckpointError, TercetWarning
from tercet.ops import Routing, count_needed
from tercet.train.balance.balancer import Balancer
from tercet.train.balance.quantile import Grid, exact_quantile, needed_bias, solve_histogram

CROWDED_STEPS = 50
"""Steps in a row with an occupancy above 1 before the balancer says so."""


class QuantileBalancer(Balancer):
    """Quantile Balancing from a histogram (report App. D)."""

    kind = "qb"

    def __init__(self, *args: Any, **kwargs: Any):
        """See `Balancer`."""
        super().__init__(*args, **kwargs)
        self.histograms: dict[int, Int[Tensor, "experts bins"]] = {}
        """int32 counts of the running step, zero between steps."""
        self._grids: dict[int, Grid] = {}
        self._averages: dict[int, Float[Tensor, "experts"]] = {}
        self._crowded_steps = 0

    def _open(self, layer: int) -> None:
        bias_N = self.bias(layer)
        shape = (bias_N.shape[0], self.config.bins)
        known = self.histograms.get(layer)
        if known is None or known.device != bias_N.device:
            self.histograms[layer] = torch.zeros(shape, dtype=torch.int32, device=bias_N.device)
        else:
            known.zero_()
        self._grids[layer] = Grid.around(bias_N, self.config.bins)

    def _count(self, layer: int, micro_batch: int, routing: Routing, valid: Tensor | None) -> None:
        grid = self._grids[layer]._asdict()
        count_needed(self.histograms[layer], routing.scores, self._cutoff(routing), **grid, valid_M=valid)

    def _cutoff(self, routing: Routing) -> Tensor:
        return routing.cutoff

    def finish(self, *, accepted: bool) -> Any:
        """See `Balancer.finish`; the histograms are empty afterwards."""
        report = super().finish(accepted=accepted)
        for histogram_NB in self.histograms.values():
            histogram_NB.zero_()
        return report

    def _solve(self) -> None:
        summed_LNB = self._reduce(torch.stack([self.histograms[layer] for layer in self.routers]))
        estimates = [
            solve_histogram(histogram_NB, self._grids[layer], self.top_k)
            for layer, histogram_NB in zip(self.routers, summed_LNB)
        ]
        tokens_LN = torch.stack([estimate.tokens for estimate in estimates]).double()
        crowded_L = torch.stack([estimate.occupancy.amax() for estimate in estimates])
        read = torch.stack([tokens_LN.amin(1), tokens_LN.amax(1), crowded_L], dim=1).tolist()
        for layer, estimate, (fewest, most, occupancy) in zip(self.routers, estimates, read):
            assert fewest == most, "every expert must have counted the same tokens"
            if most:
                self._occupancy[layer] = occupancy
                self._write(layer, self._smooth(layer, estimate.quantile))
        self._watch_resolution(max(self._occupancy.values(), default=0.0))

    def _watch_resolution(self, worst: float) -> None:
        """Say once when bins have been too coarse for `CROWDED_STEPS` in a row (training.md §2.7).

        An untrained router scores all tokens alike, so a few crowded steps at the start mean nothing.
        """
        self._crowded_steps = self._crowded_steps + 1 if worst > 1.0 else 0
        if self._crowded_steps == CROWDED_STEPS:
            warnings.warn(
                f"for {CROWDED_STEPS} steps one histogram bin has held more than an expert's target load (now "
                f"{worst:.2f} of it), so the bias cannot balance better; balance.bins is {self.config.bins}, "
                f"try {4 * self.config.bins}",
                TercetWarning,
                stacklevel=3,
            )

    def _smooth(self, layer: int, quantile_N: Tensor) -> Tensor:
        """Fold a new quantile into the moving average; the first one starts it."""
        rho = self.config.ema
        if rho == 0.0:
            return quantile_N
        old_N = self._averages.get(layer, quantile_N)
        self._averages[layer] = rho * old_N + (1.0 - rho) * quantile_N
        return self._averages[layer]

    def _write(self, layer: int, quantile_N: Tensor) -> None:
        self.bias(layer).copy_(quantile_N - quantile_N.mean())

    def state_dict(self) -> dict[str, Any]:
        """Return the moving averages by layer."""
        return {**super().state_dict(), "averages": {str(layer): b for layer, b in self._averages.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moving averages."""
        super().load_state_dict(state)
        averages = {}
        for key, value in state.get("averages", {}).items():
            layer = int(key)
            if layer not in self.routers or value.shape != self.bias(layer).shape:
                raise CheckpointError(f"the balance state of layer {layer}, {list(value.shape)}, fits no router here")
            averages[layer] = value.to(self.bias(layer).device, copy=True)
        self._averages = averages


class BinaryProgramBalancer(QuantileBalancer):
    """QB whose duals (cutoff and −bias) are clipped at zero, as in BIP; not centred, so that the clip keeps meaning."""

    kind = "bip"

    def _cutoff(self, routing: Routing) -> Tensor:
        return routing.cutoff.clamp(min=0.0)

    def _write(self, layer: int, quantile_N: Tensor) -> None:
        self.bias(layer).copy_(quantile_N.clamp(max=0.0))


class MicroQuantileBalancer(Balancer):
    """Exact quantile per micro-batch, averaged over micro-batches and ranks: not what the pooled tokens would say."""

    kind = "qb_micro"

    def __init__(self, *args: Any, **kwargs: Any):
        """See `Balancer`."""
        super().__init__(*args, **kwargs)
        self._sums: dict[int, Tensor] = {}

    def _open(self, layer: int) -> None:
        experts, device = self.bias(layer).shape[0], self.bias(layer).device
        # The last column counts the micro-batches, so that one collective carries both.
        self._sums[layer] = torch.zeros(experts + 1, dtype=torch.float64, device=device)

    def _count(self, layer: int, micro_batch: int, routing: Routing, valid: Tensor | None) -> None:
        needed_MN = needed_bias(routing.scores, routing.cutoff)
        needed_MN = needed_MN if valid is None else needed_MN[valid]
        if needed_MN.shape[0]:
            self._sums[layer][:-1] += exact_quantile(needed_MN, self.top_k)
            self._sums[layer][-1] += 1.0

    def _solve(self) -> None:
        summed_LN = self._reduce(torch.stack(list(self._sums.values())))
        for layer, sums_N in zip(self._sums, summed_LN):
            if float(sums_N[-1]):
                quantile_N = sums_N[:-1] / sums_N[-1]
                self.bias(layer).copy_(quantile_N - quantile_N.mean())


class SignBalancer(Balancer):
    """Loss-free balancing by a fixed step per expert (DeepSeek-V3 §4.2)."""

    kind = "sign"

    def _solve(self) -> None:
        for layer, loads_N in self._loads.items():
            # load_j below or above q = Σ load / n, compared in integers.
            direction_N = (loads_N.sum() - loads_N * loads_N.shape[0]).sign()
            self.bias(layer).add_(self._step(direction_N.to(self.bias(layer).dtype)), alpha=self.config.sign_rate)

    def _step(self, direction_N: Tensor) -> Tensor:
        return direction_N


class CentredSignBalancer(SignBalancer):
    """The sign rule without drift of the mean (Moonlight App. C)."""

    kind = "sign_centred"

    def _step(self, direction_N: Tensor) -> Tensor:
        return direction_N - direction_N.mean()


class AuxiliaryBalancer(Balancer):
    """Load-balancing loss ``c · n · Σ_j f_j P_j`` per micro-batch and layer (DeepSeekMoE §4.1)."""

    kind = "aux"

    def __init__(self, *args: Any, **kwargs: Any):
        """See `Balancer`."""
        super().__init__(*args, **kwargs)
        self._terms: list[Tensor] = []

    def begin_step(self) -> None:
        """Start counting from zero."""
        self._terms = []
        super().begin_step()

    def _count(self, layer: int, micro_batch: int, routing: Routing, valid: Tensor | None) -> None:
        self._terms.append(self._term(routing, valid))

    def _repeat(self, routing: Routing, valid: Tensor | None) -> None:
        # A recomputed layer must save the same tensors as it did the first time, so the term is built and dropped.
        self._term(routing, valid)

    @torch.enable_grad()
    def _term(self, routing: Routing, valid: Tensor | None) -> Tensor:
        scores, experts = routing.scores, routing.experts
        if valid is not None:
            scores, experts = scores[valid], experts[valid]
        loads_N = torch.bincount(experts.reshape(-1), minlength=scores.shape[1])
        share_N = loads_N.to(scores.dtype) / max(1, experts.numel())
        mean_N = (scores / scores.sum(-1, keepdim=True)).sum(0) / max(1, scores.shape[0])
        return self.config.aux_weight * scores.shape[1] * (share_N * mean_N).sum()

    def auxiliary_loss(self) -> Tensor | None:
        """Return Σ over layers for the micro-batch just run, once; weight it by the micro-batch's share of the step.

        Uniform routing with uniform scores gives ``c`` per layer, the smallest value that balance can reach.
        """
        if not self._terms:
            return None
        total = torch.stack(self._terms).sum()
        self._terms = []
        return total
