"""QK-Clip (training.md §1.5, §12.6)."""

from dataclasses import replace

import pytest
import torch

from tercet.config import OptimConfig
from tercet.model import CausalLM, Context, Observer, build, to_compute_dtype
from tercet.model.context import Attended
from tercet.ops import mla_attention, use_tier
from tercet.train.optimizer import Optimizer
from tercet.train.qk_clip import QKClip
from tests.train.train_models import fill_gradients, small_config, small_model, snapshot

LAYER = 2
TAU = 0.05


class Logits(Observer):
    """Keeps every causal logit of one MLA layer, written from the definition."""

    def __init__(self) -> None:
        self.largest: dict[int, torch.Tensor] = {}

    def attention(self, layer, attended):
        q, k_nope, k_pe, scale, cu_seqlens, _ = attended
        k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        bounds = cu_seqlens.tolist() if cu_seqlens is not None else None
        logits = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if bounds is not None:
            document = torch.bucketize(torch.arange(logits.shape[-1]), torch.tensor(bounds[1:]), right=True)
            visible &= document[:, None] == document[None, :]
        self.largest[layer] = logits.masked_fill(~visible, -torch.inf).amax((0, 2, 3))


@torch.no_grad()
def logit_maxima(model: CausalLM, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    observer = Logits()
    model.features(tokens, Context(observer=observer, cu_seqlens=cu_seqlens))
    return observer.largest[LAYER]


def q_lora_free_model() -> CausalLM:
    config = small_config(mtp=False)
    return build(replace(config, mla=replace(config.mla, q_lora_rank=None)), seed=3).double()


def bf16_model() -> CausalLM:
    return to_compute_dtype(small_model(torch.float32, mtp=False), torch.bfloat16)


def grow(model: CausalLM, factor: float = 40.0) -> None:
    """Make the logits of two heads large."""
    attention = model.model.layers[LAYER].self_attn
    query = attention.q_proj if hasattr(attention, "q_proj") else attention.q_b_proj
    with torch.no_grad():
        query.weight.view(4, 12, -1)[1:3] *= factor


@pytest.mark.parametrize("make", [lambda: small_model(mtp=False), q_lora_free_model])
def test_after_clipping_the_same_batch_stays_below_the_threshold(make):
    model = make()
    grow(model)
    tokens = torch.randint(0, 48, (2, 9))
    before, weights = logit_maxima(model, tokens), snapshot(model)
    assert before[1] > TAU and before[2] > TAU
    optimizer = Optimizer(model, OptimConfig())
    clip = QKClip(model.config, TAU)
    clip.begin_step()
    model.features(tokens, Context(observer=clip))
    report = clip.end_step(optimizer, accepted=True)
    assert report is not None
    over = before > TAU
    assert report.clipped == int(over.sum())
    assert report.largest == pytest.approx(float(before.max()), rel=1e-5)
    after = logit_maxima(model, tokens)
    assert float(after.max()) <= TAU * (1 + 1e-3)
    # Clipped heads land on the threshold exactly; the others do not move at all.
    torch.testing.assert_close(after[over], torch.full_like(after[over], TAU), rtol=1e-3, atol=0.0)
    assert torch.equal(after[~over], before[~over])
    assert_only_query_and_content_key_moved(weights, snapshot(model), over)


@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 18]])
def test_maxima_that_attention_tells_equal_those_from_queries_and_keys(bounds, monkeypatch):
    """Where the attention kernel gives every query's largest logit, QK-Clip asks for nothing else."""
    pytest.importorskip("triton")
    shape = (1, 18) if bounds else (2, 9)
    q, kv, k_pe = torch.randn(*shape, 4, 32), torch.randn(*shape, 4, 32), torch.randn(*shape, 16)
    cu_seqlens = torch.tensor(bounds) if bounds else None
    with use_tier("triton"):
        _, row_max = mla_attention(q, kv, k_pe, scale=0.3, cu_seqlens=cu_seqlens)
    assert row_max is not None
    model = small_model(mtp=False)
    told, found = QKClip(model.config, -100.0), QKClip(model.config, -100.0)  # every logit is above: all are exact
    for clip in (told, found):
        clip.begin_step()
    asked = Attended(q, kv[..., :16], k_pe, 0.3, cu_seqlens, None)
    found.attention(LAYER, asked)
    monkeypatch.setattr("tercet.train.qk_clip.attention_logit_max", None)  # would fail if it were called
    told.attention(LAYER, asked._replace(row_max=row_max))
    torch.testing.assert_close(told.maxima[LAYER], found.maxima[LAYER])


def assert_only_query_and_content_key_moved(before, after, over):
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    prefix = f"model.layers.{LAYER}.self_attn."
    assert moved - {f"{prefix}q_proj.weight"} <= {f"{prefix}q_b_proj.weight", f"{prefix}kv_b_proj.weight"}
    name = f"{prefix}kv_b_proj.weight"
    old, new = before[name].view(4, 14, -1), after[name].view(4, 14, -1)
    assert torch.equal(old[:, 8:], new[:, 8:])  # values
    assert torch.equal(old[~over], new[~over])
    assert not torch.equal(old[over, :8], new[over, :8])


def test_both_weight_copies_are_scaled_and_momentum_is_not():
    model = bf16_model()
    grow(model)
    optimizer = Optimizer(model, OptimConfig())
    fill_gradients(model, seed=0)
    optimizer.step(1e-6)
    name = f"model.layers.{LAYER}.self_attn.q_b_proj.weight"
    master = optimizer.weight(name).clone()
    momentum = optimizer.state_dict()["parameters"][name]["momentum"].clone()
    clip = QKClip(model.config, TAU)
    clip.begin_step()
    model.features(torch.randint(0, 48, (2, 9)), Context(observer=clip))
    gamma = (TAU / clip.maxima[LAYER]).clamp(max=1.0)
    assert clip.end_step(optimizer, accepted=True).clipped > 0
    expected = master.view(4, 12, -1).clone()
    expected[:, :8] *= gamma.sqrt()[:, None, None]
    expected[:, 8:] *= gamma[:, None, None]
    torch.testing.assert_close(optimizer.weight(name).view(4, 12, -1), expected, rtol=1e-6, atol=0.0)
    assert torch.equal(model.get_parameter(name), optimizer.weight(name).bfloat16())
    assert torch.equal(optimizer.state_dict()["parameters"][name]["momentum"], momentum)


def test_maxima_run_over_micro_batches_and_same_document_pairs():
    model = small_model(mtp=False)
    grow(model)
    batches = [torch.randint(0, 48, (1, 12)) for _ in range(3)]
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = torch.stack([logit_maxima(model, tokens, bounds) for tokens in batches]).amax(0)
    clip = QKClip(model.config, TAU)
    clip.begin_step()
    for tokens in batches:
        model.features(tokens, Context(observer=clip, cu_seqlens=bounds))
    found = clip.maxima[LAYER].double()
    over = expected > TAU
    torch.testing.assert_close(found[over], expected[over], rtol=1e-5, atol=0.0)
    assert bool((found[~over] <= TAU).all())


def test_recomputed_forwards_change_nothing_and_evaluation_is_not_seen():
    model = small_model(mtp=False)
    quiet, loud = torch.randint(0, 48, (1, 6)), torch.randint(0, 48, (4, 20))
    clip = QKClip(model.config, TAU)
    model.features(loud, Context(observer=clip))
    assert not clip.maxima
    clip.begin_step()
    model.features(quiet, Context(observer=clip, recompute=True)).hidden.sum().backward()
    once = clip.maxima[LAYER].clone()
    model.features(quiet, Context(observer=clip))
    assert torch.equal(clip.maxima[LAYER], once)
    clip.end_step(Optimizer(model, OptimConfig()), accepted=True)
    model.features(loud, Context(observer=clip))
    assert torch.equal(clip.maxima[LAYER], once)


def test_a_skipped_step_clips_nothing():
    model = small_model(mtp=False)
    grow(model)
    weights = snapshot(model)
    clip = QKClip(model.config, TAU)
    clip.begin_step()
    model.features(torch.randint(0, 48, (2, 9)), Context(observer=clip))
    assert clip.end_step(Optimizer(model, OptimConfig()), accepted=False) is None
    assert all(torch.equal(weights[name], tensor) for name, tensor in snapshot(model).items())


def test_ranks_agree_through_the_reduction():
    model = small_model(mtp=False)
    elsewhere = torch.tensor([[0.01, 0.01, 0.01, 5.0]])
    clip = QKClip(model.config, TAU, reduce_max=lambda maxima: torch.maximum(maxima, elsewhere.to(maxima)))
    clip.begin_step()
    model.features(torch.randint(0, 48, (1, 4)), Context(observer=clip))
    report = clip.end_step(Optimizer(model, OptimConfig()), accepted=True)
    assert report.largest == 5.0
    assert report.clipped >= 1


def test_the_multi_token_prediction_layer_is_clipped_too():
    model = small_model()
    clip = QKClip(model.config, 1e-6)
    clip.begin_step()
    tokens = torch.randint(0, 48, (1, 9))
    context = Context(observer=clip)
    model.mtp_hidden(model.features(tokens, context).mixture, tokens, context)
    assert set(clip.maxima) == {LAYER, model.config.num_layers}
    before = snapshot(model)
    clip.end_step(Optimizer(model, OptimConfig()), accepted=True)
    name = f"model.layers.{model.config.num_layers}.self_attn.q_b_proj.weight"
    assert not torch.equal(before[name], model.get_parameter(name))
