"""Routers without a model, and the simulated scores of training.md §2.8."""

import torch

from tercet.config import BalanceConfig
from tercet.model.moe import Router
from tercet.ops import Routing, route
from tercet.train.balance import BALANCERS, Balancer


def make_balancer(
    experts: int, top_k: int, *, kind: str = "qb", bias: torch.Tensor | None = None, reduce=None, **settings
) -> Balancer:
    router = Router(4, experts)
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    options = {} if reduce is None else {"reduce": reduce}
    return BALANCERS[kind](BalanceConfig(kind=kind, **settings), {0: router}, top_k, **options)


def routed(balancer: Balancer, scores: torch.Tensor) -> Routing:
    """Route raw sigmoid scores with the balancer's bias."""
    return route(scores.logit(), balancer.bias(0), top_k=balancer.top_k)


def step(balancer: Balancer, *micro_batches: torch.Tensor, accepted: bool = True):
    """One optimiser step over micro-batches of scores; returns the layer's report."""
    balancer.begin_step()
    for index, scores in enumerate(micro_batches):
        balancer.begin_micro_batch(index).routing(0, routed(balancer, scores))
    return balancer.finish(accepted=accepted).get(0)


class Skewed:
    """Fresh batches of scores: logits N(0, 1) plus an offset N(0, σ²) for each expert."""

    def __init__(self, experts: int, tokens: int, spread: float, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.offsets = spread * torch.randn(experts, generator=self.generator)
        self.tokens = tokens

    def batch(self) -> torch.Tensor:
        noise = torch.randn(self.tokens, len(self.offsets), generator=self.generator)
        return (noise + self.offsets).sigmoid()


NOISE_QUANTILE = {16: 1.77, 64: 2.34, 256: 2.83, 896: 3.21}


def noise_floor(experts: int, top_k: int, tokens: int) -> float:
    """MaxVio that sampling alone leaves (training.md §2.8)."""
    return NOISE_QUANTILE[experts] / (tokens * top_k / experts) ** 0.5
