"""Training state on disk: one format from one process to many, complete or absent, no pickles.

    model.safetensors.index.json             where each weight lies
    model-00001-of-00003.safetensors         weights under published names
    optimizer-00001-of-00002.safetensors     masters, momentum, moments and balance averages, "parameter/key"
    trainer.json                             step, data position, optimiser and balance scalars
    manifest.json                            format, step, size and SHA-256 of every other file; written last

A tensor is never cut, so the files are ordinary safetensors files and any reader of the format opens them.
`distributed` is how torch.distributed.checkpoint writes and reads such a directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tercet.checkpoint.writer import INDEX_NAME, sync_directory
from tercet.errors import CheckpointError
from tercet.util.files import write_json

FORMAT = 2
READABLE = (1, 2)
"""Format 1 has one model and one optimiser file and no index; nothing else differs."""

TRAINER, MANIFEST = "trainer.json", "manifest.json"

MAX_FILE_BYTES = 4 << 30
"""Largest file, unless one tensor alone is larger."""
MAX_FILE_TENSORS = 16_384
"""Most tensors in a file: some 3 MB of header, well below what `headers.read_header` takes."""


def checkpoints(run: str | Path) -> list[Path]:
    """Return the published checkpoints of *run*, oldest first."""
    return sorted(path for path in (Path(run) / "checkpoints").glob("step-*") if (path / MANIFEST).is_file())


def checkpoint_path(run: Path, step: int) -> Path:
    """Return where the checkpoint of *step* is published."""
    return run / "checkpoints" / f"step-{step:08d}"


def part_of(target: Path) -> Path:
    """Return the hidden neighbour in which the checkpoint *target* is made."""
    return target.with_name(f".{target.name}.part")


def tidy(run: Path) -> None:
    """Remove what a crash left half-written."""
    for part in (run / "checkpoints").glob(".step-*.part"):
        shutil.rmtree(part, ignore_errors=True)


def is_state(name: str) -> bool:
    """Whether tensor *name* belongs to the optimiser or a balancer: weights carry their published names alone."""
    return "/" in name


class Piece(NamedTuple):
    """What is known of a tensor before it is written."""

    name: str
    nbytes: int


def portions(tensors: Iterable[Piece], max_bytes: int = MAX_FILE_BYTES) -> Iterator[list[str]]:
    """Cut *tensors*, in their order, into the names of one file each."""
    names: list[str] = []
    filled = 0
    for name, nbytes in tensors:
        if names and (filled + nbytes > max_bytes or len(names) == MAX_FILE_TENSORS):
            yield names
            names, filled = [], 0
        names.append(name)
        filled += nbytes
    if names:
        yield names


def number_files(ranks: Sequence[Sequence[Piece]], max_bytes: int = MAX_FILE_BYTES) -> list[dict[str, list[str]]]:
    """Name the files of every rank: file → tensors, numbered over all ranks, weights apart from state."""
    groups = [
        [
            (kind, names)
            for kind, state in (("model", False), ("optimizer", True))
            for names in portions((piece for piece in pieces if is_state(piece.name) == state), max_bytes)
        ]
        for pieces in ranks
    ]
    counts = {kind: sum(kind == other for group in groups for other, _ in group) for kind in ("model", "optimizer")}
    given = dict.fromkeys(counts, 0)
    named: list[dict[str, list[str]]] = []
    for group in groups:
        files = {}
        for kind, names in group:
            given[kind] += 1
            files[f"{kind}-{given[kind]:05d}-of-{counts[kind]:05d}.safetensors"] = names
        named.append(files)
    return named


def describe(path: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest."""
    with open(path, "rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def write_companions(
    directory: Path,
    step: int,
    trainer: Mapping[str, Any],
    placed: Mapping[str, tuple[str, int]],
    files: dict[str, dict[str, Any]],
) -> None:
    """Write index, ``trainer.json`` and, last, the manifest of a checkpoint whose tensors lie in *directory*.

    Args:
        directory: not yet published.
        step: optimiser steps done.
        trainer: JSON-able state.
        placed: file and bytes of every tensor.
        files: the manifest's entries of the tensor files.
    """
    weights = {name: place for name, place in sorted(placed.items()) if not is_state(name)}
    total = sum(nbytes for _, nbytes in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in weights.items()}}
    write_json(directory / INDEX_NAME, index)
    write_json(directory / TRAINER, {**trainer, "step": step})
    listed = dict(sorted(files.items())) | {name: describe(directory / name) for name in (INDEX_NAME, TRAINER)}
    write_json(directory / MANIFEST, {"format": FORMAT, "step": step, "files": listed})


def publish(part: Path, target: Path, *, keep: int) -> None:
    """Give the finished directory *part* its name by one rename, then delete all but the newest *keep* checkpoints."""
    sync_directory(part)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    sync_directory(target.parent)
    for old in checkpoints(target.parent.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of *checkpoint*.

    Raises:
        CheckpointError: missing, malformed, or of a format that this version does not read.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files, number = dict(manifest["files"]), manifest["format"]
        if number not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise CheckpointError(f"{checkpoint} has format {number!r}, this version reads {known}")
        plain = all(Path(name).name == name and int(entry["bytes"]) >= 0 for name, entry in files.items())
        if not plain:
            raise ValueError("it names files outside its directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{checkpoint / MANIFEST} is unreadable ({error}); {_older(checkpoint)}") from error
    return manifest


def verify(checkpoint: Path, *, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Check sizes and hashes of *checkpoint* and return its manifest.

    Args:
        checkpoint: published directory.
        rank: checks every file's size, and the hashes of every *world*-th file.
        world: processes that share the work.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not accounted for; the message names it.
    """
    manifest = read_manifest(checkpoint)
    files = manifest["files"]
    for path in sorted(checkpoint.glob("*.safetensors")):
        if path.name not in files:
            raise CheckpointError(f"{path} is not in {MANIFEST}: it does not belong to this checkpoint; remove it")
    for number, (name, expected) in enumerate(files.items()):
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_older(checkpoint)}")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {expected['bytes']}; {_older(checkpoint)}")
        if number % world == rank and describe(path)["sha256"] != expected["sha256"]:
            raise CheckpointError(f"{path} does not match its recorded SHA-256; {_older(checkpoint)}")
    return manifest


def _older(checkpoint: Path) -> str:
    others = [path for path in checkpoints(checkpoint.parent.parent) if path != checkpoint]
    if not others:
        return "there is no other checkpoint in this run"
    return f"delete {checkpoint} to go on from {others[-1].name}"


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """Return ``trainer.json``.

    Raises:
        CheckpointError: missing or malformed.
    """
    try:
        return dict(json.loads((checkpoint / TRAINER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / TRAINER} is unreadable ({error}); {_older(checkpoint)}") from error
