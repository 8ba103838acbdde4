"""What an earlier published checkpoint fixes about a later export of the same model.

A run that started from a published checkpoint keeps, beside its weights, what the weights alone do not say: the
``config.json`` as it was, tokenizer and similar files, the dtype of every tensor, the vision tensors, and the bytes of
MXFP4 experts. An export takes them over wherever they still hold, so a checkpoint that nobody changed comes out byte
for byte, and after fine-tuning the untouched blocks do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.headers import read_json
from tercet.checkpoint.layouts import StoredTensor
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.progress import Advance
from tercet.checkpoint.weights import Weight
from tercet.checkpoint.writer import write_shards
from tercet.errors import CheckpointError
from tercet.util.files import write_json

KEPT = "kept.json"

COMPANIONS = (
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tiktoken.model",
    "chat_template.jinja",
    "LICENSE",
)
"""Files beside the weights that travel with them. Program code never does."""


class Base:
    """A published checkpoint, whole or as a run keeps it."""

    def __init__(self, directory: CheckpointDirectory, dtypes: dict[str, str]):
        if directory.layout.name == "run":
            raise CheckpointError(f"{directory.path} is a training run; a base is a published checkpoint")
        self.directory, self._dtypes = directory, dtypes
        self.layout, self.model, self.vision = directory.layout, directory.model, directory.vision

    @classmethod
    def open(cls, path: str | Path) -> Base:
        """Open a published directory, or the ``published`` folder of an imported run.

        Raises:
            CheckpointError: it is neither, or is damaged.
        """
        path = Path(path)
        if not (path / KEPT).exists():
            return cls.of(CheckpointDirectory.open(path))
        kept = read_json(path / KEPT)
        dtypes = kept.get("dtypes") if isinstance(kept, dict) else None
        if not isinstance(dtypes, dict) or not all(isinstance(value, str) for value in dtypes.values()):
            raise CheckpointError(f"{path / KEPT} does not list dtypes; import the checkpoint again")
        return cls(CheckpointDirectory.open(path, strict=False, weights=bool(kept.get("tensors"))), dtypes)

    @classmethod
    def of(cls, directory: CheckpointDirectory) -> Base:
        """Take a whole published checkpoint as base."""
        return cls(directory, {name: entry.dtype for name, entry in directory.entries.items()})

    def dtype(self, weight: Weight) -> str | None:
        """Return the dtype *weight* was published in."""
        return self._dtypes.get(self.layout.prefix + weight.name)

    def repeated(self, tensor: StoredTensor) -> bool:
        """Whether the copy *tensor* was published beside the weight it repeats."""
        return tensor.name in self._dtypes

    def was_packed(self, weight: Weight) -> bool:
        """Whether *weight* was published as MXFP4."""
        return f"{self.layout.prefix}{weight.name}_packed" in self.directory.entries

    def packed(self, weight: Weight) -> PackedWeight | None:
        """Return the published MXFP4 bytes of *weight*."""
        if not self.was_packed(weight):
            return None
        value = self.directory.weight(weight)
        assert isinstance(value, PackedWeight)
        return value

    def tensor(self, name: str) -> Tensor:
        """Return a carried vision tensor."""
        if name not in self.directory.entries:
            raise CheckpointError(f"{self.directory.path} does not hold the vision tensor {name!r}")
        return self.directory.tensor(name)

    @property
    def config_file(self) -> Path:
        """The published ``config.json``."""
        return self.directory.path / "config.json"

    def check_copies(self) -> None:
        """See `CheckpointDirectory.check_copies`; a run keeps no copies, they were compared when it was imported."""
        self.directory.check_copies()

    def copy_companions(self, target: Path) -> None:
        """Copy the files that travel with the weights."""
        for name in COMPANIONS:
            if (self.directory.path / name).is_file():
                shutil.copyfile(self.directory.path / name, target / name)

    def keep(self, target: Path, advance: Advance) -> None:
        """Write into the new directory *target* what a run needs to keep."""
        target.mkdir()
        shutil.copyfile(self.config_file, target / "config.json")
        self.copy_companions(target)
        tensors = self.kept_tensors()
        write_json(target / KEPT, {"tensors": len(tensors), "dtypes": self._dtypes})
        if tensors:
            write_shards(target, self.layout, tensors, lambda tensor: self.directory.tensor(tensor.name), advance)

    def kept_tensors(self) -> list[StoredTensor]:
        """List the tensors that plain weights cannot give back: vision, and MXFP4 bytes."""
        return [
            tensor for tensor in self.directory.expected.values() if tensor.weight is None or tensor.part != "whole"
        ]
