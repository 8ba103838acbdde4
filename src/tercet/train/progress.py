"""What a person watches while a model trains: a live line in a terminal, a plain line now and then elsewhere.

Drawing never disturbs training: a closed pipe or a broken terminal silences the display, Ctrl-C passes through and
leaves the cursor visible.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tercet.util.text import count, duration

SMOOTHING = 0.9
"""Weight of the past in the displayed loss, per update."""
WINDOW = 32
"""Updates over which the remaining time is extrapolated: long enough to be calm, short enough to forget start-up."""


class SteadyConsole(Console):
    """A console whose reader may leave (``tercet train … | head``): it falls silent and the process goes on."""

    def on_broken_pipe(self) -> None:
        """Fall silent; rich would end the process."""
        self.quiet = True


class Progress:
    """Shows rows of ``metrics.jsonl`` as they are made; use as a context manager."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        console: SteadyConsole | None = None,
        plain_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the display.

        Args:
            total_steps: steps of the whole run.
            start_step: steps done before this process, when resuming.
            console: where to draw; default standard output.
            plain_seconds: least time between two plain lines when the console is not a terminal.
            clock: seconds; replaceable for tests.
        """
        self.total_steps, self.step = total_steps, start_step
        self.console = console or SteadyConsole(highlight=False)
        self._clock, self._plain_seconds = clock, plain_seconds
        self._marks: deque[tuple[float, int]] = deque([(clock(), start_step)], maxlen=WINDOW)
        self._spoken = -math.inf
        self._smoothed, self._weight = 0.0, 0.0
        self._latest: dict[str, Any] = {}
        self._bits_per_byte: float | None = None
        self._live: Live | None = None
        self._muted = False

    @property
    def loss(self) -> float | None:
        """The smoothed training loss in nats per token; None before the first finite one."""
        return self._smoothed / self._weight if self._weight else None

    @property
    def remaining_seconds(self) -> float | None:
        """Extrapolated time to the last step; None before two updates."""
        (then, first), (now, last) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        return (now - then) / (last - first) * (self.total_steps - last)

    def update(self, row: Mapping[str, Any]) -> None:
        """Take a row of any kind; ``train`` and ``validation`` rows move the display, others are ignored."""
        if row.get("kind") == "validation":
            self._bits_per_byte = _number(row.get("bits_per_byte"))
        elif row.get("kind") == "train":
            self.step = int(row["step"])
            self._latest = dict(row)
            self._marks.append((self._clock(), self.step))
            loss = _number(row.get("loss"))
            if loss is not None:
                self._smoothed = SMOOTHING * self._smoothed + (1 - SMOOTHING) * loss
                self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        else:
            return
        self._draw()

    def note(self, text: str) -> None:
        """Print a line above the display: a checkpoint, a sample, a warning."""
        self._safely(lambda: self.console.print(Text(text), soft_wrap=True))

    def __enter__(self) -> Progress:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._safely(self._live.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._live is None:
            # The last state is worth a line, unless it was the last thing said.
            if self._latest and self._spoken < self._marks[-1][0]:
                self._safely(lambda: self.console.print(self.line(), soft_wrap=True))
            return
        live, self._live = self._live, None
        try:
            self._safely(lambda: live.update(self._table(), refresh=True))
        finally:
            self._safely(live.stop)

    def line(self) -> Text:
        """Return the state as one line of text."""
        return Text("  ".join(text for text in self._cells() if text))

    def _cells(self) -> list[str]:
        row, loss, remaining = self._latest, self.loss, self.remaining_seconds
        rate, speed = _number(row.get("lr")), _number(row.get("tokens_per_second"))
        return [
            f"step {self.step:,}/{self.total_steps:,}",
            f"loss {loss:.3f}" if loss is not None else "loss not finite" if row else "",
            f"held-out {self._bits_per_byte:.3f} bits/byte" if self._bits_per_byte is not None else "",
            f"lr {rate:.2e}" if rate is not None else "",
            f"{count(speed)} tokens/s" if speed is not None else "",
            "step skipped" if row.get("skipped") else "",
            f"{duration(remaining)} left" if remaining and self.step < self.total_steps else "",
        ]

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        cells = [Text(text, no_wrap=True) for text in self._cells() if text]
        cells[0].stylize("bold")
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=20)
        table.add_row(cells[0], bar, *cells[1:])
        return table

    def _draw(self) -> None:
        live = self._live
        if live is not None:
            self._safely(lambda: live.update(self._table(), refresh=True))
            return
        now = self._marks[-1][0]
        if now - self._spoken >= self._plain_seconds or self.step >= self.total_steps:
            self._spoken = now
            self._safely(lambda: self.console.print(self.line(), soft_wrap=True))

    def _safely(self, act: Callable[[], object]) -> None:
        """Draw unless the console is gone; then never draw again."""
        if self._muted:
            return
        try:
            act()
        except (OSError, ValueError):  # a closed pipe, or a file object closed under us
            self._muted = True


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
