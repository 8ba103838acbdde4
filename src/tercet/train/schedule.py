"""Learning rate as a pure function of the step (training.md §3).

K3 uses cosine with 1 % linear warm-up and found it always below WSD, each at its own peak rate (report §3.2, §3.3).
"""

from __future__ import annotations

import math

from tercet.config import OptimConfig, ScheduleConfig
from tercet.errors import ConfigError


def learning_rate(step: int, steps: int, optim: OptimConfig, schedule: ScheduleConfig) -> float:
    """Return η for optimiser step *step* of *steps*.

    With t = step + 1, so that the first step already moves and the last one is at the minimum::

        warm-up   η = η_max · t / t_w                                       t ≤ t_w = max(1, ⌈warmup · steps⌉)
        cosine    η = η_min + (η_max − η_min) · ½(1 + cos πx)               x = (t − t_w) / (steps − t_w)
        wsd       η = η_max, then the same with x over the last `decay_fraction` of the run, and
                  ½(1 + cos πx), 1 − x or 1 − √x for the shape
        constant  η = η_max

    Args:
        step: counts from 0.
        steps: length of the run.
        optim: gives the peak rate ``lr``.
        schedule: kind and shape; ``min_lr_fraction`` is η_min / η_max.

    Raises:
        ConfigError: *step* lies outside the run.
    """
    if not 0 <= step < steps:
        raise ConfigError(f"step is {step}; a schedule over {steps} steps knows 0 to {steps - 1}")
    t = step + 1
    warmup = max(1, math.ceil(schedule.warmup_fraction * steps))
    if t <= warmup:
        return optim.lr * t / warmup
    if schedule.kind == "constant":
        return optim.lr
    start, shape = float(warmup), "cosine"
    if schedule.kind == "wsd":
        start, shape = max(start, (1.0 - schedule.decay_fraction) * steps), schedule.decay_shape
    if t <= start:
        return optim.lr
    lowest = optim.lr * schedule.min_lr_fraction
    return lowest + (optim.lr - lowest) * _decay(shape, (t - start) / (steps - start))


def _decay(shape: str, x: float) -> float:
    """Fall from 1 at x = 0 to 0 at x = 1."""
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * x))
    if shape == "linear":
        return 1.0 - x
    return 1.0 - math.sqrt(x)
