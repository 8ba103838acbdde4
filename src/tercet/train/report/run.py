"""Reads a run directory in whatever state it is: finished, stopped, crashed, empty."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet.config import RunConfig
from tercet.errors import ConfigError, DataError
from tercet.train.metrics import Row, read_metrics
from tercet.util.settings import from_dict


@dataclass(frozen=True)
class Run:
    """Everything a report is made of."""

    directory: Path
    config: RunConfig | None
    summary: dict[str, Any] = field(default_factory=dict)
    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    probes: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    remarks: tuple[str, ...] = ()
    """What could not be read, in a person's words."""

    @property
    def name(self) -> str:
        """What to call the run."""
        return self.directory.resolve().name

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return max((row["step"] for row in (*self.train, *self.validation)), default=0)

    @property
    def status(self) -> str:
        """How far the run is."""
        if self.config is None or self.step == 0:
            return f"{self.step:,} steps" if self.step else "no steps yet"
        total = self.config.train.steps
        return f"finished, {total:,} steps" if self.step >= total else f"step {self.step:,} of {total:,}"

    def number(self, key: str) -> float | None:
        """Return a figure of the summary, or what the newest rows say about it."""
        value = self.summary.get(key)
        if value is None and key == "bits_per_byte":
            value = last(self.validation, "bits_per_byte")
        if value is None and key in ("tokens", "training_seconds", "tokens_per_second"):
            value = last(self.train, {"training_seconds": "seconds"}.get(key, key))
        return float(value) if isinstance(value, int | float) else None


def last(rows: list[Row], key: str) -> Any:
    """Return the newest value of *key* that is not missing."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def load(directory: str | Path) -> Run:
    """Read *directory*; missing or unreadable parts become remarks.

    Raises:
        DataError: there is no such directory, or ``metrics.jsonl`` is broken in the middle.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise DataError(f"there is no run directory {folder}; a run is what `tercet train` or `tercet demo` wrote")
    remarks: list[str] = []
    config = None
    stored = _json(folder / "config.json", remarks)
    if stored is not None:
        try:
            config = from_dict(RunConfig, stored)
        except ConfigError as error:
            remarks.append(f"config.json is of another version of tercet: {error}")
    rows: dict[str, list[Row]] = {"train": [], "validation": [], "probe": [], "sample": []}
    for row in read_metrics(folder):
        rows[row["kind"]].append(row)
    return Run(
        folder,
        config,
        _json(folder / "summary.json", remarks) or {},
        rows["train"],
        rows["validation"],
        rows["probe"],
        rows["sample"],
        tuple(remarks),
    )


def _json(path: Path, remarks: list[str]) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read: {error}")
        return None
    if not isinstance(data, dict):
        remarks.append(f"{path.name} is not a table of settings")
        return None
    return data
