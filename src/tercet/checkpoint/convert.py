"""Write any source of weights — a directory or a model in memory — in any layout, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tercet.checkpoint.base import Base
from tercet.checkpoint.layouts import Layout, Rule, StoredTensor
from tercet.checkpoint.mxfp4 import PackedWeight, encode
from tercet.checkpoint.progress import byte_progress
from tercet.checkpoint.published_config import write_config
from tercet.checkpoint.weights import Weight
from tercet.checkpoint.writer import TORCH_DTYPES, Provide, new_directory, write_shards
from tercet.config import ModelConfig
from tercet.errors import CheckpointError, ConfigError
from tercet.model import CausalLM
from tercet.model.names import published_tensors
from tercet.util.files import write_json
from tercet.util.settings import difference

Experts = Literal["keep", "mxfp4", "plain"]
"""Routed experts: as the source has them, quantised, or dequantised."""


class Source(Protocol):
    """Where weights come from; `CheckpointDirectory` is one."""

    model: ModelConfig
    vision: dict[str, Any] | None

    def is_packed(self, weight: Weight) -> bool:
        """Whether `weight` returns a `PackedWeight`."""

    def weight(self, weight: Weight) -> Tensor | PackedWeight:
        """Return a weight in the model's shape."""

    def tensor(self, name: str) -> Tensor:
        """Return a carried vision tensor."""


class ModelSource:
    """A model in memory."""

    def __init__(self, model: CausalLM):
        self.model = model.config
        self.vision: dict[str, Any] | None = None
        self._tensors = dict(published_tensors(model))

    def is_packed(self, weight: Weight) -> bool:
        """Return False: a model computes with plain weights."""
        return False

    def weight(self, weight: Weight) -> Tensor:
        """Return a weight of the model."""
        return self._tensors[weight.name].detach()

    def tensor(self, name: str) -> Tensor:
        """Refuse: a text model has no vision tensors."""
        raise CheckpointError(f"a text model does not hold {name!r}")


def plan(
    source: Source,
    chosen: Layout,
    *,
    experts: Experts = "keep",
    dtype: str | None = None,
    kept: Base | None = None,
    vision: Mapping[str, Any] | None = None,
) -> list[StoredTensor]:
    """List the tensors to be written.

    Args:
        source: the weights.
        chosen: the layout.
        experts: ``keep`` takes the form that *kept* has, else the source's if it is packed, else the layout's choice.
        dtype: safetensors dtype of plain matrices; None takes what *kept* says, else BF16.
        kept: an earlier checkpoint of the same model.
        vision: vision settings when vision tensors are carried.

    Raises:
        CheckpointError: *kept* repeats head or embedding in its MTP layer with other bytes.
    """
    if kept is not None:
        kept.check_copies()

    def quantised(weight: Weight) -> bool:
        if experts == "keep":
            return kept.was_packed(weight) if kept else chosen.quantised or source.is_packed(weight)
        return experts == "mxfp4"

    def written() -> Iterator[StoredTensor]:
        for tensor in chosen.stored(source.model, vision, quantised=quantised, dtype=dtype):
            earlier = kept.dtype(tensor.weight) if kept and tensor.weight and chosen.any_float else None
            if dtype is None and earlier is not None and tensor.part == "whole":
                tensor = tensor._replace(dtype=earlier)
            yield tensor
        if kept is not None and kept.layout is chosen:
            yield from filter(kept.repeated, chosen.repeats(source.model))

    return list(written())


class _Provider:
    """Gives stored tensors from a source, encoding each expert once for its two tensors."""

    def __init__(self, source: Source, kept: Base | None, rule: Rule):
        self.source, self.kept, self.rule = source, kept, rule
        self._encoded: tuple[str, PackedWeight] | None = None

    def __call__(self, tensor: StoredTensor) -> Tensor:
        weight = tensor.weight
        if weight is None:
            return (self.kept or self.source).tensor(tensor.name)
        if tensor.part in ("packed", "scale"):
            packed = self._packed(weight)
            return packed.packed if tensor.part == "packed" else packed.scale
        value = self.source.weight(weight)
        dtype = TORCH_DTYPES[tensor.dtype]
        data = value.decode(dtype) if isinstance(value, PackedWeight) else value.to(dtype)
        if weight.role == "decay":
            data = pad_decay(data, tensor)
        return data.reshape(tensor.shape)

    def _packed(self, weight: Weight) -> PackedWeight:
        if self._encoded is None or self._encoded[0] != weight.name:
            value = self.source.weight(weight)
            if not isinstance(value, PackedWeight):
                value = encode(value, self.rule, keep=self.kept.packed(weight) if self.kept else None)
            self._encoded = (weight.name, value)
        return self._encoded[1]


def pad_decay(data: Tensor, tensor: StoredTensor) -> Tensor:
    """Append the zeros that the K3 layout stores after the per-head values of ``A_log``."""
    total = torch.Size(tensor.shape).numel()
    return torch.cat([data, data.new_zeros(total - data.numel())])


def planned_data(source: Source, kept: Base | None = None, rule: Rule = "even") -> Provide:
    """Return the function that gives the data of planned tensors.

    Args:
        source: the weights.
        kept: gives vision tensors and the bytes of unchanged MXFP4 blocks.
        rule: scale rule of newly encoded blocks.
    """
    return _Provider(source, kept, rule)


def check_same_model(source: ModelConfig, other: ModelConfig, what: str) -> None:
    """Refuse to mix two architectures.

    Raises:
        CheckpointError: lists the settings that differ.
    """
    if source != other:
        raise CheckpointError(f"{what} belongs to another model: {'; '.join(difference(source, other)[:6])}")


def write_published(
    source: Source,
    path: str | Path,
    chosen: Layout,
    *,
    experts: Experts = "keep",
    dtype: str | None = None,
    rule: Rule = "even",
    base: Base | None = None,
    show: bool | None = None,
) -> Path:
    """Write *source* as a published directory: shards, index, ``config.json``, and a base's companions.

    Args:
        source: the weights.
        path: a new directory.
        chosen: ``k3`` or ``kimi-linear``.
        experts: how routed experts are stored; ``keep`` is the source's form, or MXFP4 in the K3 layout.
        dtype: dtype of plain matrices (Kimi-Linear only; K3 is BF16); by default the base's, else BF16.
        rule: scale rule of newly encoded MXFP4 blocks.
        base: an earlier checkpoint of the same model whose dtypes, unchanged MXFP4 bytes, vision tensors and files are
            taken over.
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: *path* exists, or *base* belongs to another model.
        ConfigError: the layout cannot express the model, or an expert's width cannot be quantised.
        StorageError: the disk refused a write; nothing is left behind.
    """
    if dtype not in (None, "BF16", "F32", "F16"):
        raise ConfigError(f"dtype {dtype!r} is not one of BF16, F16, F32")
    if dtype not in (None, "BF16") and not chosen.any_float:
        raise ConfigError(f"the {chosen.name} layout stores its matrices in BF16, not {dtype}")
    if base is not None:
        check_same_model(source.model, base.model, str(base.directory.path))
        if base.layout is not chosen:
            raise CheckpointError(f"{base.directory.path} is in the {base.layout.name} layout, not in {chosen.name}")
    vision = base.vision if base else source.vision
    tensors = plan(source, chosen, experts=experts, dtype=dtype, kept=base, vision=vision)
    quantised = any(tensor.part != "whole" for tensor in tensors)
    config = write_config(chosen, source.model, vision, quantised=quantised, dtype=dtype or "BF16")
    with new_directory(path) as directory:
        if base is not None:
            base.copy_companions(directory)
        if base is not None and experts == "keep" and dtype is None:
            shutil.copyfile(base.config_file, directory / "config.json")
        else:
            write_json(directory / "config.json", config)
        total = sum(tensor.nbytes for tensor in tensors)
        with byte_progress(f"writing {Path(path).name}", total, show) as advance:
            write_shards(directory, chosen, tensors, planned_data(source, base, rule), advance)
    return Path(path)
