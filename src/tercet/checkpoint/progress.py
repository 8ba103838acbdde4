"""A progress bar for bytes: how much, how fast, how long still."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]
"""Called with the bytes just finished."""


@contextlib.contextmanager
def byte_progress(label: str, total: int, show: bool | None = None) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs.

    Args:
        label: what is happening.
        total: bytes in all.
        show: None shows the bar only when stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
