"""Who is optimised by what: the one table that answers for every parameter (training.md §1.1).

A parameter belongs to a group, and a Muon parameter is further cut into the matrices that are orthogonalised apart:
one per attention head of Q, K and V, one per expert, one per projection where two projections share a tensor. The table
goes by published name, never by shape, and refuses a name that it does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tercet.config import ModelConfig
from tercet.errors import ConfigError

Group = Literal["muon", "adamw", "adamw_no_decay"]
GROUPS: tuple[Group, ...] = ("muon", "adamw", "adamw_no_decay")


class View(NamedTuple):
    """Equal 2-D blocks of a parameter, cut by rows.

    The parameter, flattened to ``[rows, cols]``, is *strips* strips of equal height; of every strip the rows
    ``[first, last)`` are taken, and *joined* neighbouring strips make one block.
    """

    strips: int
    first: int
    last: int
    joined: int = 1

    @property
    def blocks(self) -> int:
        """How many blocks the view has."""
        return self.strips // self.joined

    @property
    def rows(self) -> int:
        """Rows of one block."""
        return self.joined * (self.last - self.first)

    def of(self, parameter: Float[Tensor, "*shape cols"]) -> Float[Tensor, "blocks joined taken cols"]:
        """Return the blocks as a strided view that shares the parameter's memory."""
        cols = parameter.shape[-1]
        return parameter.view(self.blocks, self.joined, -1, cols)[:, :, self.first : self.last]

    def row_slices(self, rows: int) -> list[list[slice]]:
        """List for every block its slices into the *rows* rows of the flattened parameter."""
        height = rows // self.strips
        return [
            [
                slice(strip * height + self.first, strip * height + self.last)
                for strip in range(b * self.joined, (b + 1) * self.joined)
            ]
            for b in range(self.blocks)
        ]


@dataclass(frozen=True)
class Assignment:
    """What the table says of one parameter."""

    group: Group
    views: tuple[View, ...] = ()
    """Blocks to orthogonalise; together they cover every row once. Empty outside Muon."""


_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")

_WHOLE = frozenset(
    [
        *(f"self_attn.{name}.weight" for name in ("o_proj", "g_proj", "g_a_proj", "g_b_proj")),
        *(f"self_attn.{name}.weight" for name in ("f_a_proj", "f_b_proj", "q_a_proj")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        *(f"block_sparse_moe.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        "block_sparse_moe.routed_expert_down_proj.weight",
        "block_sparse_moe.routed_expert_up_proj.weight",
        "block_sparse_moe.gate.weight",
        "eh_proj.weight",
    ]
)
"""Layer parameters that Muon takes as one matrix."""

_EXPERTS = frozenset(f"block_sparse_moe.experts.{name}" for name in ("w1", "w2", "w3"))

_ADAMW = frozenset(
    [
        # A head owns one row of the write strength; orthogonalising the rows together would couple the heads.
        "self_attn.b_proj.weight",
        *(f"self_attn.{name}_conv1d.weight" for name in "qkv"),
        *(f"self_attn.{name}.weight" for name in ("o_norm", "q_a_layernorm", "kv_a_layernorm")),
        *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm")),
        *(f"{place}_res_{part}.weight" for place in ("self_attention", "mlp") for part in ("norm", "proj")),
        "block_sparse_moe.routed_expert_norm.weight",
        "shared_head.norm.weight",
    ]
)
_NO_DECAY = frozenset(["self_attn.A_log", "self_attn.dt_bias"])

_ADAMW_OUTSIDE = frozenset(
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.output_attn_res_norm.weight",
        "model.output_attn_res_proj.weight",
        "lm_head.weight",
    ]
)
"""AdamW parameters outside the decoder layers. Embedding and head are never Muon's (Moonlight §2.2)."""


def assign(name: str, shape: tuple[int, ...], config: ModelConfig, *, head_group: int = 1) -> Assignment:
    """Return the group of parameter *name* and, under Muon, its blocks.

    Args:
        name: the parameter's name in the model; experts under their stacked name ``…experts.w1``.
        shape: its shape.
        config: gives the head counts and widths.
        head_group: heads of Q, K and V orthogonalised together; 1 is K3, 0 takes all of them.

    Raises:
        ConfigError: the table does not know the name, or *head_group* does not divide the number of heads.
    """
    if name in _ADAMW_OUTSIDE:
        return Assignment("adamw")
    match = _LAYER.match(name)
    if match and int(match[1]) < config.num_layers + config.num_nextn_predict_layers:
        layer, rest = int(match[1]), match[2]
        if rest in _NO_DECAY:
            return Assignment("adamw_no_decay")
        if rest in _ADAMW:
            return Assignment("adamw")
        if rest in _WHOLE:
            return Assignment("muon", (View(1, 0, shape[0]),))
        if rest in _EXPERTS:
            return Assignment("muon", (View(shape[0], 0, shape[1]),))
        views = _attention_views(rest, _is_mla(layer, config), config, head_group)
        if views:
            return Assignment("muon", views)
    raise ConfigError(
        f"no optimiser is assigned to parameter {name!r} {list(shape)}; "
        "add it to the table in tercet.train.groups (nothing is guessed from shapes)"
    )


def _is_mla(layer: int, config: ModelConfig) -> bool:
    """Whether *layer* attends through MLA; the multi-token-prediction layer always does."""
    return layer >= config.num_layers or config.is_mla(layer)


def _attention_views(rest: str, is_mla: bool, config: ModelConfig, head_group: int) -> tuple[View, ...]:
    """Blocks of the projections that are cut along heads, or at the seam of two fused projections."""
    kda, mla = config.kda, config.mla
    if not is_mla:
        if rest in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            return (View(kda.num_heads, 0, kda.head_dim, _joined(kda.num_heads, head_group)),)
        return ()
    joined = _joined(mla.num_heads, head_group)
    if rest in ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight"):
        return (View(mla.num_heads, 0, mla.qk_head_dim, joined),)
    if rest == "self_attn.kv_b_proj.weight":
        keys, height = mla.qk_nope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
        return View(mla.num_heads, 0, keys, joined), View(mla.num_heads, keys, height, joined)
    if rest == "self_attn.kv_a_proj_with_mqa.weight":
        return View(1, 0, mla.kv_lora_rank), View(1, mla.kv_lora_rank, mla.cache_width)
    return ()


def _joined(heads: int, head_group: int) -> int:
    """How many heads make one block."""
    joined = head_group or heads
    if joined < 0 or heads % joined:
        raise ConfigError(
            f"optim.muon.head_group is {head_group}; it must divide the number of heads ({heads}), or be 0 for all"
        )
    return joined
