"""Check every operator against fp64, then time it beside the torch tier and the peers that are installed.

    python bench/ops/run.py [--only attn_res,experts] [--seconds 1.0] [--out results]

Writes ``ops.md`` and ``ops.json`` under --out. A failed check stops the run: no time is printed for a wrong result.
Without a GPU tiny shapes run on the torch tier, which shows only that the script works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import Case, graphed, measure

from tercet.errors import TercetWarning

MODULES = ("attn_res", "newton_schulz", "cross_entropy", "experts", "elementwise", "sums", "attention", "kda")


def main(argv: list[str] | None = None) -> int:
    """Run the chosen modules; returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODULES), help="modules of this folder, comma-separated")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one row of the table (default 1)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for ops.md and ops.json")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in names if not (Path(__file__).parent / f"{name}.py").exists()]:
        if args.only != ",".join(MODULES):
            parser.error(f"no such module: {', '.join(unknown)}; there are {', '.join(MODULES)}")
        names = [name for name in names if name not in unknown]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warnings.simplefilter("error" if device.type == "cuda" else "ignore", TercetWarning)
    args.out.mkdir(parents=True, exist_ok=True)
    rows, wrong = [], False
    for name in names:
        torch.manual_seed(0)
        for case in importlib.import_module(name).cases(device):
            row = _row(case, device, args.seconds)
            wrong |= not row["right"]
            rows.append(row)
            print(_line(row), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    (args.out / "ops.json").write_text(json.dumps({"machine": _machine(device), "rows": rows}, indent=1))
    table = [_machine(device), "", *_HEAD, *map(_line, rows), ""]
    (args.out / "ops.md").write_text("\n".join(table))
    return int(wrong)


def _row(case: Case, device: torch.device, seconds: float) -> dict:
    errors = case.check()
    row = {"case": case.name, "right": True, "floor_ms": case.floor, "errors": {k: list(v) for k, v in errors.items()}}
    if bad := {k: v for k, v in errors.items() if not v[0] <= v[1]}:
        print(f"WRONG {case.name}: {bad}", file=sys.stderr)
        return row | {"right": False, "times": {}}
    contenders = {"ours": case.ours, **case.others}
    if case.graph and device.type == "cuda":
        contenders["ours, graph"] = graphed(case.ours)
    times = measure(contenders, seconds=seconds, device=device)
    row["times"] = {
        name: {"ms": t.median, "quartiles": t.quartiles, "peak_mib": t.peak_bytes / 2**20} for name, t in times.items()
    }
    return row


_HEAD = [
    "| case | ours ms (quartiles) | floor ms | others ms (× ours) | worst error / limit | peak MiB: ours, others |",
    "|---|---|---|---|---|---|",
]


def _line(row: dict) -> str:
    if not row["right"]:
        return f"| {row['case']} | WRONG | | | {row['errors']} | |"
    times = dict(row["times"])
    ours = times.pop("ours")
    low, high = ours["quartiles"]
    others = "; ".join(f"{name} {t['ms']:.3f} ({t['ms'] / ours['ms']:.2f}×)" for name, t in times.items())
    worst = max(row["errors"].values(), key=lambda e: e[0] / e[1], default=None)
    error = f"{worst[0]:.1e} / {worst[1]:.0e}" if worst else ""
    peaks = ", ".join(f"{t['peak_mib']:.0f}" for t in row["times"].values())
    mine = f"{ours['ms']:.3f} ({low:.3f}–{high:.3f})"
    return f"| {row['case']} | {mine} | {row['floor_ms']:.3f} | {others} | {error} | {peaks} |"


def _machine(device: torch.device) -> str:
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}, triton {triton}"


if __name__ == "__main__":
    sys.exit(main())
