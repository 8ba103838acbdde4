"""Synthetic tasks with known answers: can the model look back, and how far?

Each example is a sequence of token ids, some of which are answers: tokens that what stands before them determines.
Tasks speak in ids of a set of symbols, so they run with any vocabulary, and in one seed, so that they are the same
everywhere.

    recall      k1 v1 k2 v2 … | k2 v2 k1 v1 …      every key again, in another order: its value (MQAR)
    copy        a b c | a b c                       the same again
    palindrome  a b c | c b a                       the same backwards
    needle      … marker v … | marker v             one pair in much filler, at lengths beyond the training length

``|`` is a separator symbol. Answers stand on the right of it (in `recall` every second token, in `needle` the last).
Report-side sources: recall and palindrome are Kimi Linear §5.1; the needle is the usual passkey test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int

from tercet.errors import DataError, nearest
from tercet.eval.protocols import Completer, Scorer

SEPARATOR, MARKER, FIRST_SYMBOL = 0, 1, 2
"""Roles of the first symbols of a `TaskSpec`; the rest are free."""
BATCH_TOKENS = 16_384
"""Tokens in one packed forward pass."""


@dataclass(frozen=True)
class TaskSpec:
    """Which task, how long, in which symbols."""

    name: str
    length: int
    """Upper bound of the tokens in one example; the largest size that fits is built."""
    symbols: tuple[int, ...]
    """Distinct token ids; the first is the separator, the second the needle's marker."""

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise DataError(f"unknown task {self.name!r}{nearest(self.name, TASKS)}")
        if self.length < 8:
            raise DataError(f"a task of length {self.length} has no room; use at least 8")
        if len(set(self.symbols)) != len(self.symbols) or len(self.symbols) < 6 or min(self.symbols) < 0:
            raise DataError(f"a task needs at least 6 distinct token ids, got {len(self.symbols)}")

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the symbols an answer may be."""
        return 1.0 / len(self.answers)

    @property
    def answers(self) -> tuple[int, ...]:
        """The ids an answer may be."""
        free = self.symbols[FIRST_SYMBOL:]
        return free[len(free) // 2 :] if self.name == "recall" else free


@dataclass(frozen=True)
class Example:
    """One sequence and which of its tokens are answers."""

    tokens: Int[np.ndarray, length]
    is_answer: Bool[np.ndarray, length]

    def questions(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield every run of answers: what stands before it, and the run."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.is_answer, [False]]).astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield self.tokens[:start].tolist(), self.tokens[start:stop].tolist()


@dataclass(frozen=True)
class TaskScore:
    """How a model did on one task at one length; shares in [0, 1]."""

    name: str
    length: int
    """Tokens of the longest example."""
    examples: int
    accuracy: float
    """Answers that are the model's most likely token of its whole vocabulary."""
    choice: float | None
    """Answers that are the most likely of the ids an answer may be; None when scored by generation."""
    chance: float
    """`choice` of a model that guesses."""
    solved: float
    """Examples with every answer right."""


def _recall(spec: TaskSpec, random: np.random.Generator) -> Example:
    free = spec.symbols[FIRST_SYMBOL:]
    keys = np.array(free[: len(free) // 2])
    pairs = (spec.length - 1) // 4
    if pairs > len(keys):
        raise DataError(f"recall of {pairs} pairs needs as many keys, but {len(spec.symbols)} symbols give {len(keys)}")
    key = random.permutation(keys)[:pairs]
    value = random.choice(np.array(spec.answers), pairs)
    order = random.permutation(pairs)
    shown, asked = np.stack([key, value], 1).ravel(), np.stack([key[order], value[order]], 1).ravel()
    tokens = np.concatenate([shown, [spec.symbols[SEPARATOR]], asked])
    is_answer = np.zeros(len(tokens), dtype=bool)
    is_answer[2 * pairs + 2 :: 2] = True
    return Example(tokens, is_answer)


def _repeat(spec: TaskSpec, random: np.random.Generator, *, backwards: bool) -> Example:
    size = (spec.length - 1) // 2
    shown = random.choice(np.array(spec.answers), size)
    tokens = np.concatenate([shown, [spec.symbols[SEPARATOR]], shown[::-1] if backwards else shown])
    return Example(tokens, np.arange(len(tokens)) > size)


def _copy(spec: TaskSpec, random: np.random.Generator) -> Example:
    return _repeat(spec, random, backwards=False)


def _palindrome(spec: TaskSpec, random: np.random.Generator) -> Example:
    return _repeat(spec, random, backwards=True)


def _needle(spec: TaskSpec, random: np.random.Generator) -> Example:
    separator, marker = spec.symbols[SEPARATOR], spec.symbols[MARKER]
    filler = random.choice(np.array(spec.answers), spec.length - 5)
    value, depth = random.choice(np.array(spec.answers)), random.integers(len(filler) + 1)
    needle = [marker, value]
    tokens = np.concatenate([filler[:depth], needle, filler[depth:], [separator], needle])
    return Example(tokens, np.arange(len(tokens)) == len(tokens) - 1)


TASKS: dict[str, Callable[[TaskSpec, np.random.Generator], Example]] = {
    "recall": _recall,
    "copy": _copy,
    "palindrome": _palindrome,
    "needle": _needle,
}


def symbols(available: int, count: int = 256) -> tuple[int, ...]:
    """Return *count* ids spread evenly over ``[0, available)``, or all of them if they are fewer."""
    count = min(count, available)
    return tuple(n * available // count for n in range(count))


def examples(spec: TaskSpec, count: int, seed: int = 0) -> list[Example]:
    """Return *count* examples; the n-th depends on the task, the length, the seed and n alone.

    Raises:
        DataError: the symbols do not suffice for the length.
    """
    name = list(TASKS).index(spec.name)
    return [TASKS[spec.name](spec, np.random.default_rng([seed, name, spec.length, n])) for n in range(count)]


def evaluate(scorer: Scorer, spec: TaskSpec, count: int = 32, seed: int = 0) -> TaskScore:
    """Score by likelihood: one teacher-forced pass, the most likely token at every answer.

    All answers of an example are right exactly if greedy generation would give them.

    Args:
        scorer: the model.
        spec: the task.
        count: examples.
        seed: of the examples.

    Raises:
        DataError: see `examples`; or count is not positive.
    """
    made = _checked(spec, count, seed)
    candidates = torch.tensor(spec.answers)
    right, chosen, solved, total = 0, 0, 0, 0
    for batch in _batches(made):
        tokens = torch.from_numpy(np.concatenate([one.tokens for one in batch]).astype(np.int64))
        bounds = torch.tensor([0, *np.cumsum([len(one.tokens) for one in batch])], dtype=torch.int32)
        at = torch.from_numpy(np.flatnonzero(np.concatenate([one.is_answer for one in batch])))
        logits_AV = scorer.logits(tokens, bounds, at - 1).float().cpu()
        correct_A = logits_AV.argmax(-1) == tokens[at]
        chosen += int((candidates[logits_AV[:, candidates].argmax(-1)] == tokens[at]).sum())
        right, total = right + int(correct_A.sum()), total + len(at)
        owner_A = torch.searchsorted(bounds.long(), at, right=True) - 1
        wrong = torch.bincount(owner_A[~correct_A], minlength=len(batch))
        solved += int((wrong == 0).sum())
    longest = max(len(one.tokens) for one in made)
    return TaskScore(spec.name, longest, count, right / total, chosen / total, spec.chance, solved / count)


def evaluate_by_generation(completer: Completer, spec: TaskSpec, count: int = 32, seed: int = 0) -> TaskScore:
    """Score by greedy generation: the model continues from what stands before each run of answers.

    Args:
        completer: the model, which may be a server.
        spec: the task.
        count: examples.
        seed: of the examples.

    Raises:
        DataError: as for `evaluate`.
    """
    made = _checked(spec, count, seed)
    right, solved, total = 0, 0, 0
    for example in made:
        perfect = True
        for prompt, answer in example.questions():
            given = completer.complete(prompt, len(answer))
            hits = sum(a == b for a, b in zip(given, answer, strict=False))
            right, total, perfect = right + hits, total + len(answer), perfect and hits == len(answer)
        solved += perfect
    longest = max(len(one.tokens) for one in made)
    return TaskScore(spec.name, longest, count, right / total, None, spec.chance, solved / count)


def _checked(spec: TaskSpec, count: int, seed: int) -> list[Example]:
    if count < 1:
        raise DataError(f"{count} examples measure nothing; use at least 1")
    return examples(spec, count, seed)


def _batches(made: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Group examples, all of about one length, so that a group stays within `BATCH_TOKENS` or is one example."""
    group = max(1, BATCH_TOKENS // len(made[0].tokens))
    starts = range(0, len(made) + group, group)
    return (made[a:b] for a, b in pairwise(starts) if made[a:b])
