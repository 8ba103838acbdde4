"""Pure functions on tensors. Each operator is a folder: ``reference`` is the formula, ``torch_`` the vectorised form,
``triton_`` the GPU kernels; the folder's ``__init__`` checks shapes and holds the one public entry point.
"""

from tercet.ops.accumulate import accumulate
from tercet.ops.attention import attention_logit_max, mla_attention
from tercet.ops.attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_read, attn_res_weights
from tercet.ops.conv import short_conv
from tercet.ops.cross_entropy import IGNORE, linear_cross_entropy, token_logprobs
from tercet.ops.experts import routed_experts
from tercet.ops.gate import kda_gate, sigmoid_gate
from tercet.ops.glu import situ_glu, swiglu
from tercet.ops.kda import (
    fused_kda,
    fused_kda_adjoint,
    fused_kda_export,
    fused_kda_fold,
    join_folds,
    kda,
    kda_decode,
)
from tercet.ops.newton_schulz import newton_schulz
from tercet.ops.norm import gated_rms_norm, l2_norm, rms_norm
from tercet.ops.project import merge, project
from tercet.ops.registry import OPERATORS, Tier, use_tier
from tercet.ops.router import Routing, route, router_logits
from tercet.ops.router.counts import count_choices, count_needed

__all__ = [
    "IGNORE",
    "OPERATORS",
    "Routing",
    "Tier",
    "accumulate",
    "attention_logit_max",
    "attn_res",
    "attn_res_bank",
    "attn_res_merge",
    "attn_res_read",
    "attn_res_weights",
    "count_choices",
    "count_needed",
    "fused_kda",
    "fused_kda_adjoint",
    "fused_kda_export",
    "fused_kda_fold",
    "gated_rms_norm",
    "join_folds",
    "kda",
    "kda_decode",
    "kda_gate",
    "l2_norm",
    "linear_cross_entropy",
    "merge",
    "mla_attention",
    "newton_schulz",
    "project",
    "rms_norm",
    "route",
    "routed_experts",
    "router_logits",
    "short_conv",
    "sigmoid_gate",
    "situ_glu",
    "swiglu",
    "token_logprobs",
    "use_tier",
]
