"""The processes of a run as the trainer sees them; this one is alone.

A trainer talks to `Ranks` in every step and never asks how many there are. With one process each method is the identity
and costs nothing, so a run on one process computes what it always did; `processes.Processes` is the same with others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tercet.errors import PeerError
from tercet.model import choose_device

Result = TypeVar("Result")


class Ranks:
    """One process: nothing to share, nobody to wait for."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes logs, reports and what there is once a run."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return this process's device: *name*, as `tercet.model.choose_device` takes it.

        Raises:
            ConfigError: this machine does not offer it.
        """
        return choose_device(name)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; the same bits on each."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks."""
        return tensor

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for every flag whether it is set on any rank."""
        return list(flags)

    def sum_to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Add every tensor up over the ranks, in place, on its owner; elsewhere its content is lost."""

    def spread_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite every tensor by its owner's, in place."""

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Run *action* on the first rank; returns its (picklable) result, or raises its error, on all."""
        return action()

    def on_all(self, action: Callable[[], Result]) -> Result:
        """Run *action* on every rank; returns this rank's result, or raises on all what failed on any."""
        return action()

    def check_same(self, what: str, value: Any) -> None:
        """Refuse to go on when *value* differs between ranks.

        Raises:
            ConfigError: it does; names *what* and the first rank that differs.
        """

    def lost(self, what: str, error: BaseException) -> PeerError:
        """Return the error that says which rank is gone, after *error* while doing *what*."""
        return PeerError(f"{what} failed: {error}")

    @property
    def background(self) -> Any:
        """Process group for work beside training (asynchronous saving), or None for one process."""
        return None

    def close(self) -> None:
        """Leave the others; call it last."""
