"""Load a large sharded checkpoint and see that memory holds the model and one shard, no more.

    python bench/checkpoint_load.py --gigabytes 10

Writes a synthetic K3-layout checkpoint of about that size (random weights; ``--experts mxfp4`` packs the experts,
whose model is then 3.8 times as large), drops it from the page cache where the system allows, loads it in a fresh
process into a bf16 model with a progress bar, and compares the peak resident memory of that process with model +
largest shard + what the interpreter takes before loading.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tercet.checkpoint.convert import write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import LAYOUTS, totals
from tercet.checkpoint.load import load_model
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.weights import Weight
from tercet.config import ModelConfig
from tercet.model.names import published_tensors
from tercet.presets import base_model
from tercet.util.text import size


def synthetic_config(gigabytes: float, packed: bool) -> ModelConfig:
    """Return a K3-shaped model with as many experts as bring its files to about *gigabytes* · 10⁹ bytes."""

    def build(experts: int) -> ModelConfig:
        config = base_model()
        moe = replace(config.moe, num_experts=experts, intermediate_size=1024, latent_size=1024)
        return replace(config, hidden_size=2048, moe=moe)

    def nbytes(experts: int) -> int:
        return totals(LAYOUTS["k3"].stored(build(experts), quantised=packed)).nbytes

    low, step = nbytes(8), (nbytes(16) - nbytes(8)) / 8
    return build(max(8, 8 + round((gigabytes * 1e9 - low) / step)))


class RandomSource:
    """Random weights, made when asked for: nothing of the checkpoint is ever in memory as a whole."""

    def __init__(self, model: ModelConfig, packed: bool):
        self.model, self.vision, self.packed = model, None, packed
        self.generator = torch.Generator().manual_seed(0)

    def is_packed(self, weight: Weight) -> bool:
        """Experts are packed if that was asked for."""
        return self.packed and weight.role == "expert"

    def weight(self, weight: Weight) -> Tensor | PackedWeight:
        """Return random values."""
        if not self.is_packed(weight):
            block = torch.randn(2**16, generator=self.generator) * 0.02
            return block.repeat(-(-weight.numel // 2**16))[: weight.numel].view(weight.shape)
        outputs, inputs = weight.shape
        packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=self.generator)
        return PackedWeight(packed, torch.full((outputs, inputs // 32), 120, dtype=torch.uint8))

    def tensor(self, name: str) -> Tensor:
        """There are no vision tensors."""
        raise KeyError(name)


def forget_cached_pages(directory: Path) -> None:
    """Ask the system to drop the files' pages, so that loading reads the disk."""
    for path in directory.iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(path: Path) -> None:
    """Load in this process and print the figures as JSON."""
    before = peak()
    directory = CheckpointDirectory.open(path)
    opened = peak()
    started = time.perf_counter()
    model = load_model(directory, dtype=torch.bfloat16, show=True)
    seconds = time.perf_counter() - started
    figures = {
        "seconds": seconds,
        "files": directory.nbytes,
        "model": sum(tensor.nbytes for _, tensor in published_tensors(model)),
        "shard": max(header.file_bytes for header in directory.headers.values()),
        "interpreter": before,
        "headers": opened - before,
        "peak": peak(),
    }
    print(json.dumps(figures))


def main() -> int:
    """Write, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--experts", choices=("plain", "mxfp4"), default="plain", help="form in the files")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        load(args.load)
        return 0
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        path = Path(root) / "synthetic"
        packed = args.experts == "mxfp4"
        source = RandomSource(synthetic_config(args.gigabytes, packed), packed)
        write_published(source, path, LAYOUTS["k3"], experts=args.experts, show=True)
        forget_cached_pages(path)
        command = [sys.executable, __file__, "--load", str(path)]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(result.stdout)
    allowed = figures["interpreter"] + figures["headers"] + figures["model"] + figures["shard"]
    rate = figures["files"] / figures["seconds"]
    print(f"files {size(figures['files'])}, largest shard {size(figures['shard'])}, model {size(figures['model'])}")
    print(f"loaded in {figures['seconds']:.1f} s ({size(rate)}/s)")
    print(f"peak memory {size(figures['peak'])}; model + one shard + interpreter {size(allowed)}")
    fine = figures["peak"] <= 1.02 * allowed
    print("within bounds" if fine else "OUT OF BOUNDS")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
