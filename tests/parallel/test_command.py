"""``torchrun … -m tercet train`` as a person types it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tercet.data import Corpus
from tercet.train.checkpoint import load_run
from tercet.train.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:one histogram bin holds")

SMALL = (
    "model.hidden_size=32", "model.num_layers=2", "model.full_attention_layers=[1]", "model.intermediate_size=32",
    "model.kda.num_heads=2", "model.kda.head_dim=16", "model.mla.num_heads=2", "model.mla.kv_lora_rank=16",
    "model.mla.q_lora_rank=16", "model.moe.num_experts=4", "model.moe.latent_size=16",
    "model.moe.intermediate_size=16", "data.sequence_length=24", "train.device=cpu", "train.eval_sequences=2",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_torchrun_trains_and_one_process_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["-m", "tercet", "train", "tiny", "--data", str(corpus.root), "--out", str(run), *settings]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    finished = subprocess.run(
        [sys.executable, *launcher, *command, "--steps", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "2 processes share the 2 micro-batches of a step" in finished.stdout
    assert finished.stdout.count("saved step 2") == finished.stdout.count("report:") == 1
    assert load_run(run).step == 2

    from tercet.cli.main import main

    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "train"] == [1, 2, 3]
