"""What a checkpoint consists of: layers, dtypes, bytes by component, quantised share, largest codes of its blocks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import DTYPE_BYTES, GROUP
from tercet.checkpoint.mxfp4 import CODES, PackedWeight
from tercet.checkpoint.progress import byte_progress
from tercet.config import ModelConfig


@dataclass(frozen=True)
class Summary:
    """Counted from headers alone."""

    tensors: int
    nbytes: int
    shards: int
    dtypes: dict[str, tuple[int, int]]
    """Tensors and bytes by dtype."""
    components: dict[str, tuple[int, int]]
    """Weights (an MXFP4 weight counts its values, not its bytes) and bytes by component."""
    quantised_weights: int
    """Weights stored in MXFP4."""

    @property
    def weights(self) -> int:
        """Weights in all."""
        return sum(count for count, _ in self.components.values())

    @property
    def quantised_share(self) -> float:
        """Share of the weights stored in MXFP4."""
        return self.quantised_weights / self.weights if self.weights else 0.0


def summarize(directory: CheckpointDirectory) -> Summary:
    """Count a checkpoint from its headers; tensors that the layout does not know are counted as ``unknown``."""
    dtypes: dict[str, list[int]] = {}
    components: dict[str, list[int]] = {}
    quantised = 0
    for name, entry in directory.entries.items():
        by_dtype = dtypes.setdefault(entry.dtype, [0, 0])
        by_dtype[0] += 1
        by_dtype[1] += entry.nbytes
        tensor = directory.expected.get(name) or directory.copies.get(name)
        row = components.setdefault(tensor.component if tensor else "unknown", [0, 0])
        row[1] += entry.nbytes
        if tensor is None or tensor.part == "whole":
            stored = entry.nbytes // DTYPE_BYTES[entry.dtype]
            row[0] += tensor.weight.numel if tensor and tensor.weight else stored
        elif tensor.part == "packed" and tensor.weight:
            row[0] += tensor.weight.numel
            quantised += tensor.weight.numel
    return Summary(
        len(directory.entries),
        directory.nbytes,
        len(directory.headers),
        {key: (count, size) for key, (count, size) in sorted(dtypes.items())},
        {key: (count, size) for key, (count, size) in components.items()},
        quantised,
    )


def layer_pattern(config: ModelConfig) -> str:
    """Write the layers as letters: K for KDA, M for MLA, in lower case where the feed-forward is dense."""
    letters = ["M" if config.is_mla(n) else "K" for n in range(config.num_layers)]
    return "".join(c if config.is_moe(n) else c.lower() for n, c in enumerate(letters))


def code_histogram(directory: CheckpointDirectory, *, show: bool | None = None) -> dict[float, float]:
    """Return the share of non-zero MXFP4 blocks by their largest |code|, which tells the scale rule that wrote them.

    ``even`` and ``floor`` leave only 4 and 6, ``rceil`` also 3 (post_training.md §3.3). Reads the data, with a progress
    bar as *show* asks.
    """
    counts: Counter[int] = Counter()
    packed = [tensor for tensor in directory.in_file_order() if tensor.part == "packed"]
    with byte_progress("reading codes", sum(tensor.nbytes for tensor in packed), show) as advance:
        for tensor in packed:
            assert tensor.weight is not None
            value = directory.weight(tensor.weight)
            assert isinstance(value, PackedWeight)
            magnitude = torch.maximum(value.packed & 7, (value.packed >> 4) & 7)
            largest = magnitude.unflatten(-1, (-1, GROUP // 2)).amax(-1).flatten()
            counts.update(dict(enumerate(torch.bincount(largest, minlength=8).tolist())))
            advance(tensor.nbytes)
    total = math.fsum(counts[code] for code in range(1, 8))
    return {CODES[code]: counts[code] / total for code in range(1, 8) if counts[code]} if total else {}


def rule_of(histogram: dict[float, float]) -> str:
    """Name the scale rules that could have written blocks with this *histogram* of largest codes.

    ``floor`` and ``even`` cannot be told apart this way: their split of 4 and 6 depends on the scale of the weights.
    """
    if not histogram:
        return "no quantised blocks"
    if set(histogram) <= {4.0, 6.0}:
        return "floor or even"
    return "rceil" if set(histogram) <= {3.0, 4.0, 6.0} else "none of even, floor, rceil"
