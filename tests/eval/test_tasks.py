"""Tasks are solvable from what stands before each answer, guessing scores chance, and both protocols agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tercet.errors import DataError
from tercet.eval.protocols import ModelScorer
from tercet.eval.tasks import MARKER, SEPARATOR, TASKS, TaskSpec, evaluate, evaluate_by_generation, examples, symbols
from tercet.model import Context, build, new_states
from tercet.presets import tiny_model

VOCAB = 300


def _spec(name: str, length: int = 40, count: int = 40) -> TaskSpec:
    return TaskSpec(name, length, symbols(VOCAB, count))


def _solve(spec: TaskSpec, seen: list[int]) -> int:
    """What a reader who knows the rule says next; sees only the past."""
    separator = spec.symbols[SEPARATOR]
    if spec.name == "needle":
        return seen[seen.index(seen[-1]) + 1] if seen[-1] == spec.symbols[MARKER] else spec.answers[0]
    if separator not in seen:
        return spec.answers[0]
    cut = seen.index(separator)
    shown, done = seen[:cut], seen[cut + 1 :]
    if spec.name == "recall":
        return dict(zip(shown[::2], shown[1::2], strict=True)).get(seen[-1], spec.answers[0])
    ordered = shown if spec.name == "copy" else shown[::-1]
    return ordered[len(done)] if len(done) < len(ordered) else separator


class Oracle:
    def __init__(self, spec):
        self.spec = spec

    def logits(self, tokens, cu_seqlens, positions):
        out = torch.zeros(len(positions), VOCAB)
        for row, position in enumerate(positions.tolist()):
            start = max(bound for bound in cu_seqlens.tolist() if bound <= position)
            out[row, _solve(self.spec, tokens[start : position + 1].tolist())] = 1.0
        return out

    def complete(self, prompt, count):
        given = list(prompt)
        for _ in range(count):
            given.append(_solve(self.spec, given))
        return given[len(prompt) :]


class Guesser:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def logits(self, tokens, cu_seqlens, positions):
        return torch.rand(len(positions), VOCAB, generator=self.generator)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [8, 9, 41, 64])
def test_the_rule_scores_everything(name, length):
    spec = _spec(name, length)
    for result in (evaluate(Oracle(spec), spec, 9), evaluate_by_generation(Oracle(spec), spec, 9)):
        assert result.accuracy == result.solved == 1.0
        assert result.choice in (1.0, None)
        assert length - 4 <= result.length <= length


@pytest.mark.parametrize("name", TASKS)
def test_guessing_scores_chance(name):
    spec = _spec(name, 40, 24)
    count = 2000 if name == "needle" else 200
    result = evaluate(Guesser(), spec, count)
    answers = count if name == "needle" else count * 9
    spread = (result.chance * (1 - result.chance) / answers) ** 0.5
    assert abs(result.choice - result.chance) < 5 * spread
    assert result.chance == 1 / len(spec.answers) and result.accuracy < result.choice


@pytest.mark.parametrize("name", TASKS)
def test_examples_depend_on_the_seed_alone(name):
    spec = _spec(name)
    first, again, other = examples(spec, 5), examples(spec, 3), examples(spec, 5, seed=1)
    for one, two in zip(first, again, strict=False):
        assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.is_answer, two.is_answer)
    assert not all(np.array_equal(one.tokens, two.tokens) for one, two in zip(first, other, strict=True))
    assert len({one.tokens.tobytes() for one in first}) == 5
    assert all(set(one.tokens.tolist()) <= set(spec.symbols) for one in first)


def test_answers_cover_their_range_and_needles_their_depth():
    spec = _spec("needle", 24, 10)
    made = examples(spec, 400)
    assert {one.tokens[-1] for one in made} == set(spec.answers)
    depths = {one.tokens.tolist().index(spec.symbols[MARKER]) for one in made}
    assert depths == set(range(24 - 5 + 1))


def test_recall_asks_every_key_once():
    for one in examples(_spec("recall", 41, 60), 20):
        cut = one.tokens.tolist().index(_spec("recall", 41, 60).symbols[SEPARATOR])
        keys, asked = one.tokens[:cut:2].tolist(), one.tokens[cut + 1 :: 2].tolist()
        assert len(set(keys)) == len(keys) == 10 and sorted(keys) == sorted(asked)


def test_packing_is_invisible(monkeypatch):
    spec = _spec("copy")
    torch.manual_seed(0)
    scorer = ModelScorer(_model())
    packed = evaluate(scorer, spec, 6)
    monkeypatch.setattr("tercet.eval.tasks.BATCH_TOKENS", 1)
    assert evaluate(scorer, spec, 6) == packed


def _model():
    tiny = tiny_model()
    config = replace(
        tiny,
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        full_attention_layers=(1,),
        intermediate_size=32,
        kda=replace(tiny.kda, num_heads=2, head_dim=16),
        mla=replace(tiny.mla, num_heads=2, kv_lora_rank=16, q_lora_rank=16),
        moe=replace(tiny.moe, num_experts=4, latent_size=16, intermediate_size=16),
    )
    return build(config, seed=2).double()


class Cached:
    """Greedy decoding from layer states."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def complete(self, prompt, count):
        states = new_states(self.model.config, 1, dtype=torch.float64)
        given, new = [], list(prompt)
        for _ in range(count):
            logits = self.model(torch.tensor([new]), Context(states=states))[0, -1]
            new = [int(logits.argmax())]
            given += new
        return given


def test_both_protocols_agree_on_a_model():
    """A trained-in bias makes the model right now and then: one symbol always has the largest logit."""
    model = _model()
    spec = TaskSpec("needle", 12, symbols(VOCAB, 6))
    with torch.no_grad():
        model.lm_head.weight *= 20
        favourite = torch.tensor(spec.answers)
        model.lm_head.weight[favourite] *= 10
    one, two = evaluate(ModelScorer(model), spec, 60), evaluate_by_generation(Cached(model), spec, 60)
    assert one.accuracy == two.accuracy and one.solved == two.solved
    assert 0 < one.accuracy < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _spec("recalls"), "did you mean 'recall'"),
        (lambda: _spec("copy", 7), "length 7"),
        (lambda: TaskSpec("copy", 20, (1, 2, 3)), "at least 6"),
        (lambda: TaskSpec("copy", 20, (1, 1, 2, 3, 4, 5)), "distinct"),
        (lambda: examples(_spec("recall", 400), 1), "needs as many keys"),
        (lambda: evaluate(Guesser(), _spec("copy"), 0), "at least 1"),
        (lambda: evaluate_by_generation(Oracle(_spec("copy")), _spec("copy"), 0), "at least 1"),
    ],
)
def test_impossible_tasks(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_symbols_are_spread():
    assert symbols(1000, 4) == (0, 250, 500, 750)
    assert symbols(3, 10) == (0, 1, 2)
