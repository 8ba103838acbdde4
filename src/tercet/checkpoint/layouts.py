"""How a layout stores each weight: name, dtype, shape and shard.

Three layouts share one table of weights and one rule of placement — decoder layer ℓ lies entirely in shard ℓ + 1, what
is outside the layers follows, then projector and vision tower (checkpoint.md §2):

* ``k3``: prefix ``language_model.``, routed experts in MXFP4 (packed codes and E8M0 scales), ``A_log`` padded with
  zeros to the head width, vision tensors;
* ``kimi-linear``: no prefix, nothing quantised, ``A_log`` as ``[1, 1, heads, 1]``;
* ``run``: what a training run holds — the model's own names and shapes.

Whether an expert is quantised is decided by the tensors that are present, never by the configuration (§6).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from tercet.checkpoint.vision import PROJECTOR, PUBLISHED_VISION, vision_tensors
from tercet.checkpoint.weights import Weight, weights
from tercet.config import ModelConfig
from tercet.errors import ConfigError, nearest

GROUP = 32
"""Consecutive inputs that share one MXFP4 scale."""

Rule = Literal["even", "floor", "rceil"]
"""How the scale of an MXFP4 block follows from its largest value; see `mxfp4`."""

RULES: tuple[Rule, ...] = get_args(Rule)
"""The first is the default."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element by safetensors dtype."""

FLOATS = ("BF16", "F16", "F32")

Part = Literal["whole", "packed", "scale", "copy"]
"""A copy repeats a weight that is also stored under its own name."""


class StoredTensor(NamedTuple):
    """One tensor as a file must hold it."""

    name: str
    dtype: str
    """What is written."""
    shape: tuple[int, ...]
    shard: int
    """0-based shard in which the published layout places it."""
    component: str
    weight: Weight | None
    """The weight it stores, or None for a carried vision tensor."""
    part: Part = "whole"
    accepts: tuple[str, ...] = ()
    """Dtypes accepted on reading; empty means `dtype` alone."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def readable_dtypes(self) -> tuple[str, ...]:
        """Dtypes a reader takes."""
        return self.accepts or (self.dtype,)


@dataclass(frozen=True)
class Layout:
    """One way of storing the weights of a `ModelConfig`."""

    name: Literal["k3", "kimi-linear", "run"]
    prefix: str
    quantised: bool
    """Whether routed experts are written as MXFP4 unless asked otherwise."""
    any_float: bool
    """Whether a reader takes the float dtype it finds (fp16, bf16, fp32) instead of insisting on the written one."""
    index_digits: int
    """Digits of the shard count in a file name."""

    def decay_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of ``A_log``; the K3 files pad the per-head values with zeros to `head_dim` entries (§4)."""
        heads = config.kda.num_heads
        if self.name == "k3":
            return (max(heads, config.kda.head_dim),)
        return (1, 1, heads, 1) if self.name == "kimi-linear" else (heads,)

    def stored(
        self,
        config: ModelConfig,
        vision: Mapping[str, Any] | None = None,
        *,
        quantised: Callable[[Weight], bool] | bool | None = None,
        dtype: str | None = None,
    ) -> Iterator[StoredTensor]:
        """Yield every tensor the files must hold.

        Args:
            config: the architecture.
            vision: ``vision_config``, when vision tensors are carried.
            quantised: which experts are MXFP4; by default the layout's own choice.
            dtype: safetensors dtype of the weights that are neither fp32 nor quantised; by default BF16.

        Raises:
            ConfigError: an expert's input width is not a multiple of 32 but it should be quantised.
        """
        chosen = self.quantised if quantised is None else quantised
        last = config.num_layers + config.num_nextn_predict_layers
        for weight in weights(config):
            shard = last if weight.layer is None else weight.layer
            packed = weight.role == "expert" and (chosen if isinstance(chosen, bool) else chosen(weight))
            yield from self._packed(weight, shard) if packed else self._whole(config, weight, shard, dtype or "BF16")
        if vision is not None:
            for tensor in vision_tensors(vision, config.hidden_size):
                shard = last + 1 if tensor.component == PROJECTOR else last + 2
                yield StoredTensor(tensor.name, "BF16", tensor.shape, shard, tensor.component, None)

    def _whole(self, config: ModelConfig, weight: Weight, shard: int, dtype: str) -> Iterator[StoredTensor]:
        shape = self.decay_shape(config) if weight.role == "decay" else weight.shape
        written = "F32" if weight.fp32 else dtype
        accepts = FLOATS if self.any_float else ()
        yield StoredTensor(self.prefix + weight.name, written, shape, shard, weight.component, weight, "whole", accepts)

    def _packed(self, weight: Weight, shard: int) -> Iterator[StoredTensor]:
        outputs, inputs = weight.shape
        if inputs % GROUP:
            raise ConfigError(
                f"{weight.name} has {inputs} inputs, which is not a multiple of {GROUP}: MXFP4 cannot hold it; "
                "choose expert widths that are, or write plain experts"
            )
        stem, component = self.prefix + weight.name, weight.component
        yield StoredTensor(f"{stem}_packed", "U8", (outputs, inputs // 2), shard, component, weight, "packed")
        yield StoredTensor(f"{stem}_scale", "U8", (outputs, inputs // GROUP), shard, component, weight, "scale")

    def expected(
        self, config: ModelConfig, vision: Mapping[str, Any] | None, present: Iterable[str]
    ) -> dict[str, StoredTensor]:
        """Return what the files must hold by name, taking each expert as packed or plain by what is *present*."""
        names = set(present)

        def packed(weight: Weight) -> bool:
            stem = self.prefix + weight.name
            if f"{stem}_packed" in names or f"{stem}_scale" in names:
                return True
            return stem not in names and self.quantised

        return {tensor.name: tensor for tensor in self.stored(config, vision, quantised=packed)}

    def repeats(self, config: ModelConfig) -> Iterator[StoredTensor]:
        """Yield what files may hold a second time: head and embedding, which the MTP layer shares with the model.

        Some writers repeat them beside the layer so that it can be loaded alone (model.md §9, checkpoint.md §8.8).
        They are read as copies, never as weights of their own.
        """
        if config.num_nextn_predict_layers == 0:
            return
        layer = config.num_layers
        for weight in weights(config):
            if suffix := _REPEATED.get(weight.name):
                name = f"{self.prefix}model.layers.{layer}.{suffix}"
                yield StoredTensor(name, "BF16", weight.shape, layer, "repeated head and embedding", weight, "copy")

    def shard_count(self, config: ModelConfig, vision: Mapping[str, Any] | None = None) -> int:
        """Shards of the published placement."""
        return config.num_layers + config.num_nextn_predict_layers + 1 + (2 if vision is not None else 0)

    def shard_name(self, shard: int, count: int) -> str:
        """File name of 0-based *shard*."""
        return f"model-{shard + 1:05d}-of-{count:0{self.index_digits}d}.safetensors"

    def alias(self, name: str, config: ModelConfig) -> str:
        """Return the published name of a tensor that a known writer names differently.

        transformers saves the dense layers of Kimi-Linear under ``block_sparse_moe`` instead of ``mlp``.
        """
        match = _DENSE_ALIAS.match(name) if self.name == "kimi-linear" else None
        if match and not config.is_moe(int(match[1])):
            return f"model.layers.{match[1]}.mlp.{match[2]}"
        return name

    def skipped(self, name: str, config: ModelConfig) -> bool:
        """Whether *name* belongs to an MTP layer that the configuration leaves out (checkpoint.md §8.8)."""
        return config.num_nextn_predict_layers == 0 and name.startswith(
            f"{self.prefix}model.layers.{config.num_layers}."
        )


_DENSE_ALIAS = re.compile(r"^model\.layers\.(\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")

_REPEATED = {"lm_head.weight": "shared_head.head.weight", "model.embed_tokens.weight": "embed_tokens.weight"}
"""Name within the MTP layer by the name of the weight it repeats."""

LAYOUTS = {
    "k3": Layout("k3", "language_model.", quantised=True, any_float=False, index_digits=6),
    "kimi-linear": Layout("kimi-linear", "", quantised=False, any_float=True, index_digits=5),
    "run": Layout("run", "", quantised=False, any_float=True, index_digits=5),
}


def layout(name: str) -> Layout:
    """Return the layout called *name*.

    Raises:
        ConfigError: no such layout.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"unknown layout {name!r}{nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def natural_layout(config: ModelConfig) -> Layout:
    """Return the published layout whose family *config* belongs to."""
    return LAYOUTS["k3" if config.attn_res_block_size is not None else "kimi-linear"]


def published_vision(config: ModelConfig) -> dict[str, Any] | None:
    """Return the released vision settings for the text model they belong to, else None."""
    k3 = natural_layout(config).name == "k3" and config.hidden_size == PUBLISHED_VISION["text_hidden_size"]
    return PUBLISHED_VISION if k3 else None


@dataclass(frozen=True)
class Totals:
    """What an index adds up to."""

    tensors: int
    nbytes: int
    elements: int
    """Stored elements; a packed byte counts as one."""
    shards: int
    by_component: dict[str, int]
    """Bytes."""
    shard_bytes: dict[int, int]
    """Bytes by 0-based shard."""


def totals(stored: Iterable[StoredTensor]) -> Totals:
    """Add up *stored* tensors."""
    tensors = nbytes = elements = 0
    components: Counter[str] = Counter()
    shards: Counter[int] = Counter()
    for tensor in stored:
        tensors += 1
        nbytes += tensor.nbytes
        elements += math.prod(tensor.shape)
        components[tensor.component] += tensor.nbytes
        shards[tensor.shard] += tensor.nbytes
    return Totals(tensors, nbytes, elements, len(shards), dict(components), dict(shards))


def index(chosen: Layout, config: ModelConfig, vision: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Generate ``model.safetensors.index.json`` for a configuration."""
    count, total, weight_map = chosen.shard_count(config, vision), 0, {}
    for tensor in chosen.stored(config, vision):
        weight_map[tensor.name] = chosen.shard_name(tensor.shard, count)
        total += tensor.nbytes
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
