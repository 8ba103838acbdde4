"""A run's directory: what a checkpoint is made of, how a run goes on, who may write into it.

    RUN/config.json                      RunConfig
    RUN/.lock                            held by the process that trains
    RUN/tokenizer/                       the corpus's tokenizer, so that the run can be used without its corpus
    RUN/checkpoints/step-00000200/       `tercet.checkpoint.state`

A checkpoint is written into a hidden neighbour and renamed, so a kill at any moment leaves the previous one in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from tercet.checkpoint.load import load_model
from tercet.checkpoint.state import checkpoint_path, checkpoints, is_state, read_trainer, verify
from tercet.config import RunConfig
from tercet.data import Tokenizer
from tercet.errors import CheckpointError, ConfigError, DataError
from tercet.model import CausalLM, choose_device
from tercet.model.names import locate, published_tensors
from tercet.parallel import Ranks
from tercet.train.saving import Saver
from tercet.util.files import storage_error, write_json
from tercet.util.settings import difference, from_dict, to_dict

_BALANCE = "balance/"


@dataclass(frozen=True)
class LoadedRun:
    """A run opened for use rather than for further training."""

    directory: Path
    config: RunConfig
    model: CausalLM
    tokenizer: Tokenizer
    step: int


def state_tensors(
    model: CausalLM,
    optimizer: Mapping[str, Any],
    averages: Mapping[str, Tensor],
    owns: Callable[[str], bool] = lambda parameter: True,
) -> dict[str, Tensor]:
    """Return what this rank saves, by name in the checkpoint; tensors are shared, not copied.

    Args:
        model: weights and biases.
        optimizer: ``Optimizer.state_dict()``, which holds what this rank owns.
        averages: tensors of the balancers; empty on all ranks but one.
        owns: whether this rank saves the parameter or buffer of that name.
    """
    weights = {name: tensor for name, tensor in published_tensors(model) if owns(locate(name)[0])}
    moments = {f"{name}/{key}": t for name, kept in optimizer["parameters"].items() for key, t in kept.items()}
    return weights | moments | {f"{_BALANCE}{name}": tensor for name, tensor in averages.items()}


def save_checkpoint(
    run: Path, step: int, model: CausalLM, optimizer: Mapping[str, Any], trainer: Mapping[str, Any], *, keep: int
) -> Path:
    """Write the checkpoint of *step* (steps done so far) from one process, then delete all but the newest *keep*.

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
    tensors = state_tensors(model, optimizer, trainer.get("tensors", {}))
    scalars = {key: value for key, value in trainer.items() if key != "tensors"}
    scalars["skipped_in_a_row"] = optimizer["skipped_in_a_row"]
    Saver(run, Ranks(), keep=keep, asynchronous=False).save(step, tensors, scalars)
    return checkpoint_path(run, step)


@dataclass(frozen=True)
class Resumption:
    """What a checkpoint holds beside the model's weights."""

    step: int
    optimizer: dict[str, Any]
    """For ``Optimizer.load_state_dict``: the state of what this rank owns."""
    trainer: dict[str, Any]
    """As given to `save_checkpoint`; bare when nothing has been trained, as after an import."""


def load_checkpoint(
    checkpoint: Path,
    model: CausalLM,
    *,
    ranks: Ranks | None = None,
    owns: Callable[[str], bool] = lambda parameter: True,
) -> Resumption:
    """Verify *checkpoint*, load the weights into *model*, and return the rest.

    Args:
        checkpoint: published directory.
        model: its own tensors are overwritten.
        ranks: processes that load together; they share the verification.
        owns: whether this rank wants the optimiser state of the parameter of that name.

    Raises:
        CheckpointError: see `tercet.checkpoint.state.verify`; or a tensor is missing, unknown or misshaped.
    """
    from tercet.checkpoint.distributed import SavedState

    ranks = ranks or Ranks()
    ranks.on_all(lambda: verify(checkpoint, rank=ranks.rank, world=ranks.world))
    saved = SavedState(checkpoint)
    weights = {name: tensor.detach() for name, tensor in published_tensors(model)}
    _check_weights(checkpoint, weights, saved.shapes)
    parameters: dict[str, dict[str, Tensor]] = {}
    balance: dict[str, Tensor] = {}
    state = {}
    for name in filter(is_state, saved.shapes):
        parameter, _, key = name.rpartition("/")
        if name.startswith(_BALANCE):
            balance[key] = state[name] = saved.empty(name)
        elif owns(parameter):
            parameters.setdefault(parameter, {})[key] = state[name] = saved.empty(name)
    saved.load(weights | state)
    trainer = read_trainer(checkpoint)
    optimizer = {"parameters": parameters, "skipped_in_a_row": trainer["skipped_in_a_row"]}
    return Resumption(trainer["step"], optimizer, trainer | {"tensors": balance})


def _check_weights(checkpoint: Path, expected: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose weights are not exactly the model's.

    Raises:
        CheckpointError: a missing, unknown or misshaped tensor; the message names it.
    """
    found = {name: shape for name, shape in saved.items() if not is_state(name)}
    if unknown := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{checkpoint} holds {unknown[0]!r}, which the configured model does not have")
    for name, tensor in expected.items():
        if name not in found:
            raise CheckpointError(f"{checkpoint} lacks {name!r} of shape {tuple(tensor.shape)}")
        if found[name] != tensor.shape:
            raise CheckpointError(f"{checkpoint}: {name} is {found[name]}, the model needs {tuple(tensor.shape)}")


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


def is_untrained(run: Path) -> bool:
    """Whether *run* holds imported weights and nothing else yet: it has a model, but no history to keep to."""
    found = checkpoints(run)
    return bool(found) and "loader" not in read_trainer(found[-1])


_FIXED_TRAIN_SETTINGS = ("train.seed", "train.mtp_weight", "train.mtp_weight_final")


def check_same_run(run: Path, config: RunConfig) -> RunConfig:
    """Refuse to continue *run* under settings that would make it another run; returns the settings it had.

    Length, cadence, device, dtype, micro-batch split and the place of the corpus may change; model, text, optimiser,
    schedule and losses may not. Of imported weights that nobody has trained yet only the model is fixed.

    Raises:
        ConfigError: lists the settings that differ.
    """
    earlier, untrained = read_config(run), is_untrained(run)
    changed = []
    for row in difference(earlier, config):
        key = row.partition(":")[0]
        if untrained and not key.startswith("model."):
            continue
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
    model = load_model(found[-1], device=place, show=False)
    step = read_trainer(found[-1])["step"]
    return LoadedRun(directory, config, model, Tokenizer.load(directory / "tokenizer"), step)
