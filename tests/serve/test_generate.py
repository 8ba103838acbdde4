"""Tokens from a cached state: the same as without a cache, whatever the seed, nucleus, stop or interruption."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.train.conftest import micro_model

from tercet.errors import ConfigError, NumericsError, ShapeError
from tercet.model import CausalLM, Context, build
from tercet.serve.generate import Generator, Sampling, draw

VOCAB = 64
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(temperature=0.7, top_p=0.5, seed=2),
    Sampling(temperature=2.0, top_p=0.9, seed=3),
]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Every mechanism, in fp64; larger initial values, so that its next token depends on what came before."""
    return build(replace(micro_model(VOCAB), initializer_range=0.3), seed=5).double().eval()


@torch.no_grad()
def without_cache(model: CausalLM, ids: list[int], sampling: Sampling, count: int) -> list[int]:
    """The whole sequence again for every token."""
    generator, ids, start = torch.Generator().manual_seed(sampling.seed), list(ids), len(ids)
    for _ in range(count):
        hidden = model.features(torch.tensor([ids]), Context()).hidden
        ids.append(draw(model.logits(hidden[0, -1]), sampling, generator))
    return ids[start:]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_as_without_a_cache(model: CausalLM, sampling: Sampling) -> None:
    cached = list(Generator(model).stream(PROMPT, sampling, max_new_tokens=40))
    assert len(cached) == 40
    assert cached == without_cache(model, PROMPT, sampling, 40)
    if sampling.temperature:
        assert len(set(cached)) > 5


def test_a_seed_decides_the_text(model: CausalLM) -> None:
    texts = [list(Generator(model).stream(PROMPT, Sampling(seed=s), max_new_tokens=20)) for s in (7, 7, 8, -1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert len(texts[3]) == 20


def test_a_later_turn_reads_only_what_is_new(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    features = model.features

    def counted(tokens: torch.Tensor, context: Context):
        read.append(tokens.shape[1])
        return features(tokens, context)

    monkeypatch.setattr(model, "features", counted)
    chat = Generator(model)
    first = list(chat.stream(PROMPT, Sampling(seed=4), max_new_tokens=10))
    read.clear()
    second = [*PROMPT, *first, 11, 12, 13]
    answer = list(chat.stream(second, Sampling(seed=5), max_new_tokens=10))
    assert read[0] == 3
    assert answer == list(Generator(model).stream(second, Sampling(seed=5), max_new_tokens=10))


def test_another_prompt_starts_over(model: CausalLM) -> None:
    used = Generator(model)
    list(used.stream(PROMPT, Sampling(), max_new_tokens=5))
    for prompt in (PROMPT[:3], [9, 9, 9], PROMPT):
        fresh = list(Generator(model).stream(prompt, Sampling(), max_new_tokens=5))
        assert list(used.stream(prompt, Sampling(), max_new_tokens=5)) == fresh


def test_an_interrupted_pass_spoils_nothing(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two layers leaves half of the states one token ahead; the next answer must not use them."""
    chat = Generator(model)
    stream = chat.stream(PROMPT, Sampling(seed=6), max_new_tokens=10)
    before = [next(stream), next(stream)]
    last = model.model.layers[-1].self_attn
    forward = last.forward

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(last, "forward", forward)
    prompt = [*PROMPT, *before, 20]
    again = list(chat.stream(prompt, Sampling(seed=6), max_new_tokens=10))
    assert again == list(Generator(model).stream(prompt, Sampling(seed=6), max_new_tokens=10))


def test_a_stop_id_ends_the_stream_and_comes_last(model: CausalLM) -> None:
    free = list(Generator(model).stream(PROMPT, Sampling(seed=9), max_new_tokens=20))
    stop = free[6]
    stopped = list(Generator(model).stream(PROMPT, Sampling(seed=9), max_new_tokens=20, stop_ids=(stop,)))
    assert stopped == free[: free.index(stop) + 1]


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in ((0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(top_p=top_p)
        assert {draw(logits, sampling, generator) for _ in range(300)} == kept


def test_drawn_frequencies_follow_the_temperature() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature=0.5)
    drawn = torch.tensor([draw(logits, sampling, generator) for _ in range(4000)])
    expected = torch.tensor([0.36, 0.09, 0.01]) / 0.46  # p² normalised
    assert torch.allclose(drawn.bincount(minlength=3) / 4000, expected, atol=0.03)


def test_a_minute_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([0.1, 900.0, -3.0])
    assert draw(logits, Sampling(temperature=1e-320), torch.Generator()) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"seed": 1 << 70},
    ],
)
def test_impossible_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


def test_bad_prompts_are_refused(model: CausalLM) -> None:
    with pytest.raises(ShapeError, match="empty"):
        next(Generator(model).stream([], Sampling(), max_new_tokens=1))
    with pytest.raises(ShapeError, match=r"\[0, 64\)"):
        next(Generator(model).stream([1, 64], Sampling(), max_new_tokens=1))


def test_a_diverged_model_says_so() -> None:
    with pytest.raises(NumericsError, match="diverged"):
        draw(torch.tensor([0.0, math.nan]), Sampling(), torch.Generator())
