"""Train the tiny K3 model on the Python library's own source, score it, write a report, complete some code.

Everything runs on this machine and nothing is downloaded. The number of steps is fitted to the time it may take;
an interrupted demo goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

MARK = ".demo"
"""File that tells a demo's run from others."""
PROMPT = "def read_lines(path):\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--out", default="runs/demo", metavar="RUN", help="run directory (default runs/demo)")
    parser.add_argument("--data", default="data/demo", metavar="DIR", help="corpus directory (default data/demo)")
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="training time to fit the number of steps to (default 140)"
    )
    parser.add_argument("--steps", type=int, help="train exactly so many steps instead")
    parser.add_argument("--fresh", action="store_true", help="start again, deleting RUN, which must be a demo's")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, score, report, sample."""
    from rich.console import Console

    from tercet.errors import ConfigError
    from tercet.train.loop import Trainer
    from tercet.train.report import write_report

    if args.seconds <= 0 or (args.steps is not None and args.steps < 1):
        raise ConfigError("--seconds and --steps must be positive")
    console = Console(highlight=False, soft_wrap=True)
    directory = Path(args.out)
    if args.fresh:
        _delete_demo(directory)
    corpus = _corpus(Path(args.data), console)
    config = _config(args, corpus, directory, console)
    trainer = Trainer(config, corpus, directory)
    outcome = trainer.run()
    if not outcome.finished:
        write_report(directory)
        console.print(f"stopped after {outcome.step} of {config.train.steps} steps; run the same command to go on")
        return 130
    summary = _summary(trainer)
    report = write_report(directory)
    _show_sample(trainer, console)
    _closing(summary, args, report, console)
    return 0


def _delete_demo(directory: Path) -> None:
    """Remove the run of an earlier demo and nothing else."""
    from tercet.errors import ConfigError

    if not directory.exists():
        return
    if not (directory / MARK).is_file():
        raise ConfigError(f"{directory} is not a demo's run; --fresh deletes only those, remove it by hand")
    shutil.rmtree(directory)


def _corpus(path: Path, console: Any) -> Any:
    from tercet.data import Corpus, prepare, python_library_corpus
    from tercet.presets import preset

    if not (path / "index.json").is_file():
        console.print("[bold]1. The text:[/] this machine's Python standard library")
        vocab_size = preset("tiny").model.vocab_size
        prepare(python_library_corpus(), path, vocab_size=vocab_size, validation=0.05, progress=True)
    corpus = Corpus.open(path)
    train, held_out = corpus.split("train"), corpus.split("validation")
    console.print(
        f"   {train.bytes / 1e6:.1f} MB to learn from ({train.tokens / 1e6:.2f} M tokens), "
        f"{held_out.bytes / 1e6:.2f} MB in {len(held_out.documents)} files held out"
    )
    return corpus


def _config(args: argparse.Namespace, corpus: Any, directory: Path, console: Any) -> Any:
    """Return the tiny preset for this corpus and machine, or the configuration of the demo that is under way.

    Raises:
        ConfigError: the directory holds another run.
    """
    from tercet.errors import ConfigError
    from tercet.model.sizes import sizes
    from tercet.presets import preset
    from tercet.train.checkpoint import read_config
    from tercet.train.loop import fit_to_time
    from tercet.util.settings import override

    exactly = {} if args.steps is None else {"train.steps": args.steps}
    if (directory / "config.json").is_file():
        if not (directory / MARK).is_file():
            raise ConfigError(f"{directory} holds a run that is not a demo's; choose another --out")
        return override(read_config(directory), exactly | {"data.path": str(args.data)})
    config = override(preset("tiny"), {"model.vocab_size": corpus.vocab_size, "data.path": str(args.data)})
    count = sizes(config.model)
    sizes_text = f"{count.total / 1e6:.2f} M parameters, {count.active_without_embedding / 1e6:.2f} M active"
    console.print(f"[bold]2. The model:[/] {sizes_text}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).touch()
    if exactly:
        return override(config, exactly)
    with tempfile.TemporaryDirectory() as scratch:
        config = fit_to_time(config, corpus, scratch, args.seconds)
    console.print(f"[bold]3. Training:[/] {config.train.steps} steps fit into {args.seconds:.0f} s on this machine")
    return config


def _summary(trainer: Any) -> dict[str, Any]:
    from tercet.eval.compression import gzip_bits_per_byte, xz_bits_per_byte
    from tercet.model.sizes import sizes
    from tercet.util.files import write_json

    held_out = trainer.corpus.validation_bytes()
    parameters = sizes(trainer.config.model)
    summary = {
        "training_seconds": round(trainer.seconds, 1),
        "bits_per_byte": round(trainer.validation, 4),
        "gzip_bits_per_byte": round(gzip_bits_per_byte(held_out), 4),
        "xz_bits_per_byte": round(xz_bits_per_byte(held_out), 4),
        "validation_bytes": len(held_out),
        "tokens": trainer.tokens,
        "tokens_per_second": round(trainer.tokens / trainer.seconds, 1),
        "parameters": parameters.total,
        "active_parameters": parameters.active_without_embedding,
    }
    write_json(trainer.directory / "summary.json", summary)
    return summary


def _show_sample(trainer: Any, console: Any) -> None:
    from tercet.serve.generate import Generator, Sampling

    tokenizer = trainer.corpus.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    stream = Generator(trainer.model).stream(
        ids, Sampling(temperature=0.6, top_p=0.9), max_new_tokens=80, stop_ids=tokenizer.stop_ids
    )
    text = tokenizer.decode(list(stream), skip_control=True)
    console.print("\n[bold]It writes:[/]")
    console.print(PROMPT, end="", style="dim", markup=False)
    console.print(text, markup=False)


def _closing(summary: dict[str, Any], args: argparse.Namespace, report: Path, console: Any) -> None:
    console.print(
        f"\n[bold]{summary['training_seconds']:.0f} s[/] of training on {summary['tokens'] / 1e6:.2f} M tokens "
        f"({summary['tokens_per_second']:,.0f} tokens/s)"
    )
    console.print(
        f"held-out bits per byte: [bold]{summary['bits_per_byte']:.3f}[/]   "
        f"gzip -9: {summary['gzip_bits_per_byte']:.3f}   xz -9: {summary['xz_bits_per_byte']:.3f}   "
        f"(the same {summary['validation_bytes']:,} bytes)"
    )
    lines = (
        f"report: {report}",
        f'next:   tercet sample {args.out} "class Parser:"',
        f"        tercet eval {args.out}",
        f"        tercet train tiny --data {args.data} --out runs/mine --set optim.lr=2e-3",
    )
    for line in lines:
        console.print(line, markup=False)
