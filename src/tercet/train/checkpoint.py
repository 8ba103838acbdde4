"""Training checkpoints: complete or absent, verified on reading, no pickles.

    RUN/config.json                      RunConfig
    RUN/.lock                            held by the process that trains
    RUN/tokenizer/                       the corpus's tokenizer, so that the run can be used without its corpus
    RUN/checkpoints/step-00000200/
        model.safetensors                fp32 weights under published names
        optimizer.safetensors            momentum and moments, "parameter/key"
        trainer.json                     step, data position, balance, optimiser scalars
        manifest.json                    size and SHA-256 of the files above; written last

A checkpoint is written into a hidden neighbour and renamed, so a kill at any moment leaves the previous one in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tercet.config import RunConfig
from tercet.data import Tokenizer
from tercet.errors import CheckpointError, ConfigError, DataError
from tercet.model import CausalLM, choose_device
from tercet.model.names import locate, published_tensors
from tercet.util.files import storage_error, write_json
from tercet.util.settings import difference, from_dict, to_dict

FORMAT = 1
MODEL, OPTIMIZER, TRAINER, MANIFEST = "model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run opened for use rather than for further training."""

    directory: Path
    config: RunConfig
    model: CausalLM
    tokenizer: Tokenizer
    step: int


def checkpoints(run: str | Path) -> list[Path]:
    """Return the published checkpoints of *run*, oldest first."""
    return sorted(path for path in (Path(run) / "checkpoints").glob("step-*") if (path / MANIFEST).is_file())


def save_checkpoint(
    run: Path, step: int, model: CausalLM, optimizer: Mapping[str, Any], trainer: Mapping[str, Any], *, keep: int
) -> Path:
    """Write the checkpoint of *step* (steps done so far), then delete all but the newest *keep*.

    Args:
        run: run directory.
        step: completed optimiser steps.
        model: weights; masters in *optimizer* take precedence on resumption.
        optimizer: ``Optimizer.state_dict()``.
        trainer: JSON-able state and, under ``tensors``, tensors of the balancers.
        keep: how many checkpoints stay.

    Raises:
        StorageError: the disk refused a write; older checkpoints are untouched.
    """
    target = run / "checkpoints" / f"step-{step:08d}"
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file({name: _plain(tensor) for name, tensor in published_tensors(model)}, part / MODEL)
        moments = {
            f"{name}/{key}": _plain(tensor)
            for name, kept in optimizer["parameters"].items()
            for key, tensor in kept.items()
        }
        balance = {f"balance/{name}": _plain(tensor) for name, tensor in trainer.get("tensors", {}).items()}
        save_file(moments | balance, part / OPTIMIZER)
        scalars = {key: value for key, value in trainer.items() if key != "tensors"}
        scalars |= {"step": step, "skipped_in_a_row": optimizer["skipped_in_a_row"]}
        write_json(part / TRAINER, scalars)
        files = {name: _describe(part / name) for name in (MODEL, OPTIMIZER, TRAINER)}
        write_json(part / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        for name in files:
            _sync(part / name)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise storage_error(target, error if isinstance(error, OSError) else OSError(5, str(error))) from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Check sizes and hashes of *checkpoint* and return its manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed; the message names it.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{checkpoint} has format {manifest['format']}, this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} is unreadable ({error}); {_older(checkpoint)}") from error
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_older(checkpoint)}")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {expected['bytes']}; {_older(checkpoint)}")
        if _describe(path)["sha256"] != expected["sha256"]:
            raise CheckpointError(f"{path} does not match its recorded SHA-256; {_older(checkpoint)}")
    return manifest


def _older(checkpoint: Path) -> str:
    others = [path for path in checkpoints(checkpoint.parent.parent) if path != checkpoint]
    if not others:
        return "there is no other checkpoint in this run"
    return f"delete {checkpoint} to go on from {others[-1].name}"


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of one safetensors file.

    Raises:
        CheckpointError: missing, truncated or not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 — not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


@torch.no_grad()
def load_weights(model: CausalLM, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy published tensors into *model*; every tensor must be expected, present and of its shape.

    Raises:
        CheckpointError: a missing, unknown or misshaped tensor; the message names it.
    """
    expected = dict(published_tensors(model))
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"{where} holds {unknown[0]!r}, which the configured model does not have")
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"{where} lacks {missing[0]!r} of shape {tuple(expected[missing[0]].shape)}")
    own = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        parameter, expert = locate(name)
        target = own[parameter] if expert is None else own[parameter][expert]
        if target.shape != tensor.shape:
            raise CheckpointError(f"{where}: {name} is {tuple(tensor.shape)}, the model needs {tuple(target.shape)}")
        target.data.copy_(tensor)


@dataclass(frozen=True)
class Resumption:
    """What a checkpoint holds beside the model's weights."""

    step: int
    optimizer: dict[str, Any]
    """For ``Optimizer.load_state_dict``."""
    trainer: dict[str, Any]
    """As given to `save_checkpoint`."""


def load_checkpoint(checkpoint: Path, model: CausalLM) -> Resumption:
    """Verify *checkpoint*, load the weights into *model*, and return the rest.

    Raises:
        CheckpointError: see `verify` and `load_weights`.
    """
    verify(checkpoint)
    load_weights(model, load_tensors(checkpoint / MODEL), checkpoint / MODEL)
    trainer = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))
    parameters: dict[str, dict[str, Tensor]] = {}
    balance: dict[str, Tensor] = {}
    for name, tensor in load_tensors(checkpoint / OPTIMIZER).items():
        head, _, key = name.rpartition("/")
        if name.startswith("balance/"):
            balance[name.removeprefix("balance/")] = tensor
        else:
            parameters.setdefault(head, {})[key] = tensor
    optimizer = {"parameters": parameters, "skipped_in_a_row": trainer["skipped_in_a_row"]}
    return Resumption(trainer["step"], optimizer, trainer | {"tensors": balance})


def write_config(run: Path, config: RunConfig) -> None:
    """Write the configuration of a new run."""
    write_json(run / "config.json", to_dict(config))


def read_config(run: str | Path) -> RunConfig:
    """Read the configuration of a run.

    Raises:
        CheckpointError: not a run directory, or its configuration is not one of this version.
    """
    path = Path(run) / "config.json"
    try:
        return from_dict(RunConfig, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{run} is not a run directory: {path} cannot be read ({error.strerror})") from error
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is not a run configuration: {error}") from error


_FIXED_TRAIN_SETTINGS = ("train.seed", "train.mtp_weight", "train.mtp_weight_final")


def check_same_run(run: Path, config: RunConfig) -> RunConfig:
    """Refuse to continue *run* under settings that would make it another run; returns the settings it had.

    Length, cadence, device, dtype, micro-batch split and the place of the corpus may change; model, text, optimiser,
    schedule and losses may not.

    Raises:
        ConfigError: lists the settings that differ.
    """
    earlier = read_config(run)
    changed = []
    for row in difference(earlier, config):
        key = row.partition(":")[0]
        if key != "data.path" and (not key.startswith("train.") or key in _FIXED_TRAIN_SETTINGS):
            changed.append(row)
    if changed:
        listing = "; ".join(changed[:6])
        raise ConfigError(
            f"{run} was started with other settings ({listing}); choose another --out, or resume it with its own: "
            f"tercet train --resume {run}"
        )
    return earlier


def lock_run(run: Path) -> IO[bytes] | None:
    """Take *run* for this process alone, creating it; the lock ends with the process, however that ends.

    Returns:
        The open lock file, or None where the system or its file system has no locks.

    Raises:
        ConfigError: another process trains into it.
        StorageError: the directory cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = open(run / ".lock", "ab")  # noqa: SIM115 (open as long as the run is in use)
    except OSError as error:
        raise storage_error(run, error) from error
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        handle.close()
        raise ConfigError(f"another process is training into {run}; wait, stop it, or choose another --out") from error
    except (ImportError, OSError):
        handle.close()
        return None
    return handle


def copy_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Keep the tokenizer with the run.

    Raises:
        ConfigError: the run has another one, so its corpus was another.
    """
    target = run / "tokenizer"
    try:
        kept = Tokenizer.load(target).fingerprint
    except DataError:  # a new run, or one that was killed while it began
        tokenizer.save(target)
        return
    if kept != tokenizer.fingerprint:
        raise ConfigError(f"{run} was started on a corpus with another tokenizer; choose another --out")


def load_run(run: str | Path, *, device: str = "cpu") -> LoadedRun:
    """Open the newest checkpoint of *run* for sampling, chat or evaluation.

    Raises:
        CheckpointError: no run, no checkpoint yet, or a damaged one.
        ConfigError: no such device here.
    """
    directory, place = Path(run), choose_device(device)
    config = read_config(directory)
    found = checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} has no checkpoint yet; train it first, or wait for its first one")
    verify(found[-1])
    with torch.device("meta"):
        model = CausalLM(config.model)
    model.to_empty(device="cpu")
    load_weights(model, load_tensors(found[-1] / MODEL), found[-1] / MODEL)
    step = json.loads((found[-1] / TRAINER).read_text(encoding="utf-8"))["step"]
    return LoadedRun(directory, config, model.to(place).eval(), Tokenizer.load(directory / "tokenizer"), step)
