"""Processes started by torchrun, or by anything else that sets the same environment.

Flags and objects travel over gloo; tensors over NCCL where the ranks compute on GPUs. Every wait ends: a peer that dies
closes its connections at once, one that hangs runs into the time limit, and either becomes a `PeerError` that names who
no longer answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.errors import ConfigError, PeerError
from tercet.model import choose_device
from tercet.parallel.ranks import Ranks

Result = TypeVar("Result")

BUCKET_BYTES = 64 << 20
"""Tensors of one owner travel together up to this size: few messages, little extra memory."""

ROLL_CALL_SECONDS = 3.0
"""How long a rank that lost a peer waits for the others to say that they are still there."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def join(device: str = "auto", *, timeout_seconds: float = 1800.0) -> Ranks:
    """Join the processes that the environment describes; alone if it describes none.

    Args:
        device: where this run computes, as `tercet.model.choose_device` takes it; decides gloo or NCCL.
        timeout_seconds: longest wait for another process.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself, or there is no GPU for this process.
        PeerError: the others did not come.
    """
    given = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Ranks()
    if absent := [name for name in _ENVIRONMENT if name not in given]:
        raise ConfigError(
            f"{', '.join(sorted(given))} are set but {', '.join(absent)} are not; start several processes with: "
            "torchrun --nproc-per-node N -m tercet train …, or unset them to run alone"
        )
    rank, world, local = (_whole(given, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    _whole(given, "MASTER_PORT")
    if world < 1 or not rank < world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}; a rank lies in [0, WORLD_SIZE)")
    if world == 1:
        return Ranks()
    return Processes(rank, world, _local_device(device, local), timedelta(seconds=timeout_seconds))


def _whole(given: dict[str, str], name: str) -> int:
    try:
        value = int(given[name])
    except ValueError as error:
        raise ConfigError(f"the environment variable {name} is {given[name]!r}; it must be a whole number") from error
    if value < 0:
        raise ConfigError(f"the environment variable {name} is {value}; it must not be negative")
    return value


def _local_device(name: str, local: int) -> torch.device:
    """Return the device of the *local*-th process of this machine: a GPU each, or the CPU for all."""
    chosen = choose_device(name)
    if chosen.type != "cuda":
        return chosen
    if (count := torch.cuda.device_count()) <= local:
        raise ConfigError(
            f"process {local} of this machine has no GPU: there are {count}; start --nproc-per-node {count}, "
            "or compute on --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class Processes(Ranks):
    """Several processes over torch.distributed."""

    def __init__(self, rank: int, world: int, place: torch.device, timeout: timedelta, store: dist.Store | None = None):
        """Meet the others.

        Args:
            rank: this process.
            world: all of them.
            place: this process's device.
            timeout: longest wait for another process.
            store: where they meet; by default the one that the environment describes.

        Raises:
            PeerError: not all came in time.
        """
        self.rank, self.world, self.place = rank, world, place
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        try:
            if store is None:
                store = next(dist.rendezvous("env://", rank, world, timeout=timeout))[0]
            self._store = dist.PrefixStore("tercet", store)
            dist.init_process_group(backend, rank=rank, world_size=world, store=self._store, timeout=timeout)
            # Saving goes on while the next steps exchange gradients: two conversations need two groups.
            self._background = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise PeerError(f"rank {rank} of {world} could not meet the others: {error}") from error

    def device(self, name: str) -> torch.device:
        """Return this process's device, chosen when it joined."""
        return self.place

    @property
    def background(self) -> Any:
        """A gloo group of its own, so that saving and training never mix their messages."""
        return self._background

    @contextmanager
    def _conversation(self, what: str) -> Iterator[None]:
        """Turn the failure of an exchange into an error that says who is gone."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: BaseException) -> PeerError:
        """Call the roll and return the error of rank *rank* losing a peer while doing *what*."""
        reason = str(error).rpartition("] ")[2].partition("\n")[0].partition(". This is")[0]
        return PeerError(
            f"{self._who_is_gone()} while rank {self.rank} was {what}; what was published before is intact, start the "
            f"same command again to go on from there ({reason})"
        )

    def _who_is_gone(self) -> str:
        """Ask through the store who is still there; everybody who loses a peer comes here."""
        try:
            self._store.set(f"alive/{self.rank}", "yes")
            silent = set(range(self.world)) - {self.rank}
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            while silent and time.monotonic() < deadline:
                silent -= {rank for rank in silent if self._store.check([f"alive/{rank}"])}
                time.sleep(0.05)
        except RuntimeError:
            return "rank 0 or its machine is gone"
        if not silent:
            return "a connection between ranks broke"
        names = ", ".join(map(str, sorted(silent)))
        return f"rank {names} has died or hangs" if len(silent) == 1 else f"ranks {names} have died or hang"

    def sum(self, tensor: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        total = tensor.detach().clone()
        with self._conversation("adding up over ranks"):
            dist.all_reduce(total)
        return total

    def max(self, tensor: Tensor) -> Tensor:
        """See `Ranks.max`."""
        largest = tensor.detach().clone()
        with self._conversation("comparing over ranks"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """See `Ranks.any`; travels over the CPU."""
        return [bool(flag) for flag in self.max(torch.tensor([int(flag) for flag in flags], dtype=torch.int32))]

    def sum_to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """See `Ranks.sum_to_owners`."""
        for owner, bucket in _buckets(tensors, owners):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._conversation("adding up gradients"):
                dist.reduce(flat, dst=owner)
            if owner == self.rank:
                _scatter(flat, bucket)

    def spread_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """See `Ranks.spread_from_owners`."""
        for owner, bucket in _buckets(tensors, owners):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            with self._conversation("exchanging weights"):
                dist.broadcast(flat, src=owner)
            if owner != self.rank:
                _scatter(flat, bucket)

    def on_first(self, action: Callable[[], Result]) -> Result:
        """See `Ranks.on_first`."""
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = action()
            except Exception as error:  # whatever it is, the others must not wait for ever
                outcome[1] = error
        with self._conversation("waiting for the first rank"):
            dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def on_all(self, action: Callable[[], Result]) -> Result:
        """See `Ranks.on_all`."""
        result, failed = None, None
        try:
            result = action()
        except Exception as error:  # as in `on_first`
            failed = error
        found = self._gather(failed)
        if failed is not None:
            raise failed
        if first := next((error for error in found if error is not None), None):
            raise first
        return result  # type: ignore[return-value]

    def check_same(self, what: str, value: Any) -> None:
        """See `Ranks.check_same`."""
        found = self._gather(value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConfigError(f"rank {rank} has another {what} than rank 0; start all ranks with the same command")

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        with self._conversation("comparing notes"):
            dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor], owners: Sequence[int]) -> Iterator[tuple[int, list[Tensor]]]:
    """Group tensors of one owner and dtype, in order, into buckets of at most `BUCKET_BYTES` or one tensor."""
    kinds: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor, owner in zip(tensors, owners):
        if tensor.numel():
            kinds.setdefault((owner, tensor.dtype), []).append(tensor)
    for (owner, _), members in kinds.items():
        bucket: list[Tensor] = []
        filled = 0
        for tensor in members:
            if bucket and filled + tensor.nbytes > BUCKET_BYTES:
                yield owner, bucket
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        yield owner, bucket


@torch.no_grad()
def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of *flat* back."""
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors):
        tensor.copy_(piece.view_as(tensor))
