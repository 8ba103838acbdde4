"""Real processes for tests, started once and given one job after another."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WAIT_SECONDS = 120


class Gang:
    """Processes that import torch once; every job meets in a new process group over gloo."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, Connection]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="tercet-gang-"))
        self._jobs = 0

    def run(self, world: int, job: Callable[..., Any], *args: Any, patience: float = 60.0) -> list[Any]:
        """Call ``job(ranks, *args)`` in *world* processes; returns what each returned or raised, by rank.

        No rank waits longer than *patience* seconds for another.
        """
        fresh = [self._start() for _ in range(world - len(self._members))]
        for pipe in fresh:
            assert pipe.poll(WAIT_SECONDS) and pipe.recv() == "ready"
        self._jobs += 1
        store = str(self._folder / f"store-{self._jobs}")
        members = self._members[:world]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((rank, world, store, job, args, patience))
        results = []
        for process, pipe in members:
            assert pipe.poll(WAIT_SECONDS), f"{job.__name__} hangs in {process.name}"
            try:
                results.append(pipe.recv())
            except EOFError as gone:  # killed by its job
                process.join()
                self._members = [member for member in self._members if member[0] is not process]
                results.append(gone)
        return results

    def results(self, world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Do as `run` and raise the first error."""
        found = self.run(world, job, *args)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.join(5)
            process.kill()
        self._members = []

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._members.append((process, ours))
        return ours


def _serve(pipe: Any) -> None:
    import gc

    import torch
    import torch.distributed as dist

    from tercet.parallel.processes import Processes

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            rank, world, path, job, args, patience = pipe.recv()
        except EOFError:
            return
        ranks = None
        try:
            store = dist.FileStore(path, world)
            ranks = Processes(rank, world, torch.device("cpu"), timedelta(seconds=patience), store)
            result = job(ranks, *args)
        except BaseException as error:
            result = error
        pipe.send(result)
        result = None
        gc.collect()  # a failed job's trainer hangs on its traceback and would keep its run locked
        if ranks is not None:
            ranks.close()
