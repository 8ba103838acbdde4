"""Complete text with a trained model, streaming, from cached state.

tercet sample runs/demo "def main(argv):"
tercet sample runs/demo --file start.py --tokens 400 --temperature 0.7 --top-p 0.9 --seed 3
echo "import " | tercet sample runs/demo
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("prompt", nargs="?", help="text to continue; default: --file, or standard input")
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens to write at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus to draw from (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto (default cpu)")


def _prompt(args: argparse.Namespace) -> str:
    from pathlib import Path

    from tercet.data.tokenizer import well_formed
    from tercet.errors import DataError

    if args.prompt is not None:
        return well_formed(args.prompt)
    if args.file is None and sys.stdin.isatty():
        raise DataError('give a prompt: tercet sample RUN "text", or --file FILE')
    try:
        data = Path(args.file).read_bytes() if args.file else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompt {args.file or 'from standard input'}: {error}") from error


def run(args: argparse.Namespace) -> None:
    """Print the prompt and its continuation as it is written."""
    from tercet.errors import ConfigError
    from tercet.serve.generate import Generator, Sampling
    from tercet.train.checkpoint import load_run

    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be at least 1")
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    prompt = _prompt(args)
    loaded = load_run(args.run, device=args.device)
    tokenizer = loaded.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    sys.stdout.write(prompt)
    sys.stdout.flush()
    text = tokenizer.stream(skip_control=True)
    for token in Generator(loaded.model).stream(ids, sampling, max_new_tokens=args.tokens, stop_ids=tokenizer.stop_ids):
        sys.stdout.write(text.push(token))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
