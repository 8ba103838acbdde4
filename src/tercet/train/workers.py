"""Micro-batches side by side: one core each instead of all cores on every small operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A pool of threads in which every torch operation runs on one core; with one worker, the calling thread."""

    def __init__(self, count: int):
        """Start *count* threads, kept until the process ends."""
        self.lock = threading.Lock()
        """Held by whoever touches what the micro-batches share."""
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            self._pool = ThreadPoolExecutor(count, "micro-batch", initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``function(item)`` in the order of *items*; a failure is raised at its turn."""
        return map(function, items) if self._pool is None else self._pool.map(function, items)
