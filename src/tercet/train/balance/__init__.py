"""Expert load balancing: Quantile Balancing and the rules it is compared with (training.md §2)."""

from __future__ import annotations

from tercet.config import BalanceConfig
from tercet.model import CausalLM
from tercet.model.moe import LatentMoE
from tercet.train.balance.balancer import BalanceObserver, Balancer, LayerBalance, Reduce
from tercet.train.balance.rules import (
    AuxiliaryBalancer,
    BinaryProgramBalancer,
    CentredSignBalancer,
    MicroQuantileBalancer,
    QuantileBalancer,
    SignBalancer,
)

BALANCERS: dict[str, type[Balancer]] = {
    rule.kind: rule
    for rule in (
        Balancer,
        QuantileBalancer,
        BinaryProgramBalancer,
        MicroQuantileBalancer,
        SignBalancer,
        CentredSignBalancer,
        AuxiliaryBalancer,
    )
}

__all__ = ["BALANCERS", "BalanceObserver", "Balancer", "LayerBalance", "balancer_for"]


def balancer_for(model: CausalLM, config: BalanceConfig, *, reduce: Reduce | None = None) -> Balancer:
    """Return the balancer of *config* over all MoE layers of *model*, the multi-token-prediction layer included."""
    routers = {block.layer: block.gate for block in model.modules() if isinstance(block, LatentMoE)}
    rule, top_k = BALANCERS[config.kind], model.config.moe.num_experts_per_token
    return rule(config, routers, top_k) if reduce is None else rule(config, routers, top_k, reduce=reduce)
