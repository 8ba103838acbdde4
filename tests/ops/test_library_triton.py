"""Every kernel is one registered operator: schema, shapes for tracing, and autograd agree with what it does."""

import pytest
import torch

pytest.importorskip("triton")

from tercet.ops.attention import triton_ as attention
from tercet.ops.attn_res import triton_ as attn_res
from tercet.ops.conv import triton_ as conv
from tercet.ops.cross_entropy import triton_ as cross_entropy
from tercet.ops.experts import triton_ as experts
from tercet.ops.gate import triton_ as gate
from tercet.ops.glu import triton_ as glu
from tercet.ops.newton_schulz import triton_ as newton_schulz
from tercet.ops.norm import triton_ as norm
from tercet.ops.project import gpu as project
from tercet.ops.project import merge_gpu
from tercet.ops.router import triton_ as router
from tercet.ops.router import triton_choices, triton_needed
from tercet.ops.router import triton_logits as router_logits


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def expert_inputs():
    matrices = [leaf(3, *s) for s in ((4, 6), (6, 4), (4, 6))]
    return leaf(5, 6), leaf(5, 2), torch.randint(3, (5, 2)), *matrices, True, 4.0, 25.0


def attention_inputs():
    q, kv, k_pe = leaf(1, 5, 2, 32), leaf(1, 5, 2, 48), leaf(1, 5, 16)
    return q, kv, k_pe, 0.3, [2, 3]


CASES = {
    "mla_attention": (attention._forward, attention_inputs),
    "sigmoid_gate": (gate._gate, lambda: (leaf(1, 3, 2, 4), leaf(1, 3, 8), torch.float32)),
    "attn_res": (attn_res._forward, lambda: ([leaf(2, 8), leaf(2, 8)], leaf(8), leaf(8), None, 1e-5, 0.0)),
    "attn_res_read": (attn_res._forward, lambda: ([leaf(2, 8), leaf(2, 8)], leaf(8), leaf(8), leaf(8), 1e-5, 1e-5)),
    "newton_schulz": (newton_schulz._newton_schulz, lambda: (torch.randn(1, 4, 8), [3.0, -4.0, 2.0])),
    "cross_entropy": (
        cross_entropy._cross_entropy,
        lambda: (leaf(4, 8), leaf(9, 8), torch.randint(9, (4,)), torch.ones(4), True, True),
    ),
    "token_logprobs": (cross_entropy._logprobs, lambda: (leaf(4, 8), leaf(9, 8), torch.randint(9, (4,)), 0.7)),
    "routed_experts": (experts._forward, expert_inputs),
    "route": (router._forward, lambda: (leaf(3, 7), torch.zeros(7), 2, True, 1.0)),
    "router_logits": (router_logits._forward, lambda: (leaf(3, 8).detach().bfloat16().requires_grad_(), leaf(5, 8))),
    "count_choices": (
        triton_choices._count,
        lambda: (torch.zeros(4, dtype=torch.int64), torch.randint(4, (5, 2)), torch.rand(5) > 0.5),
    ),
    "count_needed": (
        triton_needed._count,
        lambda: (torch.zeros(4, 9, dtype=torch.int32), torch.rand(5, 4), torch.rand(5), *torch.rand(2), None),
    ),
    "situ_glu": (glu._situ, lambda: (leaf(6), leaf(6), 4.0, 25.0)),
    "rms_norm": (norm._forward, lambda: (leaf(3, 8), leaf(3, 8), leaf(8), 1e-5)),
    "project": (project._forward, lambda: (leaf(3, 5), [leaf(4, 5), leaf(2, 5)])),
    "merge": (merge_gpu._forward, lambda: ([leaf(3, 5), leaf(3, 2)], [leaf(4, 5), leaf(4, 2)])),
    "short_conv": (
        conv._forward,
        lambda: (leaf(5, 6), leaf(6, 1, 4), None, [2, 3]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_registration(name):
    operator, inputs = CASES[name]
    torch.library.opcheck(
        operator.registered._opoverload,
        inputs(),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
