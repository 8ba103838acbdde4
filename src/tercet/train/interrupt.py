"""Ctrl-C and SIGTERM as a wish that the loop fulfils after the step under way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def polite_interrupt() -> Iterator[list[int]]:
    """Turn the first Ctrl-C or SIGTERM into an entry of the yielded list; a second Ctrl-C interrupts at once."""
    seen: list[int] = []

    def remember(number: int, frame: object) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: leave signals to whoever owns it
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
