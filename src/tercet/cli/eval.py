"""Score a run: bits per byte beside gzip and xz on the same bytes, and synthetic tasks with known answers.

  tercet eval runs/demo                                  its own held-out files
  tercet eval runs/demo --files notes/ book.txt          other text
  tercet eval runs/demo --tasks recall copy --lengths 64 256
  tercet eval runs/demo --tasks all --json

The needle is hidden in up to four times the training length, unless --lengths says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tercet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tercet.eval.tasks import TaskScore
    from tercet.model import CausalLM
    from tercet.train.checkpoint import LoadedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--files", nargs="+", metavar="PATH", help="score this text instead of the held-out split")
    parser.add_argument("--data", metavar="DIR", help="corpus of the held-out split (default: the run's own)")
    parser.add_argument(
        "--tasks", nargs="+", metavar="NAME", help="score tasks instead: recall copy palindrome needle all"
    )
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="tokens in an example of a task")
    parser.add_argument("--examples", type=int, default=16, metavar="N", help="examples a task and length (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the examples")
    parser.add_argument("--generate", action="store_true", help="answer by greedy decoding from cached state (slower)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto (default cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


class _Cached:
    """The run's model as a `tercet.eval.protocols.Completer`."""

    def __init__(self, model: CausalLM):
        from tercet.serve.generate import Generator

        self._generator = Generator(model)

    def complete(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return *count* greedy tokens after *prompt*."""
        from tercet.serve.generate import Sampling

        return list(self._generator.stream(prompt, Sampling(temperature=0.0), max_new_tokens=count))


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    from tercet.train.checkpoint import load_run

    if args.tasks:
        names = _task_names(args.tasks)
    loaded = load_run(args.run, device=args.device)
    if args.tasks:
        scores = _tasks(args, loaded, names)
        _print(args, [dataclasses.asdict(score) for score in scores], _task_rows(scores))
    else:
        result = _compression(args, loaded)
        _print(args, result, _compression_rows(result))
    return 0


def _task_names(asked: Sequence[str]) -> list[str]:
    from tercet.eval.tasks import TASKS

    for name in asked:
        if name not in TASKS and name != "all":
            raise ConfigError(f"unknown task {name!r}{nearest(name, [*TASKS, 'all'])}")
    return list(TASKS) if "all" in asked else list(dict.fromkeys(asked))


def _compression(args: argparse.Namespace, loaded: LoadedRun) -> dict[str, Any]:
    from tercet.data import Corpus, Sources
    from tercet.eval.compression import (
        bits_per_byte,
        bits_per_byte_of_texts,
        gzip_bits_per_byte,
        xz_bits_per_byte,
    )

    length = loaded.config.data.sequence_length
    if args.files:
        texts = [document.data for document in Sources(args.files)]
        data = b"".join(texts)
        score = bits_per_byte_of_texts(loaded.model, loaded.tokenizer, texts, sequence_length=length)
    else:
        corpus = Corpus.open(args.data or loaded.config.data.path)
        if corpus.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
            raise ConfigError(
                f"{corpus.root} was prepared with another tokenizer than the run's; name its own with --data"
            )
        data = corpus.validation_bytes()
        score = bits_per_byte(loaded.model, corpus, sequence_length=length)
    return {
        "step": loaded.step,
        "bytes": score.bytes,
        "tokens": score.tokens,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
        "gzip_bits_per_byte": gzip_bits_per_byte(data),
        "xz_bits_per_byte": xz_bits_per_byte(data),
    }


def _tasks(args: argparse.Namespace, loaded: LoadedRun, names: Sequence[str]) -> list[TaskScore]:
    from tercet.eval.protocols import ModelScorer
    from tercet.eval.tasks import TaskSpec, evaluate, evaluate_by_generation, symbols

    trained = loaded.config.data.sequence_length
    ids = symbols(len(loaded.tokenizer.ranks))
    scores = []
    for name in names:
        reach = (trained // 2, trained, 2 * trained, 4 * trained) if name == "needle" else (32, 64, 128, 256)
        for length in args.lengths or reach:
            spec = TaskSpec(name, length, ids)
            if args.generate:
                scores.append(evaluate_by_generation(_Cached(loaded.model), spec, args.examples, args.seed))
            else:
                scores.append(evaluate(ModelScorer(loaded.model), spec, args.examples, args.seed))
    return scores


def _compression_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    best = {"model": "bits_per_byte", "gzip -9": "gzip_bits_per_byte", "xz -9": "xz_bits_per_byte"}
    rows = [(name, f"{result[key]:.4f}") for name, key in best.items()]
    return [(f"{result['bytes']:,} bytes, step {result['step']:,}", "bits per byte"), *rows]


def _task_rows(scores: Sequence[TaskScore]) -> list[tuple[str, ...]]:
    rows = [
        (
            score.name,
            f"{score.length:,}",
            f"{score.accuracy:.1%}",
            "—" if score.choice is None else f"{score.choice:.1%}",
            f"{score.chance:.1%}",
            f"{score.solved:.1%}",
        )
        for score in scores
    ]
    return [("task", "tokens", "right", "among symbols", "chance", "all right"), *rows]


def _print(args: argparse.Namespace, data: Any, rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if args.json:
        print(json.dumps(data, indent=2))
        return
    table = Table()
    for n, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if n else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console(highlight=False).print(table)
