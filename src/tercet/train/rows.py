"""What a step reports, in the words of ``metrics.jsonl`` (`tercet.train.metrics`)."""

from __future__ import annotations

from typing import Any

from tercet.train.balance import LayerBalance
from tercet.train.optimizer import StepReport


def norms_row(report: StepReport) -> dict[str, Any]:
    """Return what a metrics row says of the optimiser."""
    return {
        "grad_norm": report.grad_norm["all"],
        "grad_norm_router": report.grad_norm["routers"],
        "grad_norm_embedding": report.grad_norm["embeddings"],
        "update_rms": report.update_rms,
        "skipped": report.skipped,
    }


def balance_row(balance: LayerBalance) -> dict[str, Any]:
    """Return what a metrics row says of one layer's experts."""
    total = sum(balance.loads)
    return {
        "max_violation": balance.max_violation,
        "cv": balance.load_cv,
        "dead": balance.dead,
        "bias_range": balance.bias_range,
        "max_occupancy": balance.occupancy,
        "load": [round(load / total, 6) for load in balance.loads],
    }
