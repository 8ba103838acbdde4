"""Show what this machine has, and which tier of every operator runs on it and why not a faster one."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tercet
from tercet.ops import OPERATORS
from tercet.ops.registry import Operator, import_error, obstacle
from tercet.util.text import size

OPTIONAL: dict[str, tuple[str, str]] = {
    "pyarrow": ("data", "parquet files"),
    "tensorboard": ("trackers", "TensorBoard logs"),
    "trackio": ("trackers", "trackio logs"),
    "wandb": ("trackers", "Weights & Biases logs"),
    "transformers": ("dev", "parity tests"),
}
"""Optional packages: the extra that brings each, and what it is for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags (none)."""


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    console = Console(highlight=False)
    console.print(_machine())
    console.print(_operators())
    console.print(_packages())
    return 0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def version(package: str) -> str | None:
    """Return the installed version of *package*, or None; nothing is imported."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "present"


def _machine() -> Table:
    table = _table("machine", "what", "value")
    table.add_row("tercet", tercet.__version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", torch.__version__)
    table.add_row("triton", version("triton") or "not installed: the triton tiers cannot run")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    table.add_row("CPU", f"{cores} cores, torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        reason = "no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
        table.add_row("GPU", f"none: {reason}")
    for n in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(n)
        table.add_row(
            f"GPU {n}", f"{device.name}, {size(device.total_memory)}, compute capability {device.major}.{device.minor}"
        )
    return table


def triton_obstacle(operator: Operator) -> str | None:
    """Return why the triton tier of *operator* cannot run on this machine, whatever the inputs; None if it can."""
    if operator.triton_module is None:
        return "it has none"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        return "no CUDA device, and TRITON_INTERPRET is not 1"
    if not interpreted and (reason := obstacle(torch.device("cuda"))):
        return reason
    error = import_error(operator.name)
    return error and f"its module cannot be imported: {error}"


def _operators() -> Table:
    table = _table("operators", "operator", "tiers", "runs here on", "why not triton")
    for name, operator in sorted(OPERATORS.items()):
        obstacle = triton_obstacle(operator)
        general = "torch" if operator.torch_tier is not None else "reference"
        here = general if obstacle else f"triton where it accepts the inputs, else {general}"
        table.add_row(name, ", ".join(operator.tiers()), here, escape(obstacle or ""))
    return table


def _packages() -> Table:
    table = _table("optional packages", "package", "version", "for", "install with")
    for package, (extra, purpose) in OPTIONAL.items():
        found = version(package)
        table.add_row(package, found or "—", purpose, "" if found else escape(f"pip install 'tercet[{extra}]'"))
    return table
