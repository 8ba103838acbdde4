"""``torch.compile`` sees every operator as one node of one graph, and computes what eager code does."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from numerics import relative_error
from tercet import ops
from tercet.model import build, to_compute_dtype
from tercet.ops import use_tier
from tercet.presets import preset

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked corners overflow and are thrown away
T = 20
_lengths = itertools.count(T + 1)  # no other test has asked for them


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def kda_inputs():
    return [*(leaf(1, T, 2, 16) for _ in "qkvz"), leaf(1, T, 2), leaf(2), leaf(2, 16)]


def attention_inputs():
    return leaf(1, T, 2, 32), leaf(1, T, 2, 48), leaf(1, T, 16)


CASES = {
    "fused_kda": (lambda *x: ops.fused_kda(*x)[0], kda_inputs),
    "attn_res": (
        lambda a, b, w, q: ops.attn_res([a, b], w, q),
        lambda: [*(leaf(T, 32) for _ in "ab"), leaf(32), leaf(32)],
    ),
    "attn_res_read": (
        lambda a, b, w, q, n: ops.attn_res_read([a, b], w, q, n)[0],
        lambda: [*(leaf(T, 32) for _ in "ab"), *(leaf(32) for _ in "wqn")],
    ),
    "routed_experts": (
        lambda z, p, *w: ops.routed_experts(z, p, torch.tensor([[0, 2]] * 6, device=z.device), *w),
        lambda: [leaf(6, 16), leaf(6, 2), leaf(3, 24, 16), leaf(3, 16, 24), leaf(3, 24, 16)],
    ),
    "route": (lambda x: ops.route(x, torch.zeros(8, device=x.device), top_k=2).weights, lambda: [leaf(6, 8)]),
    "router_logits": (ops.router_logits, lambda: [leaf(6, 32, dtype=torch.bfloat16), leaf(5, 32)]),
    "situ_glu": (ops.situ_glu, lambda: [leaf(6, 16), leaf(6, 16)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, eps=1e-5), lambda: [leaf(6, 16), leaf(16)]),
    "gated_rms_norm": (
        lambda x, g, w: ops.gated_rms_norm(x, g, w, eps=1e-5),
        lambda: [leaf(6, 2, 16), leaf(6, 2, 16), leaf(16)],
    ),
    "short_conv": (lambda x, w: ops.short_conv(x, w, tail=False)[0], lambda: [leaf(1, T, 32), leaf(32, 1, 4)]),
    "mla_attention": (lambda *x: ops.mla_attention(*x, scale=0.2)[0], attention_inputs),
    "sigmoid_gate": (lambda o, g: ops.sigmoid_gate(o, g, dtype=o.dtype), lambda: [leaf(1, T, 2, 16), leaf(1, T, 32)]),
    "linear_cross_entropy": (
        lambda x, w: ops.linear_cross_entropy(x, w, torch.arange(6, device=x.device), torch.ones_like(x[:, 0]))[0],
        lambda: [leaf(6, 16), leaf(40, 16)],
    ),
    "token_logprobs": (
        lambda x, w: ops.token_logprobs(x, w, torch.arange(6, device=x.device))[0],
        lambda: [leaf(6, 16), leaf(40, 16)],
    ),
    "project": (lambda x, a, b: ops.project(x, [a, b])[0], lambda: [leaf(6, 16), leaf(8, 16), leaf(4, 16)]),
    "merge": (
        lambda x, y, a, b: ops.merge([x, y], [a, b]),
        lambda: [leaf(6, 16), leaf(6, 8), leaf(4, 16), leaf(4, 8)],
    ),
}


def outputs(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True)]


def agree(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is b is None) or relative_error(a, b) < 1e-6


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_one_operator_in_one_graph(name):
    function, make = CASES[name]
    inputs, nodes = make(), []

    def watched(graph, example):
        nodes.extend(str(node.target) for node in graph.graph.nodes if "tercet" in str(node.target))
        return graph

    with use_tier("triton"):
        agree(outputs(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs), outputs(function, inputs))
        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=watched)(*inputs)
    assert len(nodes) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_torch_tier_compiles(name):
    function, make = CASES[name]
    inputs = make()
    with use_tier("torch"):
        agree(outputs(torch.compile(function, backend="aot_eager"), inputs), outputs(function, inputs))


@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda bounds, *x: ops.fused_kda(*x, cu_seqlens=bounds)[0], kda_inputs),
        (lambda bounds, *x: ops.mla_attention(*x, scale=0.2, cu_seqlens=bounds)[0], attention_inputs),
        (lambda bounds, *x: ops.short_conv(*x, cu_seqlens=bounds)[0], lambda: [leaf(1, T, 32), leaf(32, 1, 4)]),
    ],
    ids=["fused_kda", "mla_attention", "short_conv"],
)
def test_packings_that_change(function, make, tier):
    """Bounds are read on the host, which breaks the graph; the next packing must not meet the one before."""
    inputs = make()
    with use_tier(tier):
        compiled = torch.compile(function, backend="aot_eager")
        for bounds in ([0, 8, 20], [0, 3, 9, 20], [0, 8, 20], [0, 1, 1, 20]):
            bounds = torch.tensor(bounds, dtype=torch.int32, device="cpu")
            agree(outputs(partial(compiled, bounds), inputs), outputs(partial(function, bounds), inputs))


def test_a_forced_tier_is_part_of_what_was_compiled():
    inputs, nodes = [leaf(6, 16), leaf(16)], []

    def watched(graph, example):
        nodes.append(sum("tercet" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(CASES["rms_norm"][0], fullgraph=True, backend=watched)
    for tier in ("triton", "reference", "triton"):
        with use_tier(tier):
            compiled(*inputs)
    assert nodes == [1, 0]


@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("name", ["fused_kda", "mla_attention", "short_conv"])
@pytest.mark.parametrize("first", [torch.inference_mode, FakeTensorMode], ids=["inference", "fake"])
def test_what_was_asked_for_first_leaves_no_trace(name, tier, first, monkeypatch):
    """Tables that are kept are real tensors which training can use, whoever asked for them first."""
    monkeypatch.setitem(globals(), "T", next(_lengths))
    function, make = CASES[name]
    inputs = make()
    with use_tier(tier if first is torch.inference_mode else "torch"), first() as mode, torch.no_grad():
        function(*(inputs if mode is None else map(mode.from_tensor, inputs)))
    with use_tier(tier):
        agree(outputs(function, inputs), outputs(function, inputs))


def test_a_whole_model_is_one_graph():
    """A KDA and an MLA layer with routed experts and the loss, in bf16, which the interpreter truncates to."""
    config = preset("tiny").model
    config = replace(
        config,
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        full_attention_layers=(1,),
        first_dense_layers=0,
        kda=replace(config.kda, num_heads=2, head_dim=16),
        mla=replace(config.mla, num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, v_head_dim=16),
        moe=replace(config.moe, num_experts=4, intermediate_size=16, latent_size=16),
    )
    model = build(config, seed=0, device=torch.get_default_device())
    to_compute_dtype(model, torch.bfloat16)
    tokens, parameters = torch.randint(64, (1, 17)), list(model.parameters())

    def loss(tokens):
        rows = model.features(tokens[:, :-1]).hidden.flatten(0, 1)
        return ops.linear_cross_entropy(rows, model.lm_head.weight, tokens[0, 1:], torch.ones(16))[0]

    with use_tier("triton"):
        compiled, plain = torch.compile(loss, fullgraph=True, backend="aot_eager")(tokens), loss(tokens)
        assert torch.equal(compiled, plain)
        grads = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (compiled, plain))
        for (name, _), a, b in zip(model.named_parameters(), *grads):
            assert (a is b is None) or relative_error(a, b) < 3e-2, name
