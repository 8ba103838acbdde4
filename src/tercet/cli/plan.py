"""Print what a preset costs before anything runs: parameters, memory, FLOPs, time, and a layout for N GPUs.

Counts come from the model's own shapes on the meta device (`tercet.model.sizes`); nothing is allocated.
"""

from __future__ import annotations

import argparse
import math

from rich.console import Console
from rich.table import Table

from tercet.checkpoint.layouts import natural_layout, published_vision, totals
from tercet.config import RunConfig
from tercet.errors import ConfigError
from tercet.model.sizes import Sizes, sizes
from tercet.presets import PRESETS, preset
from tercet.util.settings import override, parse_assignment, read_toml
from tercet.util.text import count, duration, size

GIB = 1024**3
USABLE = 0.9
"""Share of a GPU's memory that a plan may fill; the rest is for fragments, buffers and the runtime."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("preset", metavar="PRESET", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("--gpus", type=int, default=None, metavar="N", help="also lay the training out on N GPUs")
    parser.add_argument("--gpu-memory", type=float, default=141.0, metavar="GIB", help="memory of a GPU (default 141)")
    parser.add_argument(
        "--flops",
        type=float,
        default=None,
        metavar="F",
        help="FLOP/s reached by one device (default: 4e14 with --gpus or a large preset, 5e10 for tiny)",
    )
    parser.add_argument("--config", default=None, metavar="TOML", help="settings file laid over the preset")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    for name in ("gpus", "gpu_memory", "flops"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be positive")
    config = preset(args.preset)
    if args.config:
        config = override(config, read_toml(args.config))
    config = override(config, dict(parse_assignment(text) for text in args.set))
    counted = sizes(config.model)
    rate = args.flops or (5e10 if config.preset == "tiny" and args.gpus is None else 4e14)
    console = Console(highlight=False)
    console.print(_parameters(config, counted))
    console.print(_training(config, counted, rate, args.gpus or 1))
    console.print(_serving(config, counted))
    if args.gpus is not None:
        for line in layout(config, counted, args.gpus, args.gpu_memory * GIB):
            console.print(line, soft_wrap=True)
    return 0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    return table


def _parameters(config: RunConfig, counted: Sizes) -> Table:
    model = config.model
    kinds = f"{len(model.kda_layers)} KDA + {len(model.full_attention_layers)} MLA layers"
    table = _table(f"{config.preset}: {kinds}, hidden {model.hidden_size}", "parameters", "total", "share", "active")
    for row in counted.components:
        table.add_row(row.name, f"{row.total:,}", f"{row.total / counted.total:.2%}", f"{row.active:,}")
    table.add_section()
    table.add_row("all", f"{counted.total:,}", "100.00%", f"{counted.active:,}")
    without = counted.active_without_embedding
    table.add_row("active without embedding", "", "", f"{without:,}")
    return table


def _training(config: RunConfig, counted: Sizes, rate: float, devices: int) -> Table:
    data, train = config.data, config.train
    bf16 = train.dtype == "bfloat16" or (train.dtype == "auto" and config.preset != "tiny")
    table = _table("training", "memory and work", "value")
    kept = counted.training_bytes(bf16=bf16)
    for name, value in kept.items():
        if value:
            table.add_row(name, size(value))
    table.add_row("weights, gradients, optimizer", size(sum(kept.values())))
    tokens = train.micro_batch_sequences * data.sequence_length
    activations = counted.activation_bytes(tokens, value_bytes=2 if bf16 else 4, recompute=train.recompute)
    how = ", recomputed" if train.recompute else ""
    table.add_row(f"activations, {tokens:,} tokens{how} (estimate)", size(activations))
    table.add_section()
    flops = counted.training_flops(data.sequence_length, recompute=train.recompute)
    forward = counted.forward_flops(data.sequence_length)
    table.add_row(f"FLOPs per token, forward, at length {data.sequence_length:,}", count(forward))
    table.add_row("FLOPs per token, forward and backward", count(flops))
    budget = train.steps * data.batch_sequences * data.sequence_length
    table.add_row(f"tokens in {train.steps:,} steps of {data.batch_sequences:,} sequences", count(budget))
    seconds = flops * budget / (rate * devices)
    table.add_row(f"time at {rate:.3g} FLOP/s on {devices} device{'s' * (devices > 1)}", _long(seconds))
    return table


def _serving(config: RunConfig, counted: Sizes) -> Table:
    table = _table("serving", "memory", "value")
    experts = counted.component("routed experts").total
    quantised = round(2 * (counted.total - experts) + experts * (0.5 + 1 / 32))
    table.add_row("weights in bf16", size(2 * counted.total))
    table.add_row("weights, routed experts in MXFP4", size(quantised))
    chosen = natural_layout(config.model)
    files = totals(chosen.stored(config.model, published_vision(config.model)))
    table.add_row(f"published files, {chosen.name} layout", f"{files.nbytes:,} B")
    table.add_row("MLA cache per token, bf16", f"{counted.mla_cache_bytes():,} B")
    table.add_row("KDA state per sequence, fp32", size(counted.kda_state_bytes()))
    table.add_row("convolution rows per sequence, bf16", size(counted.conv_state_bytes()))
    fixed = counted.kda_state_bytes() + counted.conv_state_bytes()
    length = config.data.sequence_length
    table.add_row(f"one sequence of {length:,} tokens", size(fixed + length * counted.mla_cache_bytes()))
    return table


def _long(seconds: float) -> str:
    return duration(seconds) if seconds < 2 * 86_400 else f"{seconds / 86_400:,.1f} days"


def layout(config: RunConfig, counted: Sizes, gpus: int, memory: float) -> list[str]:
    """State a simple feasible layout: every rank computes its own sequences, all tensors sharded over all ranks.

    Experts are divided over the largest group that divides both the experts and the GPUs; everything else (and what
    the expert group leaves) is sharded as in ZeRO-3. Each rank holds its share, one gathered layer without its
    experts, and the activations of one sequence.

    Args:
        config: the run.
        counted: its sizes.
        gpus: how many GPUs.
        memory: bytes of one GPU.
    """
    experts, length = config.model.moe.num_experts, config.data.sequence_length
    expert_group = math.gcd(experts, gpus)
    static = sum(counted.training_bytes().values())
    activations = counted.activation_bytes(length, recompute=config.train.recompute)
    dense = counted.total - counted.component("routed experts").total
    gathered = 2 * max(dense // config.model.num_layers, counted.component("embedding").total)
    room = USABLE * memory - activations - gathered
    need = static / gpus + activations + gathered
    accumulate = config.data.batch_sequences / gpus
    lines = [
        f"layout on {gpus} × {size(memory)}: data parallel {gpus} with sharded weights, gradients and optimizer, "
        f"expert parallel {expert_group} ({experts // expert_group} of {experts} experts a rank)",
        f"per GPU: {size(static / gpus)} weights and optimizer + {size(gathered)} gathered + "
        f"{size(activations)} activations (estimate, one sequence of {length:,}) = {size(need)}",
    ]
    if room <= 0:
        advice = "train.recompute=true" if not config.train.recompute else "a shorter data.sequence_length"
        return [*lines, f"does not fit on any number of GPUs: activations alone fill one; try --set {advice}"]
    if need > USABLE * memory:
        return [*lines, f"does not fit: at least {math.ceil(static / room):,} such GPUs are needed"]
    if accumulate < 1:
        idle = f"{gpus} GPUs share {config.data.batch_sequences} sequences a step"
        return [*lines, f"memory fits, but {idle}: raise data.batch_sequences to at least {gpus}"]
    return [*lines, f"fits, with {accumulate:g} sequences a GPU in every optimizer step"]
