"""Two checkpoints side by side: settings, then weights, then — where both can run — layers with the routing pinned.

A near tie in a router sends a token to other experts after the smallest rounding difference, and everything behind it
differs. So values and routing are compared apart: the second model runs with the first one's expert choice, and how
often it would have chosen otherwise is counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.progress import byte_progress
from tercet.checkpoint.weights import Weight, weights
from tercet.model import CausalLM, Context, Observer
from tercet.model.decoder import DecoderLayer, Depth
from tercet.ops import Routing


@dataclass(frozen=True)
class WeightDifference:
    """One weight that is not the same in both."""

    name: str
    kind: str
    """``value``, ``shape``, ``only in A`` or ``only in B``."""
    largest: float = 0.0
    """Largest absolute difference."""
    relative: float = 0.0
    """Norm of the difference over the norm of A's weight."""


@dataclass
class WeightReport:
    """All weights compared by value; how they are stored does not matter."""

    same: int = 0
    differences: list[WeightDifference] = field(default_factory=list)


def _values(directory: CheckpointDirectory, weight: Weight) -> Tensor:
    value = directory.weight(weight)
    return value.decode(torch.float32) if isinstance(value, PackedWeight) else value.to(torch.float32)


def compare_weights(a: CheckpointDirectory, b: CheckpointDirectory, *, show: bool | None = None) -> WeightReport:
    """Compare weight by weight, decoding MXFP4; vision tensors are compared where both carry them.

    Args:
        a: first checkpoint.
        b: second checkpoint.
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: either repeats its head or embedding with other bytes.
    """
    for side in (a, b):
        side.check_copies()
    report = WeightReport()
    mine, theirs = ({w.name: w for w in weights(side.model)} for side in (a, b))
    with byte_progress("comparing", sum(4 * weight.numel for weight in mine.values()), show) as advance:
        for name, weight in mine.items():
            if name not in theirs:
                report.differences.append(WeightDifference(name, "only in A"))
            elif theirs[name].shape != weight.shape:
                report.differences.append(WeightDifference(name, f"shape {weight.shape} and {theirs[name].shape}"))
            else:
                _compare(report, name, _values(a, weight), _values(b, weight))
            advance(4 * weight.numel)
    report.differences += [WeightDifference(name, "only in B") for name in theirs if name not in mine]
    carried = [{t.name for t in side.expected.values() if t.weight is None} for side in (a, b)]
    for name in sorted(carried[0] & carried[1]):
        _compare(report, name, a.tensor(name).float(), b.tensor(name).float())
    return report


def _compare(report: WeightReport, name: str, x: Tensor, y: Tensor) -> None:
    if torch.equal(x, y):
        report.same += 1
        return
    difference = (x.double() - y.double()).abs()
    norm = x.double().norm()
    relative = float(difference.norm() / norm) if norm > 0 else float("inf")
    report.differences.append(WeightDifference(name, "value", float(difference.max()), relative))


@dataclass(frozen=True)
class LayerDifference:
    """How far two models are apart after one decoder layer."""

    layer: int
    """0-based; `num_layers` stands for the logits."""
    kind: str
    relative: float
    """Norm of the difference over the norm of A's activations."""
    rerouted: float
    """Share of tokens for which B, left alone, would have chosen other experts; 0 for dense layers."""


class _Recorder(Observer):
    """Remembers expert choices."""

    def __init__(self) -> None:
        self.experts: dict[int, Tensor] = {}

    def routing(self, layer: int, routing: Routing) -> None:
        """See `Observer.routing`."""
        self.experts[layer] = routing.experts


@dataclass
class _Trace:
    depths: list[Tensor]
    logits: Tensor
    experts: dict[int, Tensor]


def _trace(model: CausalLM, tokens: Tensor, forced: dict[int, Tensor] | None) -> _Trace:
    """Run *model* and keep what leaves every layer: the prefix and, with Attention Residuals, the bank."""
    depths: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Depth) -> None:
        depths.append(torch.stack([*output.bank, output.prefix]).float())

    layers = [m for m in model.model.layers[: model.config.num_layers] if isinstance(m, DecoderLayer)]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    recorder = _Recorder()
    try:
        with torch.no_grad():
            logits = model(tokens, Context(observer=recorder, forced_routing=forced))
    finally:
        for hook in hooks:
            hook.remove()
    return _Trace(depths, logits, recorder.experts)


def compare_layers(a: CausalLM, b: CausalLM, tokens: Tensor) -> list[LayerDifference]:
    """Run both models on *tokens*, B with A's routing, and return the distance after every layer and at the logits.

    Args:
        a: first model; its expert choice is used for both.
        b: second model, of the same architecture.
        tokens: ``[batch, tokens]``.
    """
    config = a.config
    mine = _trace(a, tokens, None)
    pinned = _trace(b, tokens, mine.experts)
    free = _trace(b, tokens, None)

    def relative(x: Tensor, y: Tensor) -> float:
        return float((x - y).double().norm() / x.double().norm().clamp_min(1e-300))

    rows = []
    for layer in range(config.num_layers):
        rerouted = 0.0
        if layer in mine.experts:
            same = (mine.experts[layer].sort(-1).values == free.experts[layer].sort(-1).values).all(-1)
            rerouted = 1 - float(same.float().mean())
        kind = ("MLA" if config.is_mla(layer) else "KDA") + (", MoE" if config.is_moe(layer) else ", dense")
        rows.append(LayerDifference(layer, kind, relative(mine.depths[layer], pinned.depths[layer]), rerouted))
    rows.append(LayerDifference(config.num_layers, "logits", relative(mine.logits, pinned.logits), 0.0))
    return rows


def first_divergence(rows: list[LayerDifference], tolerance: float) -> LayerDifference | None:
    """Return the first row beyond *tolerance*, or None."""
    return next((row for row in rows if not row.relative <= tolerance), None)
