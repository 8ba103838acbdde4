"""The whole model against the formulas, and against itself: packed, cached, split, recomputed, cast."""

import itertools

import pytest
import torch

from formulas import k3_miniature, kimi_linear_miniature, logits, mixture, mtp_rows
from numerics import relative_error
from tercet.errors import ShapeError
from tercet.model import CausalLM, Context, Observer, build, new_states, to_compute_dtype
from tercet.model.layers import MLP
from tercet.model.names import published_tensors
from tercet.ops import use_tier

CONFIGS = pytest.mark.parametrize("make", [k3_miniature, kimi_linear_miniature])


def model_of(config, seed: int = 3) -> CausalLM:
    """Build in fp64 with nothing left at a special value: queries, norms, biases and slopes all random."""
    model = build(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.ndim == 1 or name.endswith("_res_proj.weight"):
                x += 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return model


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    return dict(published_tensors(model))


def bounds(lengths) -> torch.Tensor:
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def draw(config, *shape: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape)


@CONFIGS
@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_equals_the_formulas(make, tier):
    config = make()
    model, tokens = model_of(config), draw(make(), 1, 19)
    with torch.no_grad(), use_tier(tier):
        ours = model(tokens)[0]
    assert relative_error(ours, logits(weights_of(model), config, tokens[0])) < 1e-11


@CONFIGS
def test_all_gradients_equal_those_of_the_formulas(make):
    config = make()
    model, tokens = model_of(config), draw(config, 1, 11)
    parameters = dict(model.named_parameters())
    cotangent = torch.randn(11, config.vocab_size, dtype=torch.float64)

    def gradients(y):
        return torch.autograd.grad((y * cotangent).sum(), list(parameters.values()), allow_unused=True)

    ours = gradients(model(tokens)[0])
    formula = gradients(logits(weights_of(model), config, tokens[0]))
    unused = {name for name, d in zip(parameters, formula) if d is None}
    expected = {f"model.layers.0.self_attention_res_{p}.weight" for p in ("norm", "proj")}
    assert unused == (expected if config.attn_res_block_size else set())
    for name, d, reference in zip(parameters, ours, formula):
        if reference is None:
            assert d is None, name
        else:
            assert relative_error(d, reference) < 1e-9, name


@CONFIGS
def test_fp32_bound(make):
    config = make()
    model, tokens = model_of(config), draw(config, 1, 70)
    with torch.no_grad():
        exact = model(tokens)
        assert relative_error(model.float()(tokens), exact) < 2e-5


@CONFIGS
@pytest.mark.parametrize("lengths", [(5, 1, 40), (0, 9, 0, 3, 0), (1, 1, 1), (17, 17)])
def test_packed_equals_separate(make, lengths):
    config = make()
    model, tokens = model_of(config), draw(config, 1, sum(lengths))
    with torch.no_grad():
        packed = model(tokens, Context(cu_seqlens=bounds(lengths)))
        separate = [model(piece) for piece in tokens.split(list(lengths), dim=1) if piece.shape[1]]
    assert relative_error(packed, torch.cat(separate, 1)) < 1e-12


@CONFIGS
def test_batch_equals_packed(make):
    config = make()
    model, tokens = model_of(config), draw(config, 3, 9)
    with torch.no_grad():
        packed = model(tokens.view(1, 27), Context(cu_seqlens=bounds((9, 9, 9))))
        assert relative_error(model(tokens).view_as(packed), packed) < 1e-12


@CONFIGS
def test_cached_equals_uncached_at_splits(make):
    """Also absorbed ≡ expanded: the cached path attends in latent space, the other in head space."""
    config = make()
    model, tokens = model_of(config), draw(config, 1, 13)
    with torch.no_grad():
        whole = model(tokens)
        for split in (0, 1, 2, 3, 4, 7, 12, 13):
            states = new_states(config, 1, dtype=torch.float64)
            pieces = [model(x, Context(states=states)) for x in (tokens[:, :split], tokens[:, split:]) if x.shape[1]]
            assert relative_error(torch.cat(pieces, 1), whole) < 1e-12, split


@CONFIGS
def test_stepwise_with_several_sequences(make):
    """Prefill of different lengths, one of them empty, then one token for each sequence at a time."""
    config = make()
    lengths, steps = (7, 0, 18), 6
    model = model_of(config)
    documents = [draw(config, 1, n + steps) for n in lengths]
    states = new_states(config, 3, dtype=torch.float64)
    with torch.no_grad():
        prompt = torch.cat([d[:, :n] for d, n in zip(documents, lengths)], 1)
        first = model(prompt, Context(states=states, cu_seqlens=bounds(lengths))).split(list(lengths), 1)
        later = [
            model(torch.cat([d[:, n + t] for d, n in zip(documents, lengths)])[:, None], Context(states=states))
            for t in range(steps)
        ]
        for n, document in enumerate(documents):
            ours = torch.cat([first[n], *(y[n : n + 1] for y in later)], 1)
            assert relative_error(ours, model(document)) < 1e-12


@CONFIGS
def test_states_slice_snapshot_restore(make):
    config = make()
    model, tokens = model_of(config), draw(config, 3, 10)
    future = draw(config, 3, 4)
    states = new_states(config, 3, dtype=torch.float64)
    with torch.no_grad():
        model(tokens, Context(states=states))
        saved = [s.snapshot() for s in states]
        expected = model(future, Context(states=states))
        assert relative_error(expected, model(torch.cat([tokens, future], 1))[:, 10:]) < 1e-12
        for state, copy in zip(states, saved):
            state.restore(copy)
        assert torch.equal(model(future, Context(states=states)), expected)
        for state, copy in zip(states, saved):  # a snapshot outlives its first use
            state.restore(copy)
        picked = [s.slice([2, 0]) for s in states]
        got = model(future[[2, 0]], Context(states=picked))
        assert relative_error(got, expected[[2, 0]]) < 1e-12
        assert torch.equal(model(future, Context(states=states)), expected)  # the slice was a copy


@CONFIGS
def test_nan_stays_in_its_document(make):
    config = make()
    model, tokens = model_of(config), draw(config, 1, 30) % 40
    tokens[:, 12:20] = 41
    context = Context(cu_seqlens=bounds((12, 8, 10)))
    with torch.no_grad():
        clean = model(tokens, context)
        model.model.embed_tokens.weight[41] = torch.nan
        got = model(tokens, context)
    keep = [*range(12), *range(20, 30)]
    assert got[:, 12:20].isnan().all()
    assert relative_error(got[:, keep], clean[:, keep]) < 1e-13


@CONFIGS
def test_recompute_gives_the_same_gradients(make):
    config = make()
    model, tokens = model_of(config).float(), draw(config, 1, 40)
    grads = []
    for recompute in (False, True):
        model.zero_grad()
        model(tokens, Context(cu_seqlens=bounds((25, 15)), recompute=recompute)).square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


class Recorder(Observer):
    """Counts what a pass reports."""

    def __init__(self):
        self.calls: list[tuple] = []

    def routing(self, layer, routing):
        self.calls.append(("routing", layer, routing.experts.clone()))

    def attention(self, layer, attended):
        self.calls.append(("attention", layer, attended.scale))

    def mixing(self, layer, place, sources, norm_weight, query):
        self.calls.append(("mixing", layer, place, len(sources)))

    def decay(self, layer, z, A_log, dt_bias, lower_bound):
        self.calls.append(("decay", layer, lower_bound))


def test_observers_see_every_mechanism_and_change_nothing():
    config = k3_miniature()
    model, tokens, recorder = model_of(config), draw(config, 1, 8), Recorder()
    with torch.no_grad():
        assert torch.equal(model(tokens, Context(observer=recorder)), model(tokens))
    seen = {kind: [call[1] for call in recorder.calls if call[0] == kind] for kind in ("routing", "attention", "decay")}
    assert seen == {"routing": [1, 2, 3, 4, 5], "attention": [3, 5], "decay": [0, 1, 2, 4]}
    # Blocks of two layers: sources before attention and before the feed-forward block (model.md §6).
    mixes = [call[1:] for call in recorder.calls if call[0] == "mixing"]
    counts = {(layer, place): n for layer, place, n in mixes}
    assert len(mixes) == 5 + 6 + 1 and counts[(6, "output")] == 4
    for layer in range(6):
        assert counts[(layer, "mlp")] == layer // 2 + 2
        if layer:
            assert counts[(layer, "attention")] == (layer // 2 + 1 if layer % 2 == 0 else layer // 2 + 2)


def test_number_of_mixes_and_sources_of_k3():
    """92 + 93 + 1 = 186 mixes, at most nine sources, 8 slots (model.md §6)."""
    config = k3_miniature(num_layers=93, attn_res_block_size=12, full_attention_layers=(92,), first_dense_layers=93)
    model, recorder = build(config), Recorder()
    with torch.no_grad():
        model(draw(config, 1, 1), Context(observer=recorder))
    sources = [call[3] for call in recorder.calls if call[0] == "mixing"]
    assert len(sources) == 186 and max(sources) == 9 and sources[-1] == 9


def test_forced_routing_is_obeyed():
    config = k3_miniature()
    model, tokens, recorder = model_of(config), draw(config, 1, 8), Recorder()
    forced = {layer: torch.stack([torch.randperm(7)[:3] for _ in range(8)]) for layer in (1, 4)}
    with torch.no_grad():
        changed = model(tokens, Context(observer=recorder, forced_routing=forced))
    used = {call[1]: call[2] for call in recorder.calls if call[0] == "routing"}
    assert all(torch.equal(used[layer], choice) for layer, choice in forced.items())
    assert relative_error(changed, model(tokens)) > 1e-4


def test_mtp_layer_against_its_formula():
    config = k3_miniature(num_nextn_predict_layers=1)
    model, tokens = model_of(config), draw(config, 1, 12)
    w = weights_of(model)
    with torch.no_grad():
        features = model.features(tokens[:, :-1])
        rows = model.mtp_hidden(features.mixture, tokens[:, 1:])
    expected = mtp_rows(w, config, mixture(w, config, tokens[0, :-1]), tokens[0, 1:])
    assert relative_error(rows[0], expected) < 1e-11
    plain = k3_miniature()
    without = CausalLM(plain).double()
    without.load_state_dict({k: v for k, v in model.state_dict().items() if ".layers.6." not in k})
    assert torch.equal(without(tokens), model(tokens))


def test_mtp_packed_equals_separate():
    config = k3_miniature(num_nextn_predict_layers=1)
    model, tokens, lengths = model_of(config), draw(config, 1, 20), (9, 11)
    with torch.no_grad():
        context = Context(cu_seqlens=bounds(lengths))
        rows = torch.randn(1, 20, 24, dtype=torch.float64)
        packed = model.mtp_hidden(rows, tokens, context)
        pieces = [model.mtp_hidden(r, t) for r, t in zip(rows.split(list(lengths), 1), tokens.split(list(lengths), 1))]
    assert relative_error(packed, torch.cat(pieces, 1)) < 1e-12


class Inputs(dict):
    """What every attention and feed-forward block of a pass received and gave."""

    def watch(self, model: CausalLM):
        for layer in model.model.layers:
            for name in ("self_attn", "mlp", "block_sparse_moe"):
                if hasattr(layer, name):
                    block = getattr(layer, name)
                    block.register_forward_hook(lambda m, args, out: self.update({m: (args[0].detach(), out.detach())}))


def token_errors(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    x, reference = x.double(), reference.double()
    return (x - reference).norm(dim=-1) / reference.norm(dim=-1)


@CONFIGS
def test_bf16_compute(make):
    """model.md §12: which tensors stay fp32, fp32 logits, and every block near the exact one on the same input.

    The median token is judged: per-head norms blow up the rounding of a token whose read-out happens to be near zero.
    """
    config = make()
    model, tokens = model_of(config).float(), draw(config, 1, 40)
    recorder, blocks = Recorder(), Inputs()
    blocks.watch(model)
    with torch.no_grad():
        exact = model(tokens, Context(observer=recorder))
        seen = dict(blocks)
        forced = {call[1]: call[2] for call in recorder.calls if call[0] == "routing"}
        to_compute_dtype(model, torch.bfloat16)
        context = Context(forced_routing=forced)
        got = model(tokens, context)
        for block, (x, y) in seen.items():
            out = block(x.bfloat16()) if isinstance(block, MLP) else block(x.bfloat16(), context)
            assert out.dtype is torch.bfloat16
            assert token_errors(out, y).median() < 0.015, block
    assert got.dtype is torch.float32 and got.isfinite().all()
    assert token_errors(got, exact).median() < 0.15
    wide = {name for name, x in model.state_dict().items() if x.dtype is torch.float32}
    kinds = {"_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias"}
    assert all(any(name.endswith(kind) for kind in kinds) for name in wide)
    assert all(name in wide for name in model.state_dict() if any(name.endswith(kind) for kind in kinds))


@CONFIGS
def test_bf16_cached_equals_uncached_within_rounding(make):
    config = make()
    model, tokens = model_of(config).float(), draw(config, 1, 24)
    to_compute_dtype(model, torch.bfloat16)
    recorder = Recorder()
    with torch.no_grad():
        whole = model(tokens, Context(observer=recorder))
        forced = {call[1]: call[2] for call in recorder.calls if call[0] == "routing"}
        states = new_states(config, 1, dtype=torch.bfloat16)
        assert states[0].recurrent.dtype is torch.float32 and states[0].conv.dtype is torch.bfloat16
        halves = []
        for part in (slice(0, 13), slice(13, 24)):
            choice = {layer: x[part] for layer, x in forced.items()}
            halves.append(model(tokens[:, part], Context(states=states, forced_routing=choice)))
    assert token_errors(torch.cat(halves, 1), whole).median() < 0.05


@CONFIGS
def test_bf16_gradients(make):
    """Two layers, one of each kind: every gradient finite, and all of them together in the exact direction."""
    config = make(num_layers=2, full_attention_layers=(1,))
    model, tokens = model_of(config).float(), draw(config, 1, 60)
    recorder = Recorder()
    model(tokens, Context(observer=recorder)).square().mean().backward()
    exact = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    forced = {call[1]: call[2] for call in recorder.calls if call[0] == "routing"}
    model.zero_grad()
    to_compute_dtype(model, torch.bfloat16)
    model(tokens, Context(forced_routing=forced)).square().mean().backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == exact.keys() and all(d.isfinite().all() for d in grads.values())
    product = sum((grads[n] * exact[n]).sum() for n in exact)
    norms = [sum(d.square().sum() for d in each.values()) for each in (grads, exact)]
    assert product / (norms[0] * norms[1]).sqrt() > 0.98


def test_wrong_tokens_and_states():
    config = k3_miniature()
    model = build(config)
    for bad in (torch.zeros(4, dtype=torch.long), torch.zeros(1, 4), torch.zeros(1, 2, 3, dtype=torch.long)):
        with pytest.raises(ShapeError, match=r"integer tensor \[batch, tokens\]"):
            model(bad)
    with pytest.raises(ShapeError, match="state"):
        model(draw(config, 2, 5), Context(states=new_states(config, 3)))
    with pytest.raises(ShapeError, match="cu_seqlens"):
        model(draw(config, 1, 5), Context(cu_seqlens=bounds((4,))))
    with pytest.raises(ShapeError, match="flatten"):
        model(draw(config, 2, 5), Context(cu_seqlens=bounds((10,))))


def test_wrong_restores():
    config = k3_miniature()
    kda, mla = new_states(config, 2)[2:4]
    other_kda, other_mla = new_states(config, 3)[2:4]
    for state, saved in ((kda, mla), (mla, kda), (kda, other_kda), (mla, other_mla)):
        with pytest.raises(ShapeError, match="restored"):
            state.restore(saved)
