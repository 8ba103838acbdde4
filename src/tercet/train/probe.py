"""Looks inside a model during one forward pass: who reads whom through depth, how fast KDA forgets, who routes where.

A `Probe` is an `Observer`: pass it in the `Context` of a validation batch. It sees what the layers see and changes
nothing; its sums may cover several batches. What it measures is stated at `Probe.row`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tercet.model.context import Context, Observer, Place
from tercet.model.transformer import CausalLM
from tercet.ops import Routing, attn_res_weights, kda_gate

HALF_LIFE_EDGES = tuple(2.0 ** (n / 2) for n in range(-6, 27))
"""Bounds of the half-life histogram in tokens: half octaves from 1/8 (the gate's floor e^-5 is 0.139) to 8192."""

NEAR_FLOOR, NEAR_ONE = 4.5, 0.05
"""Rate −g above which a channel forgets at about the bounded gate's floor, and below which it hardly forgets."""


@dataclass
class _Mix:
    weights: Tensor
    square: Tensor
    tokens: int


@dataclass
class _Decay:
    counts: Int[Tensor, "heads bins"]
    rate: Float[Tensor, "heads"]
    """Sum of −g."""
    near_floor: int
    near_one: int
    values: int
    """Gate values per head."""


@dataclass
class _Sums:
    mixes: dict[tuple[int, Place], _Mix] = field(default_factory=dict)
    decays: dict[int, _Decay] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)


class Probe(Observer):
    """Collects the sums behind one ``probe`` row of ``metrics.jsonl``."""

    def __init__(self, eps: float = 1e-5):
        """Start empty.

        Args:
            eps: `ModelConfig.rms_norm_eps`, with which Attention Residuals normalise their keys.
        """
        self.eps = eps
        self._sums = _Sums()

    @torch.no_grad()
    def mixing(self, layer: int, place: Place, sources: Sequence[Tensor], norm_weight: Tensor, query: Tensor) -> None:
        """Add the mean weight and the mean square of every source."""
        weights_ST = attn_res_weights(sources, norm_weight, query, eps=self.eps).flatten(1)
        square_S = torch.stack([v.float().square().mean() for v in sources])
        tokens = weights_ST.shape[1]
        seen = self._sums.mixes.setdefault(
            (layer, place), _Mix(torch.zeros(len(sources)).double(), torch.zeros(len(sources)).double(), 0)
        )
        seen.weights += weights_ST.double().sum(1).cpu()
        seen.square += square_S.double().cpu() * tokens
        seen.tokens += tokens

    @torch.no_grad()
    def decay(self, layer: int, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> None:
        """Count the half-lives ln 2 / −g of all tokens and channels, per head."""
        g_THK = kda_gate(z, A_log, dt_bias, lower_bound=lower_bound).flatten(0, 1).float()
        rate_HN = g_THK.movedim(1, 0).flatten(1).abs()
        heads, bins = len(rate_HN), len(HALF_LIFE_EDGES) - 1
        inner = torch.tensor(HALF_LIFE_EDGES[1:-1], device=rate_HN.device)
        # The first and the last bin take what lies beyond the edges; a rate of 0 is an infinite half-life.
        bin_HN = torch.bucketize(math.log(2.0) / rate_HN, inner, right=True)
        flat = bin_HN + bins * torch.arange(heads, device=rate_HN.device)[:, None]
        counts_HB = torch.bincount(flat.flatten(), minlength=heads * bins).view(heads, bins).cpu()
        seen = self._sums.decays.setdefault(
            layer, _Decay(torch.zeros_like(counts_HB), torch.zeros(heads).double(), 0, 0, 0)
        )
        seen.counts += counts_HB
        seen.rate += rate_HN.double().sum(1).cpu()
        seen.near_floor += int((rate_HN > NEAR_FLOOR).sum())
        seen.near_one += int((rate_HN < NEAR_ONE).sum())
        seen.values += rate_HN.shape[1]

    @torch.no_grad()
    def routing(self, layer: int, routing: Routing) -> None:
        """Count the tokens each expert receives."""
        load_E = torch.bincount(routing.experts.flatten(), minlength=routing.scores.shape[1]).cpu()
        self._sums.loads[layer] = self._sums.loads.get(layer, torch.zeros_like(load_E)) + load_E

    def row(self, step: int) -> dict[str, Any]:
        """Return what was seen as a row of ``metrics.jsonl``.

        ``mixes``
            one entry a mix in the order of the forward pass: ``layer``, ``place``, mean AttnRes ``weights`` of its
            sources (they sum to 1) and their ``rms``. Source 0 is the embedding and source b the sum of block b,
            finished or so far (report §2.2).
        ``decay``
            by KDA layer: ``histogram`` of half-lives per head over `half_life_edges` (shares that sum to 1),
            ``half_life`` per head at its mean rate, ln 2 / mean(−g), and the shares of gate values ``near_floor``
            (g < −4.5) and ``near_one`` (g > −0.05) (report §2.1.1). ``half_life_edges`` are in tokens.
        ``load``
            by layer, the share of assignments that each expert receives (report §2.3).
        """
        sums = self._sums
        return {
            "kind": "probe",
            "step": step,
            "mixes": [
                {
                    "layer": layer,
                    "place": place,
                    "weights": _rounded(seen.weights / seen.tokens),
                    "rms": _rounded((seen.square / seen.tokens).sqrt()),
                }
                for (layer, place), seen in sums.mixes.items()
            ],
            "half_life_edges": list(HALF_LIFE_EDGES),
            "decay": {str(layer): _decay_entry(seen) for layer, seen in sorted(sums.decays.items())},
            "load": {
                str(layer): _rounded(load / load.sum().clamp_min(1)) for layer, load in sorted(sums.loads.items())
            },
        }


def _decay_entry(seen: _Decay) -> dict[str, Any]:
    values = seen.values * len(seen.rate)
    return {
        "histogram": [_rounded(head / seen.values) for head in seen.counts.double()],
        "half_life": _rounded(math.log(2.0) * seen.values / seen.rate),
        "near_floor": round(seen.near_floor / values, 6),
        "near_one": round(seen.near_one / values, 6),
    }


def _rounded(x: Tensor) -> list[float]:
    """Five significant digits: a report shows three, and a probe of a deep model has thousands of numbers."""
    return [float(f"{value:.5g}") for value in x.tolist()]


@torch.no_grad()
def probe(
    model: CausalLM, tokens: Int[Tensor, "tokens"], cu_seqlens: Int[Tensor, "bounds"] | None, step: int
) -> dict[str, Any]:
    """Run *model* over one packed batch and return the ``probe`` row.

    Args:
        model: left as it is; no balance state moves, because only the probe observes.
        tokens: packed tokens on the model's device.
        cu_seqlens: bounds of the packed sequences.
        step: optimiser steps done.
    """
    watching = Probe(model.config.rms_norm_eps)
    model.features(tokens[None], Context(cu_seqlens=cu_seqlens, observer=watching))
    return watching.row(step)
