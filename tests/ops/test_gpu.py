"""On a CUDA device only: more than 2³¹ elements, where a 32-bit offset would wrap (kernels.md §1–§9).

Each operator runs on rows so many that the last ones lie past 2³¹ elements, and must give there what it gives for those
rows alone. `make test-gpu` runs this file and all kernel tests on the device.
"""

import pytest
import torch

from tercet.ops import (
    attn_res_read,
    fused_kda,
    gated_rms_norm,
    linear_cross_entropy,
    mla_attention,
    rms_norm,
    routed_experts,
    short_conv,
    sigmoid_gate,
    situ_glu,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMIT = 2**31
WIDTH = 4096
ROWS = LIMIT // WIDTH + 100
TAIL = 64


def rows(width=WIDTH, count=ROWS, scale=1.0):
    """Zeros but for the last rows: cheap to make, and a wrapped offset would read zeros or write elsewhere."""
    x = torch.zeros(count, width, dtype=torch.bfloat16, device="cuda")
    x[-TAIL:] = (scale * torch.randn(TAIL, width, device="cuda")).bfloat16()
    return x


def assert_tail(run, inputs, parameters=()):
    """Compare outputs and row gradients at the end with the same rows on their own; bit for bit."""
    results = []
    for cut in (inputs, [x[-TAIL:].contiguous() for x in inputs]):
        leaves = [x.detach().requires_grad_() for x in cut]
        y = run(*leaves, *parameters)
        pull = torch.ones_like(y)
        grads = torch.autograd.grad(y, leaves, pull)
        results.append([y.detach()[-TAIL:].clone(), *(g[-TAIL:].clone() for g in grads)])
        del y, pull, grads
    for large, small in zip(*results):
        assert torch.equal(large, small)


def test_element_wise():
    assert_tail(situ_glu, [rows(), rows()])
    heads = WIDTH // 128
    assert_tail(
        lambda o, g: sigmoid_gate(o.view(1, -1, heads, 128), g[None], dtype=torch.bfloat16).view_as(g),
        [rows(), rows()],
    )


def test_norms():
    weight = torch.randn(WIDTH, device="cuda").bfloat16()
    assert_tail(lambda x, w: rms_norm(x, w, eps=1e-5), [rows()], [weight])
    assert_tail(lambda x, g, w: gated_rms_norm(x, g, w, eps=1e-5), [rows(), rows()], [weight])


def test_attention_residuals():
    parameters = [torch.randn(WIDTH, device="cuda").bfloat16() for _ in range(3)]
    assert_tail(lambda a, b, *p: attn_res_read([a, b], *p)[0], [rows(), rows()], parameters)


def test_convolution():
    weight = torch.randn(WIDTH, 1, 4, device="cuda")
    bounds = torch.tensor([0, ROWS - TAIL, ROWS])

    def run(x, w):
        return short_conv(x[None], w, cu_seqlens=bounds if len(x) == ROWS else None, tail=False)[0][0]

    assert_tail(run, [rows()], [weight])


def test_kda():
    heads, width = 64, 128
    tokens = LIMIT // (heads * width) + 100
    bounds = torch.tensor([0, tokens - TAIL, tokens])

    def draw():
        return rows(heads * width, tokens).view(1, tokens, heads, width)

    q, k, v, z = (draw() for _ in range(4))
    b = torch.randn(1, tokens, heads, device="cuda").bfloat16()
    gate = torch.zeros(heads, device="cuda"), torch.zeros(heads, width, device="cuda")
    results = []
    for cut, cu in ((slice(None), bounds), (slice(tokens - TAIL, None), None)):
        leaves = [x[:, cut].detach().contiguous().requires_grad_() for x in (q, k, v, z, b)]
        o, _ = fused_kda(*leaves, *gate, cu_seqlens=cu)
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
        results.append([x[:, -TAIL:].detach().clone() for x in (o, *grads)])
        del o, grads, leaves
    for large, small in zip(*results):
        assert torch.equal(large, small)


def test_attention():
    heads, tokens = 96, LIMIT // (96 * 192) + 100
    bounds = torch.tensor([0, *range((tokens - TAIL) % 512, tokens - TAIL + 1, 512), tokens])
    inputs = [rows(heads * width, tokens).view(1, tokens, heads, width) for width in (192, 256)]
    inputs.append(rows(64, tokens)[None])
    results = []
    for cut, cu in ((slice(None), bounds), (slice(tokens - TAIL, None), None)):
        leaves = [x[:, cut].detach().contiguous().requires_grad_() for x in inputs]
        o, row_max = mla_attention(*leaves, scale=0.07, cu_seqlens=cu)
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
        results.append([row_max[:, -TAIL:].clone(), *(x[:, -TAIL:].detach().clone() for x in (o, *grads))])
        del o, grads, leaves
    for large, small in zip(*results):
        assert torch.equal(large, small)


def test_experts():
    experts, width, inner, chosen = 8, 2048, 512, 2
    tokens = LIMIT // (width * chosen) + 4000
    z = rows(width, tokens)
    choice = torch.arange(tokens * chosen, device="cuda").view(tokens, chosen) % experts
    p = torch.full((tokens, chosen), 0.5, device="cuda")
    w1, w3 = (0.05 * torch.randn(experts, inner, width, device="cuda").bfloat16() for _ in range(2))
    w2 = 0.05 * torch.randn(experts, width, inner, device="cuda").bfloat16()

    def run(z, p, choice):
        return routed_experts(z, p, choice, w1, w2, w3, activation="situ", beta=4.0, linear_beta=25.0)

    whole = run(z, p, choice)[-TAIL:]
    alone = run(z[-TAIL:].contiguous(), p[-TAIL:], choice[-TAIL:])
    assert float((whole.float() - alone.float()).norm() / alone.float().norm()) < 5e-3  # tiles may differ in shape


def test_cross_entropy():
    vocabulary, width = 163_840, 64
    tokens = LIMIT // vocabulary + 2000
    x = rows(width, tokens, scale=3.0)
    head = torch.randn(vocabulary, width, device="cuda").bfloat16()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    _, losses = linear_cross_entropy(x, head, targets, torch.ones(tokens, device="cuda"))
    _, alone = linear_cross_entropy(x[-TAIL:].contiguous(), head, targets[-TAIL:], torch.ones(TAIL, device="cuda"))
    assert torch.allclose(losses[-TAIL:], alone, rtol=1e-6)
