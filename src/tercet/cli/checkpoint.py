"""Published checkpoints and training runs: check, look into, compare, convert.

tercet checkpoint verify DIR              names, shapes, dtypes and byte ranges against the configuration; headers only
tercet checkpoint inspect DIR [--mx]      layers, dtypes, bytes by component, quantised share
tercet checkpoint compare A B             weight by weight, then layer by layer with the routing pinned
tercet checkpoint import DIR RUN          published checkpoint -> training run
tercet checkpoint export hf SRC OUT       run or checkpoint -> published layout
tercet checkpoint export gguf SRC FILE    run or checkpoint -> llama.cpp
tercet checkpoint index k3                the whole published index, generated from the configuration
tercet checkpoint new OUT --layout k3     a layout-exact miniature with random weights
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from tercet.errors import CheckpointError, ConfigError
from tercet.presets import PRESETS, preset
from tercet.util.text import count, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tercet.checkpoint.directory import CheckpointDirectory
    from tercet.checkpoint.layouts import StoredTensor

LAYOUT_NAMES = ("k3", "kimi-linear")
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-verbs and their flags."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = verbs.add_parser("verify", help="check a checkpoint from its headers")
    verify.add_argument("directory", metavar="DIR")
    verify.add_argument("--all", action="store_true", help=f"list every problem, not the first {SHOWN}")
    inspect = verbs.add_parser("inspect", help="what a checkpoint consists of")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--mx", action="store_true", help="read the MXFP4 codes: which scale rule wrote them?")
    compare = verbs.add_parser("compare", help="compare two checkpoints")
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument(
        "--no-run", action="store_true", help="compare weights only, even if both models fit in memory"
    )
    compare.add_argument("--tokens", type=int, default=32, help="random tokens to run (default: 32)")
    compare.add_argument("--seed", type=int, default=0, help="of the tokens")
    compare.add_argument("--tolerance", type=float, default=1e-4, help="relative distance that counts as divergence")
    bring = verbs.add_parser("import", help="published checkpoint to training run")
    bring.add_argument("directory", metavar="DIR")
    bring.add_argument("run", metavar="RUN")
    bring.add_argument("--dtype", choices=("BF16", "F32"), help="of the matrices; default: as published")
    _add_export(verbs.add_parser("export", help="run or checkpoint to a published layout or GGUF"))
    index = verbs.add_parser("index", help="the published index of a preset, generated")
    index.add_argument("preset", metavar="PRESET", help=f"one of: {', '.join(PRESETS)}")
    index.add_argument("--layout", choices=LAYOUT_NAMES, help="default: the preset's family")
    index.add_argument("--summary", action="store_true", help="totals only")
    index.add_argument("--out", metavar="FILE", help="write model.safetensors.index.json here instead of listing")
    new = verbs.add_parser("new", help="write a miniature with random weights")
    new.add_argument("out", metavar="OUT")
    new.add_argument("--layout", choices=LAYOUT_NAMES, default="k3")
    new.add_argument("--preset", default="tiny", help=f"sizes: one of {', '.join(PRESETS)} (default: tiny)")
    new.add_argument("--seed", type=int, default=0)
    new.add_argument("--no-vision", action="store_true", help="leave the vision tensors out of a K3 miniature")


def _add_export(export: argparse.ArgumentParser) -> None:
    from tercet.checkpoint.layouts import RULES

    export.add_argument("format", choices=("hf", "gguf"))
    export.add_argument("source", metavar="SRC", help="run, one checkpoint of a run, or published directory")
    export.add_argument("out", metavar="OUT", help="new directory, or new .gguf file")
    export.add_argument("--layout", choices=LAYOUT_NAMES, help="default: the model's family")
    export.add_argument(
        "--experts",
        choices=("keep", "mxfp4", "plain"),
        default="keep",
        help="routed experts: as the base or source has them (K3: MXFP4), quantised, or plain",
    )
    export.add_argument("--rule", choices=RULES, default=RULES[0], help="MXFP4 scale rule (default: even)")
    export.add_argument("--dtype", choices=("BF16", "F16", "F32"), help="of plain matrices; default: base's, else BF16")
    export.add_argument("--base", metavar="DIR", help="published checkpoint the run started from, if it kept none")


def run(args: argparse.Namespace) -> int:
    """Carry out one action."""
    return _ACTIONS[args.action](args)


def _verify(args: argparse.Namespace) -> int:
    from tercet.checkpoint.directory import CheckpointDirectory

    directory = CheckpointDirectory.open(args.directory, strict=False)
    problems = directory.problems()
    shown = problems if args.all else problems[:SHOWN]
    for line in shown:
        print(line)
    if len(shown) < len(problems):
        print(f"and {len(problems) - len(shown):,} more (--all lists them)")
    print(_headline(directory))
    if directory.skipped:
        print(f"note: {len(directory.skipped)} tensors of a multi-token-prediction layer are there but not configured")
    for note in _copies(directory):
        print(f"note: {note}; the bytes are compared when they are read")
    if misplaced := directory.misplaced() if not problems and directory.layout.name == "k3" else 0:
        print(f"note: {misplaced:,} tensors lie in other shards than in the published placement")
    print(f"{len(problems):,} problems" if problems else "sound: every tensor is there, with its shape and dtype")
    return 1 if problems else 0


def _copies(directory: CheckpointDirectory) -> list[str]:
    return [f"{name} repeats {copy.weight.name}" for name, copy in directory.copies.items() if copy.weight]


def _headline(directory: CheckpointDirectory) -> str:
    from tercet.checkpoint.inspection import layer_pattern

    return (
        f"{directory.path}: {directory.layout.name} layout, {len(directory.entries):,} tensors, "
        f"{directory.nbytes:,} bytes, {len(directory.headers)} shards, layers {layer_pattern(directory.model)}"
    )


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from tercet.checkpoint.directory import CheckpointDirectory
    from tercet.checkpoint.inspection import code_histogram, rule_of, summarize

    directory = CheckpointDirectory.open(args.directory, strict=False)
    summary = summarize(directory)
    console = Console(highlight=False)
    console.print(_headline(directory), soft_wrap=True)
    console.print("K = KDA, M = MLA; lower case: dense feed-forward", style="dim")
    table = Table("component", "weights", "bytes", "share")
    for name, (weights, nbytes) in sorted(summary.components.items(), key=lambda item: -item[1][1]):
        table.add_row(name, f"{weights:,}", f"{nbytes:,}", f"{nbytes / max(summary.nbytes, 1):.2%}")
    table.add_section()
    table.add_row("all", f"{summary.weights:,}", f"{summary.nbytes:,}", "100.00%")
    console.print(table)
    for dtype, (tensors, nbytes) in summary.dtypes.items():
        console.print(f"{dtype:<5} {tensors:>9,} tensors {size(nbytes):>12}")
    console.print(
        f"quantised: {summary.quantised_share:.2%} of the weights ({count(summary.quantised_weights)}) in MXFP4"
    )
    if problems := directory.problems():
        console.print(f"{len(problems):,} problems; see: tercet checkpoint verify {args.directory}")
    elif args.mx:
        histogram = code_histogram(directory)
        shares = ", ".join(f"{code:g}: {share:.1%}" for code, share in histogram.items())
        console.print(f"largest code of a block: {shares or 'none'}; scale rule: {rule_of(histogram)}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from tercet.checkpoint.comparison import compare_weights
    from tercet.checkpoint.directory import CheckpointDirectory
    from tercet.util.settings import difference

    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be positive")
    a, b = CheckpointDirectory.open(args.a), CheckpointDirectory.open(args.b)
    for line in (settings := difference(a.model, b.model)):
        print(f"setting {line}")
    report = compare_weights(a, b)
    changed = sorted(report.differences, key=lambda row: (row.kind == "value", -row.relative))
    for row in changed[:SHOWN]:
        detail = f"relative {row.relative:.3g}, largest {row.largest:.3g}" if row.kind == "value" else row.kind
        print(f"{row.name}: {detail}")
    if len(changed) > SHOWN:
        print(f"and {len(changed) - SHOWN:,} more")
    print(f"{report.same:,} weights equal, {len(changed):,} different")
    if changed and not args.no_run and not settings:
        _compare_layers(args, a, b)
    return 1 if changed or settings else 0


def _compare_layers(args: argparse.Namespace, a: CheckpointDirectory, b: CheckpointDirectory) -> None:
    import torch

    from tercet.checkpoint.comparison import compare_layers, first_divergence
    from tercet.checkpoint.load import load_model
    from tercet.checkpoint.weights import weights

    needed = 2 * 4 * sum(weight.numel for weight in weights(a.model))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * free:
        print(f"not run: two models in fp32 need {size(needed)}, {size(free)} of memory are free")
        return
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(0, a.model.vocab_size, (1, args.tokens), generator=generator)
    rows = compare_layers(load_model(a), load_model(b), tokens)
    for row in rows:
        name = row.kind if row.kind == "logits" else f"layer {row.layer} ({row.kind})"
        rerouted = f", {row.rerouted:.1%} of tokens would be routed otherwise" if row.rerouted else ""
        print(f"{name}: relative distance {row.relative:.3g}{rerouted}")
    if (found := first_divergence(rows, args.tolerance)) is None:
        print(f"no divergence beyond {args.tolerance:g} on {args.tokens} tokens")
    else:
        where = "logits" if found.kind == "logits" else f"layer {found.layer}"
        print(f"first divergence beyond {args.tolerance:g}: {where}")


def _import(args: argparse.Namespace) -> int:
    from tercet.checkpoint.directory import CheckpointDirectory
    from tercet.checkpoint.runs import import_checkpoint

    path = import_checkpoint(args.directory, args.run, dtype=args.dtype)
    for note in _copies(CheckpointDirectory.open(args.directory)):
        print(f"{note}, byte for byte; it is held once, and written twice on export")
    print(f"wrote {path}; next: tercet checkpoint inspect {path}")
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.format == "gguf":
        if args.layout or args.base:
            raise ConfigError("--layout and --base belong to 'export hf'; a GGUF file takes neither")
        from tercet.checkpoint.gguf import export_gguf

        path = export_gguf(args.source, args.out, experts=args.experts, rule=args.rule, dtype=args.dtype)
        print(f"wrote {path}")
        return 0
    from tercet.checkpoint.runs import export_checkpoint

    path = export_checkpoint(
        args.source,
        args.out,
        layout_name=args.layout,
        experts=args.experts,
        dtype=args.dtype,
        rule=args.rule,
        base=args.base,
    )
    print(f"wrote {path}; next: tercet checkpoint verify {path}")
    return 0


def _index(args: argparse.Namespace) -> int:
    from tercet.checkpoint.layouts import index, layout, natural_layout, published_vision, totals
    from tercet.checkpoint.published_config import check_expressible
    from tercet.util.files import write_json

    if args.out and os.path.lexists(args.out):
        raise CheckpointError(f"{args.out} already exists; choose another file, or remove it first")
    config = preset(args.preset).model
    chosen = layout(args.layout) if args.layout else natural_layout(config)
    check_expressible(chosen, config)
    vision = published_vision(config) if chosen.name == "k3" else None
    shards = chosen.shard_count(config, vision)
    listing = not (args.out or args.summary)

    def tensors() -> Iterator[StoredTensor]:
        for tensor in chosen.stored(config, vision):
            if listing:
                shape = "×".join(map(str, tensor.shape))
                print(f"{chosen.shard_name(tensor.shard, shards)}  {tensor.dtype:<4} {shape:<14} {tensor.name}")
            yield tensor

    counted = totals(tensors())
    if args.out:
        write_json(args.out, index(chosen, config, vision))
    print(
        f"{args.preset}, {chosen.name} layout: {counted.tensors:,} tensors, {counted.nbytes:,} bytes, {shards} shards",
        file=sys.stderr if listing else sys.stdout,
    )
    return 0


def _new(args: argparse.Namespace) -> int:
    from tercet.checkpoint.layouts import layout
    from tercet.checkpoint.miniature import as_kimi_linear, write_miniature

    config = preset(args.preset).model
    if args.layout == "kimi-linear" and config.attn_res_block_size is not None:
        config = as_kimi_linear(config)
    write_miniature(args.out, layout(args.layout), config, seed=args.seed, vision=not args.no_vision)
    print(f"wrote {args.out}; next: tercet checkpoint verify {args.out}")
    return 0


_ACTIONS = {
    "verify": _verify,
    "inspect": _inspect,
    "compare": _compare,
    "import": _import,
    "export": _export,
    "index": _index,
    "new": _new,
}
