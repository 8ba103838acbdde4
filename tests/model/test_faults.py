"""Rows of the list of public faults that need no checkpoint and no kernel: interfaces between layers, states, taps."""

import pytest
import torch
from test_model import draw, model_of, weights_of

from formulas import k3_miniature, kimi_linear_miniature, mixture
from numerics import relative_error
from tercet.model import Context, build, new_states
from tercet.model.decoder import Depth
from tercet.ops import kda, kda_gate, routed_experts, use_tier


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_M4_the_interface_carries_the_logarithm_of_the_decay(tier):
    """One token that writes nothing leaves e^g of the state; a decay handed over as a factor makes the state grow."""
    g = kda_gate(torch.randn(1, 1, 2, 4), torch.randn(2), torch.randn(2, 4), lower_bound=-5.0).double()
    assert (g <= 0).all()
    state = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    nothing = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    values, write = torch.zeros(1, 1, 2, 3, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64)
    with use_tier(tier):
        _, left = kda(nothing, nothing, values, g, write, state=state)
    assert relative_error(left, state * g[:, 0, :, None].exp()) < 1e-14
    _, mistaken = kda(nothing, nothing, values, g.exp(), write, state=state)
    assert (mistaken.abs() > state.abs()).all()  # a state that grows with every token


@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_M7_weights_and_sum_of_experts_keep_their_fp32_digits(tier):
    """Outputs 256 and −256 under weights 0.3333 and 0.3334: what is left, −0.0256, is below bf16's digits."""
    z = torch.ones(1, 4, dtype=torch.bfloat16)
    w1 = torch.full((2, 1, 4), 8.0, dtype=torch.bfloat16)  # silu(32) = 32
    w3 = torch.full((2, 1, 4), 2.0, dtype=torch.bfloat16)  # · 8
    w2 = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)[:, None, None].expand(2, 4, 1).contiguous()
    weights = torch.tensor([[0.3333, 0.3334]])
    with use_tier(tier):
        y = routed_experts(z, weights, torch.tensor([[0, 1]]), w1, w2, w3, activation="silu")
    assert y.dtype is torch.bfloat16
    expected = 256 * (weights[0, 0].double() - weights[0, 1].double())
    assert (y.double() - expected).abs().max() < 2**-8 * abs(expected)


def test_M9_payload_of_a_pipeline_boundary():
    """(1 + slots) · H values a token, another number at every boundary: 4 · H and 7 · H for K3 in three stages."""
    config = k3_miniature(num_layers=93, attn_res_block_size=12, full_attention_layers=(92,), first_dense_layers=93)
    model, widths = build(config), {}

    def count(module: torch.nn.Module, inputs: tuple[Depth, Context], output: Depth) -> None:
        widths[module.layer + 1] = sum(tensor.shape[-1] for tensor in [*output.bank, output.prefix])

    for layer in model.model.layers:
        layer.register_forward_hook(count)
    with torch.no_grad():
        model(draw(config, 1, 1))
    assert (widths[31], widths[62]) == (4 * config.hidden_size, 7 * config.hidden_size)
    assert widths == {n: (2 + (n - 1) // 12) * config.hidden_size for n in range(1, 94)}


def test_M9_a_stage_needs_nothing_but_the_payload():
    """Layers cut into three stages, only prefix and bank handed over, give the same logits."""
    config = k3_miniature()
    model, tokens = model_of(config), draw(config, 1, 7)
    context, backbone = Context(), model.model
    with torch.no_grad():
        depth = Depth([], backbone.embed_tokens(tokens))
        for stage in ((0, 1), (2, 3), (4, 5)):
            depth = Depth([tensor.clone() for tensor in depth.bank], depth.prefix.clone())
            for layer in stage:
                depth = backbone.layers[layer](depth, context)
        sources = torch.stack([*depth.bank, depth.prefix])
        assert len(sources) == 4
        expected = model.features(tokens).mixture
        lost = Depth(depth.bank[1:], depth.prefix)
        again, short = (finish(backbone, d) for d in (depth, lost))
    assert torch.equal(again, expected)
    assert relative_error(short, expected) > 1e-3


def finish(backbone: torch.nn.Module, depth: Depth) -> torch.Tensor:
    from tercet.model.decoder import mix

    norm, proj = backbone.output_attn_res_norm, backbone.output_attn_res_proj
    return mix(depth, norm, proj, backbone.config.num_layers, "output", Context())


def test_M10_a_drafter_reads_the_mixture_and_not_the_prefix():
    """The tap is the output mix before the final norm; the running prefix has the same shape and other values."""
    config = k3_miniature(num_nextn_predict_layers=1)
    model, tokens, prefixes = model_of(config), draw(config, 1, 9), []
    last = model.model.layers[config.num_layers - 1]
    last.register_forward_hook(lambda module, inputs, output: prefixes.append(output.prefix))
    with torch.no_grad():
        features = model.features(tokens)
        assert relative_error(features.mixture[0], mixture(weights_of(model), config, tokens[0])) < 1e-12
        assert torch.equal(features.hidden, model.model.norm(features.mixture))
        assert prefixes[0].shape == features.mixture.shape
        assert relative_error(prefixes[0], features.mixture) > 1e-2
        right, wrong = (model.mtp_hidden(rows[:, :-1], tokens[:, 1:]) for rows in (features.mixture, prefixes[0]))
    assert relative_error(wrong, right) > 1e-2


@pytest.mark.parametrize("make", [k3_miniature, kimi_linear_miniature])
@pytest.mark.parametrize("way", ["replay", "whole"])
def test_M22_every_accepted_length_restores_matrix_window_and_cache(make, way):
    """Draft five tokens from a snapshot, keep 0 … 5: the state is that of a model that never saw the others.

    The draft holds more tokens than the convolution has taps, so both a window half from the prompt and one wholly
    from the draft occur. Restoring the matrix without the window must show.
    """
    config = make()
    model, prompt, draft = model_of(config), draw(config, 1, 6), draw(config, 1, 5)
    probe = draw(config, 1, 3)

    def after(*pieces: torch.Tensor) -> tuple[list, torch.Tensor]:
        states = new_states(config, 1, dtype=torch.float64)
        for piece in pieces:
            if piece.shape[1]:
                model(piece, Context(states=states))
        return states, model(probe, Context(states=states))

    with torch.no_grad():
        for accepted in range(6):
            states = new_states(config, 1, dtype=torch.float64)
            model(prompt, Context(states=states))
            saved = [state.snapshot() for state in states]
            model(draft, Context(states=states))
            for state, old in zip(states, saved):
                state.restore(old)
            kept = draft[:, :accepted]
            pieces = kept.split(1, 1) if way == "replay" else [kept]
            for piece in pieces:
                if piece.shape[1]:
                    model(piece, Context(states=states))
            expected_states, expected = after(prompt, kept)
            assert relative_error(model(probe, Context(states=states)), expected) < 1e-11
            for state, other in zip(states, expected_states):
                for a, b in zip(*(contents(s) for s in (state, other))):
                    assert relative_error(a, b) < 1e-11


def contents(state: object) -> list[torch.Tensor]:
    if hasattr(state, "conv"):
        return [state.conv, state.recurrent]
    return [state.buffer[n, :length] for n, length in enumerate(state.lengths)]


def test_M22_a_window_left_behind_shows():
    """The fault itself: matrix and cache restored, the convolution's window not."""
    config = k3_miniature()
    model, prompt, draft, probe = model_of(config), *(draw(config, 1, n) for n in (6, 5, 3))
    states = new_states(config, 1, dtype=torch.float64)
    with torch.no_grad():
        model(prompt, Context(states=states))
        saved = [state.snapshot() for state in states]
        right = model(probe, Context(states=[state.snapshot() for state in saved]))
        model(draft, Context(states=states))
        for state, old in zip(states, saved):
            window = getattr(state, "conv", None)
            state.restore(old)
            if window is not None:
                state.conv = window
        assert relative_error(model(probe, Context(states=states)), right) > 1e-3
