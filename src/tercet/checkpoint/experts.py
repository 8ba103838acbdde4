"""Cutting experts: over tensor-parallel ranks, and down to a subset (checkpoint.md §8.6–7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.checkpoint.convert import Source
from tercet.checkpoint.layouts import GROUP
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.weights import Weight
from tercet.config import ModelConfig
from tercet.errors import ConfigError, ShapeError

NEUTRAL_SCALE = 127
"""Scale byte of padding: 2^0, so that its zero codes are exactly zero."""


def split_packed(
    weight: PackedWeight, along: Literal["outputs", "inputs"], rank: int, ranks: int, *, at_least: int = 0
) -> PackedWeight:
    """Return one rank's part of a packed expert matrix, padded with exact zeros to a kernel's smallest width.

    The inner width of an expert is the outputs of w1 and w3 and the inputs of w2; cutting it along multiples of 32
    keeps scale groups whole on every side.

    Args:
        weight: the whole matrix.
        along: the axis to cut.
        rank: which part.
        ranks: how many parts.
        at_least: smallest width of a part; narrower parts are padded.

    Raises:
        ShapeError: the axis does not divide into parts that are multiples of 32.
    """
    total = weight.shape[-2] if along == "outputs" else weight.shape[-1]
    if total % (ranks * GROUP):
        raise ShapeError(f"{total} {along} do not divide into {ranks} parts of whole groups of {GROUP}")
    width = total // ranks
    padding = max(0, -(-at_least // GROUP) * GROUP - width)
    if along == "outputs":
        rows = slice(rank * width, (rank + 1) * width)
        packed, scale = weight.packed[..., rows, :], weight.scale[..., rows, :]
        return PackedWeight(F.pad(packed, (0, 0, 0, padding)), F.pad(scale, (0, 0, 0, padding), value=NEUTRAL_SCALE))
    packed = weight.packed[..., rank * width // 2 : (rank + 1) * width // 2]
    scale = weight.scale[..., rank * width // GROUP : (rank + 1) * width // GROUP]
    return PackedWeight(F.pad(packed, (0, padding // 2)), F.pad(scale, (0, padding // GROUP), value=NEUTRAL_SCALE))


class ExpertSubset:
    """A source with only some of the experts: router rows, selection biases and experts follow one index list."""

    def __init__(self, source: Source, experts: Sequence[int]):
        """Keep *experts* (indices into the source's), renumbered in the given order.

        Raises:
            ConfigError: an index is repeated or out of range, or too few experts remain.
        """
        total = source.model.moe.num_experts
        if len(set(experts)) != len(experts) or not all(0 <= expert < total for expert in experts):
            raise ConfigError(f"experts must be distinct numbers in [0, {total}), got {list(experts)}")
        self.source, self.experts = source, tuple(experts)
        self.model: ModelConfig = replace(source.model, moe=replace(source.model.moe, num_experts=len(experts)))
        self.vision = source.vision

    def _original(self, weight: Weight) -> Weight:
        """Return the source's weight that *weight* is, or is a selection of."""
        if weight.role == "expert":
            head, _, rest = weight.name.partition(".experts.")
            number, _, tail = rest.partition(".")
            return weight._replace(name=f"{head}.experts.{self.experts[int(number)]}.{tail}")
        if weight.component == "router":
            return weight._replace(shape=(self.source.model.moe.num_experts, *weight.shape[1:]))
        return weight

    def is_packed(self, weight: Weight) -> bool:
        """See `Source.is_packed`."""
        return self.source.is_packed(self._original(weight))

    def weight(self, weight: Weight) -> Tensor | PackedWeight:
        """See `Source.weight`."""
        value = self.source.weight(self._original(weight))
        if weight.component != "router":
            return value
        assert isinstance(value, Tensor)
        return value[torch.tensor(self.experts, device=value.device)]

    def tensor(self, name: str) -> Tensor:
        """See `Source.tensor`."""
        return self.source.tensor(name)
