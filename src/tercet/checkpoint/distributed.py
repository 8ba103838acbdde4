"""torch.distributed.checkpoint on the directories of `state`: the same plans and files from one process to many.

torch plans who writes what and moves the plans between ranks; `StateWriter` is its storage. Torch brings a safetensors
storage of its own, and its reader is the one used here. Its writer is not: it builds every file in memory before
writing it, leaves no index when several ranks write, and hashes nothing.

Importing this module takes a second, so verbs that only look at a run do without it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from tercet.checkpoint.layouts import StoredTensor
from tercet.checkpoint.state import (
    MAX_FILE_BYTES,
    Piece,
    checkpoint_path,
    describe,
    number_files,
    part_of,
    publish,
    write_companions,
)
from tercet.checkpoint.writer import DTYPE_NAMES, write_shard
from tercet.errors import CheckpointError


class StateWriter(StorageWriter):
    """Writes one checkpoint: every rank its own files into a hidden neighbour, the first rank the rest and the rename.

    Use it once, through torch.distributed.checkpoint, over a flat mapping of whole tensors.
    """

    def __init__(
        self, run: Path, step: int, trainer: Mapping[str, Any], *, keep: int, max_file_bytes: int = MAX_FILE_BYTES
    ):
        """Prepare the checkpoint of *step*.

        Args:
            run: run directory, the same for all ranks.
            step: optimiser steps done.
            trainer: JSON-able state; the first rank's is written.
            keep: how many checkpoints stay after this one is published.
            max_file_bytes: where a file is cut.
        """
        self.target = checkpoint_path(run, step)
        self.part = part_of(self.target)
        self._step, self._trainer = step, trainer
        self._keep, self._max_file_bytes = keep, max_file_bytes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a writer is made for its directory and never chosen by a path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the hidden directory; the plans pass the first rank before anybody writes into it."""
        if is_coordinator:
            self.discard()
            self.part.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return *plan* as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the names of its files."""
        pieces = [[Piece(item.index.fqn, item.tensor_storage_size() or 0) for item in plan.items] for plan in plans]
        named = number_files(pieces, self._max_file_bytes)
        return [replace(plan, storage_data=files) for plan, files in zip(plans, named)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's files, one tensor after another, flushed to the disk."""
        items = {item.index.fqn: item for item in plan.items}

        def data(tensor: StoredTensor) -> Tensor:
            found = planner.resolve_data(items[tensor.name])
            assert isinstance(found, Tensor)
            return found

        results = []
        for file, names in plan.storage_data.items():
            stored = [_stored(items[name]) for name in names]
            write_shard(self.part / file, stored, data, _ignore)
            entry = describe(self.part / file)
            results += [WriteResult(items[t.name].index, t.nbytes, (file, entry)) for t in stored]
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish by one rename, then delete all but the newest checkpoints."""
        written = [result for rank in results for result in rank]
        placed = {result.index.fqn: (result.storage_data[0], result.size_in_bytes) for result in written}
        write_companions(self.part, self._step, self._trainer, placed, dict(r.storage_data for r in written))
        publish(self.part, self.target, keep=self._keep)

    def discard(self) -> None:
        """Remove what has been written so far."""
        shutil.rmtree(self.part, ignore_errors=True)


TENSORS = "tensors"
"""Key under which torch gets the state: it inspects and logs every entry of the outermost mapping, one by one."""


class _Planner(DefaultSavePlanner):
    """Plans the flat mapping under `TENSORS`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[TENSORS], storage_meta, is_coordinator)


def save(tensors: Mapping[str, Tensor], writer: StateWriter, group: ProcessGroup | None, *, later: bool) -> Future[Any]:
    """Write *tensors* with all ranks of *group*; the returned future ends when the checkpoint is published.

    Args:
        tensors: what this rank writes.
        writer: one per rank, for the same checkpoint.
        group: a gloo group that nothing else uses meanwhile; None for one process.
        later: copy the tensors to the CPU, return, and write the copies in a thread.
    """
    _no_remark_on_one_process()
    state = {TENSORS: {name: tensor.detach() for name, tensor in tensors.items()}}
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if later:
        response = dcp.async_save(state, storage_writer=writer, planner=planner, process_group=group)
        return response if isinstance(response, Future) else response.upload_completion
    done: Future[Any] = Future()
    try:
        done.set_result(dcp.save(state, storage_writer=writer, planner=planner, process_group=group))
    except BaseException as error:  # torch's own is no Exception; whoever waits for the future gets it
        done.set_exception(error)
    return done


def reason_of(error: BaseException) -> BaseException:
    """Return what went wrong on the first rank that failed, out of torch's wrapping."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _stored(item: WriteItem) -> StoredTensor:
    assert item.tensor_data is not None, "state is tensors and JSON, nothing else"
    dtype = DTYPE_NAMES[item.tensor_data.properties.dtype]
    return StoredTensor(item.index.fqn, dtype, tuple(item.tensor_data.size), 0, "", None)


def _ignore(nbytes: int) -> None:
    pass


def _no_remark_on_one_process() -> None:
    """Silence what torch says whenever a checkpoint has one writer or reader, which is no accident here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class SavedState:
    """The tensors of a verified checkpoint, read by torch.distributed.checkpoint into memory that the caller gives."""

    def __init__(self, checkpoint: Path):
        """Read the headers.

        Raises:
            CheckpointError: a file is not a safetensors file.
        """
        self.path = checkpoint
        try:
            found = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
        except Exception as error:  # safetensors and torch raise a dozen types for a file that is none
            raise CheckpointError(f"cannot read the tensors of {checkpoint}: {error}") from error
        self._tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}
        self.shapes = {name: tuple(tensor.size) for name, tensor in self._tensors.items()}
        """Shape of every saved tensor."""

    def empty(self, name: str) -> Tensor:
        """Return uninitialised memory for tensor *name*."""
        return torch.empty(self.shapes[name], dtype=self._tensors[name].properties.dtype)

    def load(self, targets: dict[str, Tensor]) -> None:
        """Copy saved tensors into *targets*, converted to their dtypes.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        _no_remark_on_one_process()
        try:
            dcp.load(
                targets,
                storage_reader=HuggingFaceStorageReader(str(self.path)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {self.path}: {reason_of(error)}") from error
