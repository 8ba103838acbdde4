"""Saving beside training: the state is copied, training goes on, the copy is written and published in the background.

A save in progress is waited for by the next one, at the end of the run, after Ctrl-C and after errors. What goes wrong
in the background is raised at the next step or save, on all ranks in the same step; published checkpoints stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tercet.errors import TercetError
from tercet.parallel import Ranks
from tercet.util.files import storage_error

if TYPE_CHECKING:
    from tercet.checkpoint.distributed import StateWriter


class Saver:
    """Saves the checkpoints of one run, one at a time; every rank has one and calls it in the same order."""

    def __init__(self, run: Path, ranks: Ranks, *, keep: int, asynchronous: bool):
        """Save into *run*.

        Args:
            run: run directory, the same on a shared file system for all ranks.
            ranks: the processes that save together.
            keep: how many checkpoints stay.
            asynchronous: write in the background; otherwise `save` returns when everything is published.
        """
        self._run, self._ranks, self._keep, self._asynchronous = run, ranks, keep, asynchronous
        self._pending: tuple[int, StateWriter, Future[Any]] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], trainer: Mapping[str, Any]) -> None:
        """Copy the state of *step* and start writing it; a save still under way is waited for first.

        Args:
            step: optimiser steps done.
            tensors: what this rank writes; no tensor may be given by two ranks.
            trainer: JSON-able state; the first rank's is written.

        Raises:
            StorageError: the disk refused this or the previous checkpoint; older ones are untouched.
            PeerError: another rank died.
        """
        from tercet.checkpoint.distributed import StateWriter, save

        self.wait()
        writer = StateWriter(self._run, step, trainer, keep=self._keep)
        future = save(tensors, writer, self._ranks.background, later=self._asynchronous)
        self._pending = (step, writer, future)
        if not self._asynchronous:
            self.wait()

    def poll(self, stop: bool) -> tuple[bool, int | None]:
        """Compare notes between two steps.

        Args:
            stop: whether this rank was asked to stop.

        Returns:
            Whether any rank was, and the step of a checkpoint that has been published since the last call.

        Raises:
            StorageError: the checkpoint being written failed; on all ranks alike.
            PeerError: another rank died.
        """
        over = self._pending is None or self._pending[2].done()
        stop, unfinished = self._ranks.any([stop, not over])
        return stop, None if unfinished else self.wait()

    def wait(self) -> int | None:
        """Wait until the save under way is published; returns its step, None if there was none.

        Raises:
            StorageError, PeerError: see `save`.
        """
        if self._pending is None:
            return None
        step, writer, future = self._pending
        error = future.exception()  # waits; Ctrl-C during the wait leaves the save under way
        self._pending = None
        if error is None:
            return step
        if self._ranks.first:
            writer.discard()
        raise _explain(writer.target, error, self._ranks) from error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the save under way end, whatever comes of it: another error is on its way to the user."""
        if self._pending is not None:
            self._pending[2].exception()
            self._pending = None


def _explain(target: Path, error: BaseException, ranks: Ranks) -> TercetError:
    """Turn what torch wrapped into an error a person can act on."""
    from tercet.checkpoint.distributed import reason_of

    reason = reason_of(error)
    if isinstance(reason, TercetError):
        return reason
    if isinstance(reason, OSError):
        return storage_error(target, reason)
    if isinstance(reason, RuntimeError) and ranks.world > 1:
        return ranks.lost(f"saving {target.name}", reason)
    raise reason
