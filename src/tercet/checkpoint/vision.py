"""Names and shapes of the vision tensors (checkpoint.md §3, vision.md §1).

The text room carries them without looking inside: they are verified, copied and counted, never computed with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tercet.errors import ConfigError

PUBLISHED_VISION: dict[str, Any] = {
    "patch_size": 14,
    "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "vt_intermediate_size": 4096,
    "qkv_hidden_size": 1536,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "activation_func": "gelu_pytorch_tanh",
    "mlp_type": "mlp2",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "merge_kernel_size": [2, 2],
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 1024,
    "text_hidden_size": 7168,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}
"""``vision_config`` of the released model."""

TOWER, PROJECTOR = "vision tower", "vision projector"


class VisionTensor(NamedTuple):
    """One carried tensor; vision tensors are bfloat16."""

    name: str
    shape: tuple[int, ...]
    component: str

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def miniature_vision(text_hidden_size: int) -> dict[str, Any]:
    """Return a small ``vision_config`` with the published structure."""
    small = {
        "vt_hidden_size": 32,
        "vt_num_hidden_layers": 2,
        "vt_num_attention_heads": 2,
        "vt_intermediate_size": 64,
        "qkv_hidden_size": 48,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "mm_hidden_size": 32,
        "text_hidden_size": text_hidden_size,
    }
    return {**PUBLISHED_VISION, **small}


def _size(vision: Mapping[str, Any], key: str, limit: int = 2**31) -> int:
    value = vision.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
        raise ConfigError(f"vision_config.{key} must be a positive number below {limit:,}, got {str(value)[:80]}")
    return value


def vision_tensors(vision: Mapping[str, Any], text_hidden_size: int) -> Iterator[VisionTensor]:
    """Yield projector then tower.

    Raises:
        ConfigError: a size is missing, or the projector does not end at the text model's width.
    """
    hidden, qkv = _size(vision, "vt_hidden_size"), _size(vision, "qkv_hidden_size")
    inner, patch = _size(vision, "vt_intermediate_size"), _size(vision, "patch_size")
    merge = vision.get("merge_kernel_size")
    if not isinstance(merge, list | tuple) or len(merge) != 2 or not all(isinstance(n, int) and n > 0 for n in merge):
        raise ConfigError(f"vision_config.merge_kernel_size must be two positive numbers, got {merge!r}")
    text = vision.get("text_hidden_size", text_hidden_size)
    if text != text_hidden_size:
        raise ConfigError(f"vision_config.text_hidden_size is {text!r}, but the text model is {text_hidden_size} wide")
    merged = hidden * merge[0] * merge[1]
    yield VisionTensor("mm_projector.proj.0.weight", (merged, merged), PROJECTOR)
    yield VisionTensor("mm_projector.proj.2.weight", (text_hidden_size, merged), PROJECTOR)
    yield VisionTensor("mm_projector.post_norm.weight", (text_hidden_size,), PROJECTOR)
    height, width = _size(vision, "init_pos_emb_height"), _size(vision, "init_pos_emb_width")
    yield VisionTensor("vision_tower.patch_embed.proj.weight", (hidden, 3, patch, patch), TOWER)
    yield VisionTensor("vision_tower.patch_embed.pos_emb.weight", (height, width, hidden), TOWER)
    for block in range(_size(vision, "vt_num_hidden_layers", limit=10_000)):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield VisionTensor(f"{prefix}norm0.weight", (hidden,), TOWER)
        yield VisionTensor(f"{prefix}norm1.weight", (hidden,), TOWER)
        yield VisionTensor(f"{prefix}wqkv.weight", (3 * qkv, hidden), TOWER)
        yield VisionTensor(f"{prefix}wo.weight", (hidden, qkv), TOWER)
        yield VisionTensor(f"{prefix}mlp.fc0.weight", (inner, hidden), TOWER)
        yield VisionTensor(f"{prefix}mlp.fc1.weight", (hidden, inner), TOWER)
    yield VisionTensor("vision_tower.encoder.final_layernorm.weight", (hidden,), TOWER)
