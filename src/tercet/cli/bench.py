"""Time operators, or a whole training step.

tercet bench ops     check and time every operator beside its torch tier and installed peers (needs a source checkout)
tercet bench train   tokens per second, MFU, memory and where the time goes, on random tokens
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tercet
from tercet.cli.common import add_configuration, configuration
from tercet.errors import ConfigError
from tercet.ops.registry import TIERS, use_tier
from tercet.train.timing import StepTiming, matmul_rate, measure_step
from tercet.util.text import count, size

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by the vendor's datasheet, by a part of the device's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    what = parser.add_subparsers(dest="what", required=True, metavar="ops|train")
    ops = what.add_parser("ops", help="time operators")
    ops.add_argument("--only", metavar="NAMES", help="modules of bench/ops, comma-separated")
    ops.add_argument("--seconds", type=float, default=1.0, help="time for one row of the table (default 1)")
    ops.add_argument("--out", default=".", metavar="DIR", help="folder for ops.md and ops.json")
    train = what.add_parser("train", help="time a training step")
    add_configuration(train)
    train.add_argument("--steps", type=int, default=5, help="timed steps after two to warm up (default 5)")
    train.add_argument("--tier", choices=TIERS, help="run every operator that has this tier on it")
    train.add_argument("--peak", type=float, metavar="FLOPS", help="FLOP/s that count as 100 %% in MFU")


def run(args: argparse.Namespace) -> int:
    """Run the chosen bench."""
    return _ops(args) if args.what == "ops" else _train(args)


def _ops(args: argparse.Namespace) -> int:
    script = Path(tercet.__file__).parents[2] / "bench" / "ops" / "run.py"
    if not script.exists():
        raise ConfigError(f"the operator benches are not part of the installed package; clone the source ({script})")
    flags = ["--seconds", str(args.seconds), "--out", args.out]
    if args.only:
        flags += ["--only", args.only]
    return runpy.run_path(str(script))["main"](flags)


def _train(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; at least one step must be timed")
    if args.peak is not None and not args.peak > 0:
        raise ConfigError(f"--peak is {args.peak}; it must be positive")
    config = configuration(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with use_tier(args.tier):
        timing = measure_step(config, device, steps=args.steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = next((peak for part, peak in PEAKS.items() if part in name), None)
    peak = args.peak or known
    Console(highlight=False).print(_report(timing, f"{config.preset} on {name}", peak, matmul_rate(device)))
    return 0


def _report(timing: StepTiming, title: str, peak: float | None, matmul: float) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("step", f"{1e3 * timing.seconds:.1f} ms, {timing.tokens} tokens")
    table.add_row("tokens per second", f"{timing.tokens_per_second:,.0f}")
    table.add_row("useful FLOP/s", count(timing.achieved))
    if peak is not None:
        table.add_row(f"MFU of {count(peak)}FLOP/s", f"{100 * timing.achieved / peak:.1f} %")
    table.add_row(f"of a large product here ({count(matmul)}FLOP/s)", f"{100 * timing.achieved / matmul:.1f} %")
    if timing.peak_bytes:
        table.add_row("peak memory", size(timing.peak_bytes))
    whole = sum(timing.phases.values())
    for phase, seconds in sorted(timing.phases.items(), key=lambda item: -item[1]):
        table.add_row(f"  {phase}", f"{1e3 * seconds:.1f} ms  {100 * seconds / whole:4.1f} %")
    return table
