"""Train a preset on a prepared corpus, or go on with a run that was stopped.

  tercet data prepare my-text/ --out data/mine
  tercet train small --data data/mine --out runs/mine
  tercet train small --data data/mine --out runs/mine --set optim.lr=2e-3 --set train.steps=5000
  tercet train --resume runs/mine
  torchrun --nproc-per-node 2 -m tercet train small --data data/mine --out runs/mine

Ctrl-C saves and stops; the same command, or --resume, goes on as if nothing had happened, on any number of processes.
"""

from __future__ import annotations

import argparse

from tercet.cli.common import add_configuration, configuration, overlay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    add_configuration(parser, required=False)
    parser.add_argument("--data", metavar="DIR", help="corpus written by `tercet data prepare`; may move later")
    parser.add_argument("--out", metavar="RUN", help="run directory; an unfinished run of the same settings goes on")
    parser.add_argument("--resume", metavar="RUN", help="go on with RUN under its own settings")
    parser.add_argument("--steps", type=int, help="short for --set train.steps=N")
    parser.add_argument("--device", help="cpu, cuda or auto (default)")
    parser.add_argument("--tracker", choices=("tensorboard", "trackio", "wandb"), help="also log to a tracker")


def run(args: argparse.Namespace) -> int:
    """Train, write the report, and say where it is."""
    from tercet.bridge.trackers import open_tracker
    from tercet.data import Corpus
    from tercet.errors import ConfigError, DataError
    from tercet.parallel import join
    from tercet.train.checkpoint import read_config
    from tercet.train.loop import Trainer
    from tercet.train.report import write_report

    quick = {"train.steps": args.steps, "train.device": args.device, "train.tracker": args.tracker}
    extra = {key: value for key, value in quick.items() if value is not None}
    if args.resume:
        if args.preset or args.out:
            raise ConfigError("--resume takes the run's own settings; leave out the preset and --out")
        moved = {"data.path": args.data} if args.data else {}
        config, directory = overlay(read_config(args.resume), args, moved | extra), args.resume
        try:
            corpus = Corpus.open(config.data.path)
        except DataError as error:
            raise DataError(f"{error}; if the run's corpus has moved, name it with --data") from error
    else:
        if not args.preset or not args.data or not args.out:
            raise ConfigError("give PRESET, --data DIR and --out RUN, or --resume RUN; see tercet train --help")
        corpus, directory = Corpus.open(args.data), args.out
        config = configuration(args, {"data.path": args.data, "model.vocab_size": corpus.vocab_size} | extra)
    ranks = join(config.train.device, timeout_seconds=config.train.peer_timeout)
    try:
        tracked = ranks.first and config.train.tracker != "none"
        sinks = [open_tracker(config.train.tracker, directory, config)] if tracked else []
        trainer = Trainer(config, corpus, directory, sinks=sinks, ranks=ranks)
        try:
            outcome = trainer.run()
        finally:
            trainer.log.close()
        if ranks.first:
            print(f"report: {write_report(directory)}")
            finished = f'next:   tercet sample {directory} "def main():"'
            print(finished if outcome.finished else f"go on:  tercet train --resume {directory}")
    finally:
        ranks.close()
    return 0 if outcome.finished else 130
