"""What each mechanism is worth in the tiny run: train it with one mechanism replaced, compare the held-out bits.

All arms see the same tokens in the same order from the same seed for the same number of steps; parameters are not
matched, and one seed is one sample, so read differences below about 0.01 as noise.

    python bench/ablations.py --data data/demo [--steps 150] [--only attn_res,muon] [--jobs 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from typing import Any

import torch

from tercet.config import RunConfig
from tercet.data import Corpus
from tercet.errors import TercetWarning
from tercet.eval.compression import bits_per_byte
from tercet.presets import preset
from tercet.train.loop import Trainer
from tercet.util.settings import override

ARMS: dict[str, dict[str, Any]] = {
    "everything": {},
    "no KDA: every layer MLA": {"model.full_attention_layers": [0, 1, 2, 3]},
    "no MLA: every layer KDA": {"model.full_attention_layers": []},
    "softplus decay gate": {"model.kda.gate_lower_bound": None},
    "no short convolution": {"model.kda.short_conv_kernel_size": 1},
    "low-rank KDA output gate": {"model.kda.full_rank_gate": False},
    "no MLA output gate": {"model.mla.output_gate": False},
    "no Attention Residuals": {"model.attn_res_block_size": None},
    "no latent norm": {"model.moe.latent_norm": False},
    "no latent: full-width experts": {"model.moe.latent_size": None, "model.moe.latent_norm": False},
    "SiLU instead of SiTU": {"model.activation": "silu"},
    "no shared expert": {"model.moe.num_shared_experts": 0},
    "no balancing": {"balance.kind": "none"},
    "sign rule instead of QB": {"balance.kind": "sign"},
    "auxiliary loss instead of QB": {"balance.kind": "aux"},
    "whole-matrix Muon": {"optim.muon.head_group": 0},
    "AdamW instead of Muon": {"optim.matrix_optimizer": "adamw"},
    "WSD instead of cosine": {"schedule.kind": "wsd"},
}


def train_arm(job: tuple[str, str, int, int]) -> tuple[str, float, float, int]:
    """Train one arm on one core and return its held-out bits per byte, last MaxVio and parameters."""
    name, data, steps, windows = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", TercetWarning)
    corpus = Corpus.open(data)
    base: RunConfig = override(preset("tiny"), {"model.vocab_size": corpus.vocab_size, "data.path": data})
    config = override(base, {"train.steps": steps, "train.workers": 1, **ARMS[name]})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(config, corpus, scratch)
        violations = []
        for _ in range(steps):
            row = trainer.train_step()
            violations = [entry["max_violation"] for entry in row["balance"].values()]
        trainer.model.eval()
        score = bits_per_byte(trainer.model, corpus, sequence_length=config.data.sequence_length, limit=windows)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return name, score.bits_per_byte, max(violations, default=0.0), parameters


def main() -> None:
    """Run the chosen arms and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="corpus written by `tercet demo` or `tercet data prepare`")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--windows", type=int, default=128, help="validation windows to score")
    parser.add_argument("--jobs", type=int, default=2, help="arms side by side, one core each")
    parser.add_argument("--only", help="comma-separated beginnings of arm names; the first arm always runs")
    args = parser.parse_args()
    chosen = [
        name
        for name in ARMS
        if not args.only or name == "everything" or any(name.startswith(part) for part in args.only.split(","))
    ]
    jobs = [(name, args.data, args.steps, args.windows) for name in chosen]
    print("| arm | held-out bits per byte | difference | largest MaxVio of the last step | parameters |")
    print("|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        base: float | None = None
        for name, bits, violation, parameters in pool.imap(train_arm, jobs):
            base = bits if base is None else base
            print(f"| {name} | {bits:.4f} | {bits - base:+.4f} | {violation:.2f} | {parameters:,} |", flush=True)


if __name__ == "__main__":
    main()
