"""``metrics.jsonl``: one JSON line an event, written as it happens, read back by reports and by a resumed run.

Kinds of rows (every row has ``kind`` and ``step``, the number of optimiser steps done):

    train       loss, mtp_loss, lr, tokens, seconds, tokens_per_second, grad_norm, grad_norm_router,
                grad_norm_embedding, update_rms {group: rms}, skipped, qk_logit_max, qk_clipped_heads,
                balance {layer: {max_violation, cv, dead, bias_range, max_occupancy, load [share of every expert]}}
    validation  loss (nats per token), bits_per_byte, bytes
    probe       what `tercet.train.probe.Probe` saw
    sample      prompt, text

A number that is not finite is written as ``null``, because JSON has no word for it; reports leave a gap there.
A crash can tear at most the last line; it is dropped when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tercet.errors import DataError, TercetWarning
from tercet.util.files import append_line, atomic_open

METRICS = "metrics.jsonl"
KINDS = ("train", "validation", "probe", "sample")

Row = dict[str, Any]


class Sink(Protocol):
    """Somewhere else that rows go: an experiment tracker (`tercet.bridge.trackers`)."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row."""

    def close(self) -> None:
        """Flush and finish."""


class MetricsLog:
    """Appends rows to ``metrics.jsonl`` and hands them on to sinks.

    The file is the record; a sink is a copy. A sink that fails is dropped with a warning and training goes on.
    """

    def __init__(self, directory: str | Path, sinks: Sequence[Sink] = ()):
        """Open the log of a run, which need not exist yet; a half line left by a crash is removed.

        Raises:
            StorageError: the directory cannot be created or the file not be repaired.
            DataError: an existing log has a line that is not a row.
        """
        self.path = Path(directory) / METRICS
        self.sinks = list(sinks)
        lines, damaged = _split(self.path)
        _parse(self.path, lines)
        if damaged or not self.path.exists():
            self._rewrite(lines)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row.

        Raises:
            DataError: the row has no known kind or no step.
            StorageError: the disk refused the write.
        """
        clean = finite(dict(row))
        _check(clean, "this row")
        append_line(self.path, clean)
        for sink in list(self.sinks):
            try:
                sink.write(clean)
            except Exception as error:  # a tracker's own failure, of whatever type, must not end a training run
                self.sinks.remove(sink)
                warnings.warn(
                    f"the tracker {type(sink).__name__} failed ({type(error).__name__}: {error}) and gets no further "
                    f"rows; {self.path} has all of them",
                    TercetWarning,
                    stacklevel=2,
                )

    def truncate_after(self, step: int) -> int:
        """Drop all rows later than *step*, so that a resumed run does not tell them twice; returns how many.

        Raises:
            StorageError: the disk refused the write; the file is then unchanged.
        """
        lines, _ = _split(self.path)
        rows = _parse(self.path, lines)
        kept = [line for line, row in zip(lines, rows, strict=True) if row["step"] <= step]
        if len(kept) < len(lines):
            self._rewrite(kept)
        return len(lines) - len(kept)

    def close(self) -> None:
        """Close the sinks; the file is complete after every row."""
        for sink in self.sinks:
            with contextlib.suppress(Exception):  # as in `append`: the record is already on disk
                sink.close()
        self.sinks = []

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        with atomic_open(self.path) as handle:
            handle.writelines(line + b"\n" for line in lines)


class NoLog(MetricsLog):
    """Takes rows and keeps none: the log of every rank but the first."""

    def __init__(self) -> None:
        self.sinks = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Forget the row."""


def read_metrics(directory: str | Path) -> list[Row]:
    """Return all rows of a run in the order written; no file gives no rows, and a torn last line is left out.

    Raises:
        DataError: a line other than the last is not a row; names the line.
    """
    path = Path(directory) / METRICS
    lines, _ = _split(path)
    return _parse(path, lines)


def finite(value: Any) -> Any:
    """Return JSON-able *value* with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _split(path: Path) -> tuple[list[bytes], bool]:
    """Return the lines of the file and whether its end is damaged: a torn last line (left out) or no line end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    *lines, rest = data.split(b"\n")
    damaged = bool(rest)
    if rest:
        lines.append(rest)
    if lines and _row(lines[-1]) is None:
        damaged = True
        lines.pop()
    return lines, damaged


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _parse(path: Path, lines: Sequence[bytes]) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            shown = line[:60].decode("utf-8", "replace")
            raise DataError(
                f"{path}, line {number} is not a metrics row: {shown!r}; the file was changed by something else — "
                "delete that line, or move the file away to start a new log"
            )
        _check(row, f"{path}, line {number}")
        rows.append(row)
    return rows


def _check(row: Mapping[str, Any], where: str) -> None:
    step = row.get("step")
    if row.get("kind") not in KINDS or not isinstance(step, int) or isinstance(step, bool):
        raise DataError(
            f"{where} has kind {row.get('kind')!r} and step {step!r}; a metrics row needs a whole step and one of the "
            f"kinds {', '.join(KINDS)}"
        )
