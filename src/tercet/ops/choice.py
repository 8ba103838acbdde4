"""A choice that holds for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Choice(Generic[T]):
    """A value of the whole process. Every thread sees it: a worker's, and those in which autograd runs on a GPU."""

    def __init__(self, value: T):
        self.value = value

    @contextmanager
    def held(self, value: T) -> Iterator[None]:
        """Hold *value* for the block; blocks nest."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
