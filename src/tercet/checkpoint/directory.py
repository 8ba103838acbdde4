"""A checkpoint directory opened from its headers: what is there, what should be, and mapped access to the data.

    directory = CheckpointDirectory.open("Kimi-Linear-48B-A3B-Instruct")   # strict: any deviation is an error
    directory.model                                                       # ModelConfig
    directory.weight(weight)                                              # Tensor, or PackedWeight for an MXFP4 expert

Published directories (``config.json`` with a model type) and training runs (``config.json`` with a run configuration)
open alike. Opening reads headers only; data is mapped one shard at a time.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.checkpoint.headers import Entry, Header, read_header, read_json
from tercet.checkpoint.layouts import Layout, StoredTensor, layout
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.published_config import read_config
from tercet.checkpoint.state import checkpoints
from tercet.checkpoint.weights import Weight
from tercet.checkpoint.writer import INDEX_NAME, TORCH_DTYPES
from tercet.config import ModelConfig, RunConfig
from tercet.errors import CheckpointError, ConfigError
from tercet.util.settings import from_dict

SINGLE_NAME = "model.safetensors"
MAX_TENSORS = 2_000_000
"""Largest number of tensors that a configuration may ask for; K3 has half a million."""
SHOWN = 8
"""Deviations that an error message lists."""


class _Mapping:
    """One mapped file."""

    def __init__(self, header: Header):
        self.path = header.path
        with open(header.path, "rb") as handle:
            # A private copy-on-write mapping: torch wants writable memory, and the file stays as it is.
            self.memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(self.memory) != header.file_bytes:
            raise CheckpointError(f"{header.path} changed its size since its header was read")

    def tensor(self, entry: Entry) -> Tensor:
        """Return a view of the mapped bytes; a copy where the file left them misaligned."""
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self.memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)


class CheckpointDirectory:
    """Headers of all shards beside what the configuration demands."""

    def __init__(
        self,
        path: Path,
        chosen: Layout,
        model: ModelConfig,
        vision: dict[str, Any] | None,
        headers: Mapping[str, Header],
        run: RunConfig | None = None,
    ):
        self.path, self.layout, self.model, self.vision = path, chosen, model, vision
        self.headers, self.run = dict(headers), run
        if (claimed := 3 * model.num_layers * model.moe.num_experts) > MAX_TENSORS:
            raise ConfigError(f"{path}: config.json describes some {claimed:,} tensors, which is not believed")
        self.entries: dict[str, Entry] = {}
        """Entries by published name."""
        self.files: dict[str, str] = {}
        """File by published name."""
        for file, header in self.headers.items():
            for name, entry in header.entries.items():
                published = chosen.alias(name, model)
                if published in self.entries:
                    where = self.files[published]
                    raise CheckpointError(f"{path}: tensor {published!r} is in both {where} and {file}")
                self.entries[published], self.files[published] = entry, file
        self.copies = {tensor.name: tensor for tensor in chosen.repeats(model) if tensor.name in self.entries}
        """Second copies of head and embedding in the MTP layer."""
        self.skipped = sorted(name for name in self.entries if chosen.skipped(name, model))
        self.expected = chosen.expected(model, vision, self.entries)
        self._mapped: _Mapping | None = None

    @classmethod
    def open(cls, path: str | Path, *, strict: bool = True, weights: bool = True) -> CheckpointDirectory:
        """Read configuration, index and headers.

        Args:
            path: a published directory, a training run, or one checkpoint of a run.
            strict: refuse any deviation from the layout; otherwise see `problems`.
            weights: False for a directory known to hold a configuration only.

        Raises:
            CheckpointError: files are missing, malformed or lie, or (strict) a tensor is missing, unknown, misshaped
                or of the wrong dtype; the message names it and what was expected.
            ConfigError: ``config.json`` does not describe a model of this architecture.
        """
        root = Path(path)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a directory")
        config_path, weights_path = _locate(root)
        data = read_json(config_path)
        run = None
        if isinstance(data, dict) and "model_type" in data:
            published = read_config(data)
            chosen, model, vision = published.layout, published.model, published.vision
        elif isinstance(data, dict) and isinstance(data.get("model"), dict):
            run = from_dict(RunConfig, data)
            chosen, model, vision = layout("run"), run.model, None
        else:
            raise ConfigError(f"{config_path} is neither a published config.json nor a run's configuration")
        directory = cls(root, chosen, model, vision, read_headers(weights_path) if weights else {}, run)
        if strict and (problems := directory.problems()):
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise CheckpointError(f"{root} does not match its configuration: {'; '.join(problems[:SHOWN])}{more}")
        return directory

    def problems(self) -> list[str]:
        """List every deviation from the layout, naming the tensor and what was expected."""
        found: list[str] = []
        for name, tensor in {**self.expected, **self.copies}.items():
            entry = self.entries.get(name)
            if entry is None:
                found.append(f"missing tensor {name!r} (expected {tensor.dtype} {list(tensor.shape)})")
                continue
            if entry.shape != tensor.shape:
                found.append(f"{name!r} has shape {list(entry.shape)}, expected {list(tensor.shape)}")
            if entry.dtype not in tensor.readable_dtypes:
                found.append(f"{name!r} is {entry.dtype}, expected {' or '.join(tensor.readable_dtypes)}")
        unknown = self.entries.keys() - self.expected.keys() - self.copies.keys() - set(self.skipped)
        found += [f"unexpected tensor {name!r}" for name in sorted(unknown)]
        return found

    def misplaced(self) -> int:
        """Count tensors outside the shard of the published placement; harmless, but not the published files."""
        if len(self.headers) != self.layout.shard_count(self.model, self.vision):
            return len(self.entries)
        tensors = {**self.expected, **self.copies}
        names = {n: self.layout.shard_name(n, len(self.headers)) for n in {tensor.shard for tensor in tensors.values()}}
        return sum(self.files.get(name) != names[tensor.shard] for name, tensor in tensors.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def dtypes(self) -> Counter[str]:
        """Count tensors by dtype."""
        return Counter(entry.dtype for entry in self.entries.values())

    def in_file_order(self) -> Iterable[StoredTensor]:
        """Return the expected tensors grouped by file, so that reading them maps each shard once."""
        return sorted(self.expected.values(), key=lambda tensor: self.files[tensor.name])

    def tensor(self, name: str) -> Tensor:
        """Return the stored tensor *name*, a view of mapped memory: copy what must outlive the next shard's turn."""
        header = self.headers[self.files[name]]
        if self._mapped is None or self._mapped.path != header.path:
            self._mapped = None  # let go of the last shard before mapping the next
            try:
                self._mapped = _Mapping(header)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {header.path}: {error}") from error
        return self._mapped.tensor(self.entries[name])

    def check_copies(self) -> None:
        """Compare head and embedding with their copies in the MTP layer, byte by byte. Reads the data.

        Raises:
            CheckpointError: one is not a copy; the message names it.
        """
        for name, copy in self.copies.items():
            assert copy.weight is not None
            original = self.layout.prefix + copy.weight.name
            kept = _Mapping(self.headers[self.files[original]]).tensor(self.entries[original])
            if not torch.equal(kept.view(torch.uint8), self.tensor(name).view(torch.uint8)):
                raise CheckpointError(
                    f"{self.path}: {name!r} is not a copy of {original!r}, and the multi-token-prediction layer has no "
                    "head or embedding of its own; make the two equal, or set num_nextn_predict_layers to 0"
                )

    def is_packed(self, weight: Weight) -> bool:
        """Whether *weight* is stored as MXFP4."""
        return f"{self.layout.prefix}{weight.name}_packed" in self.expected

    def stored_dtype(self, weight: Weight) -> str:
        """Return the file's dtype of *weight*."""
        suffix = "_packed" if self.is_packed(weight) else ""
        return self.entries[f"{self.layout.prefix}{weight.name}{suffix}"].dtype

    def weight(self, weight: Weight) -> Tensor | PackedWeight:
        """Return *weight* in the model's shape, or still packed.

        Raises:
            CheckpointError: the padding of an ``A_log`` is not zero.
        """
        name = self.layout.prefix + weight.name
        if self.is_packed(weight):
            return PackedWeight(self.tensor(f"{name}_packed"), self.tensor(f"{name}_scale"))
        data = self.tensor(name)
        return unpad_decay(data, weight, name) if weight.role == "decay" else data


def unpad_decay(data: Tensor, weight: Weight, name: str) -> Tensor:
    """Return the per-head values of a stored ``A_log``: its length need not be the number of heads (checkpoint.md §4).

    Raises:
        CheckpointError: an entry beyond the heads is not zero.
    """
    heads = weight.shape[0]
    flat = data.flatten()
    if (flat[heads:] != 0).any():
        raise CheckpointError(
            f"{name!r} holds {flat.numel()} values for {heads} heads, and those after the first {heads} are not zero: "
            "this is not a per-head decay"
        )
    return flat[:heads]


def _locate(root: Path) -> tuple[Path, Path]:
    """Return configuration file and weights directory of a published directory, a run, or a run's checkpoint."""
    if (root / "checkpoints").is_dir():
        if not (steps := checkpoints(root)):
            raise CheckpointError(f"{root} is a run without a finished checkpoint")
        return root / "config.json", steps[-1]
    if root.parent.name == "checkpoints" and not (root / "config.json").exists():
        return root.parent.parent / "config.json", root
    if not (root / "config.json").is_file():
        raise CheckpointError(f"{root} has no config.json")
    return root / "config.json", root


def read_headers(directory: Path) -> dict[str, Header]:
    """Read the headers of all shards, checked against the index if there is one.

    Raises:
        CheckpointError: no weights, an index that leaves the directory, points nowhere, or disagrees with a header.
    """
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        if not (directory / SINGLE_NAME).exists():
            raise CheckpointError(f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return {SINGLE_NAME: read_header(directory / SINGLE_NAME)}
    index = read_json(index_path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map")
    files = set()
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _plain_file_name(file):
            raise CheckpointError(f"{index_path} places {name!r} in {file!r}, which is not a plain .safetensors name")
        files.add(file)
    headers = {file: read_header(directory / file) for file in sorted(files)}
    _check_index(index_path, index, weight_map, headers)
    return headers


def _plain_file_name(file: str) -> bool:
    """Whether *file* is a name in the same directory: no path, no parent, no drive, nothing hidden."""
    return (
        file.endswith(".safetensors") and not file.startswith(".") and not set(file) & set("/\\:\0") and len(file) < 256
    )


def _check_index(path: Path, index: dict[str, Any], weight_map: dict[str, str], headers: dict[str, Header]) -> None:
    for name, file in weight_map.items():
        if name not in headers[file].entries:
            raise CheckpointError(f"{path} places {name!r} in {file}, which does not hold it")
    for file, header in headers.items():
        for name in header.entries:
            if weight_map.get(name) != file:
                raise CheckpointError(f"{file} holds {name!r}, which {path.name} places in {weight_map.get(name)!r}")
    metadata = index.get("metadata", {})
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(entry.nbytes for header in headers.values() for entry in header.entries.values())
    if claimed is not None and claimed != actual:
        raise CheckpointError(f"{path} claims {claimed!r} bytes of tensors, the shards hold {actual:,}")
