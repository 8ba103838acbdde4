"""The ``tercet`` command: one verb, one module, loaded only when it is asked for.

A verb module defines ``add_arguments(parser)`` and ``run(args) -> int | None``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import tercet
from tercet.errors import TercetError, nearest

VERBS: dict[str, str] = {
    "demo": "train the tiny preset on real text, report, sample",
    "data": "turn text, source trees, jsonl or parquet into token shards",
    "train": "train a preset, or resume a run",
    "sample": "complete text with a trained model",
    "chat": "talk to a model fine-tuned on XTML chats",
    "eval": "score a run: bits per byte beside gzip and xz, synthetic tasks",
    "report": "write a run's report.html again",
    "checkpoint": "import, export, verify, inspect, compare published layouts",
    "plan": "parameters, memory and FLOPs of a preset before anything runs",
    "bench": "time operators or a training step",
    "doctor": "what this machine has, and which operator tiers run on it",
}

_EPILOG = "Run `tercet VERB --help` for a verb's own flags. Start with: tercet demo"


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name:<{width}}{text}" for name, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="tercet",
        usage="tercet VERB [flags]",
        description=f"Pre-train, post-train and serve K3-architecture models.\n\nverbs:\n{verbs}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tercet {tercet.__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors that tercet or the system raises become one line on stderr and exit status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        overview = _overview()
        overview.parse_args(arguments)
        overview.print_help()
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"tercet: unknown verb {verb!r}{nearest(verb, VERBS)}", file=sys.stderr)
        return 2
    try:
        return _run(verb, rest)
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # how rich says that the reader left
            return _reader_left()
        raise
    except (TercetError, OSError) as error:
        print(f"tercet {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntercet {verb}: stopped", file=sys.stderr)
        return 130


def _reader_left() -> int:
    """Write nothing more, not even at exit: under ``| head`` the command did what was wanted of it."""
    with contextlib.suppress(OSError, ValueError):  # no file descriptor behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(verb: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"tercet.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"tercet {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?"
    status = module.run(parser.parse_args(arguments)) or 0
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
