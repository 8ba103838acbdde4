"""Experiment trackers as sinks of ``metrics.jsonl``: TensorBoard, trackio, Weights & Biases.

Each is imported when it is asked for (``train.tracker``) and needs ``pip install 'tercet[trackers]'``. A tracker gets
the numbers of ``train`` and ``validation`` rows, grouped by kind, and samples as text; the file remains the record.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tercet.config import RunConfig
from tercet.errors import ConfigError, missing, nearest
from tercet.train.metrics import Sink
from tercet.util.settings import to_dict

PROJECT = "tercet"


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the plain numbers of a row under names such as ``train/loss`` and ``balance/layer3/max_violation``.

    Per-expert loads stay in the file: hundreds of curves a layer help nobody in a tracker.
    """
    kind = row["kind"]
    if kind not in ("train", "validation"):
        return {}
    found = dict(_numbers(f"{kind}/", {k: v for k, v in row.items() if k not in ("kind", "step", "balance")}))
    for layer, entry in (row.get("balance") or {}).items():
        found |= _numbers(f"balance/layer{layer}/", entry)
    return found


def _numbers(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{key}/", value)
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


class TensorBoard:
    """Writes event files into ``RUN/tensorboard``."""

    def __init__(self, directory: Path, config: RunConfig):
        _need("tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("config", f"```\n{to_dict(config)}\n```", 0)

    def write(self, row: Mapping[str, Any]) -> None:
        """See `Sink.write`."""
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if row["kind"] == "sample":
            self._writer.add_text("sample", f"```\n{row['prompt']}{row['text']}\n```", row["step"])

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()


class Remote:
    """trackio and Weights & Biases, which share one interface: ``init``, ``log``, ``finish``."""

    def __init__(self, package: str, directory: Path, config: RunConfig):
        self._module = _need(package)
        self._module.init(project=PROJECT, name=directory.resolve().name, config=to_dict(config))

    def write(self, row: Mapping[str, Any]) -> None:
        """See `Sink.write`."""
        numbers = scalars(row)
        if numbers:
            self._module.log(numbers, step=row["step"])

    def close(self) -> None:
        """See `Sink.close`."""
        self._module.finish()


TRACKERS: dict[str, Callable[[Path, RunConfig], Sink]] = {
    "tensorboard": TensorBoard,
    "trackio": lambda directory, config: Remote("trackio", directory, config),
    "wandb": lambda directory, config: Remote("wandb", directory, config),
}


def open_tracker(name: str, directory: str | Path, config: RunConfig) -> Sink:
    """Return a sink for `tercet.train.metrics.MetricsLog`.

    Args:
        name: ``tensorboard``, ``trackio`` or ``wandb``.
        directory: of the run; also its name in the tracker.
        config: stored with the run.

    Raises:
        ConfigError: no such tracker.
        MissingDependencyError: its package is not installed.
    """
    if name not in TRACKERS:
        raise ConfigError(f"unknown tracker {name!r}{nearest(name, TRACKERS)}")
    return TRACKERS[name](Path(directory), config)


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(package, "trackers", f"train.tracker={package}") from error
