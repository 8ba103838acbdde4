"""``tercet bench``: the step is timed by phase, and the operator script checks before it times."""

import json

import pytest
import torch

from tercet.cli.main import main
from tercet.presets import preset
from tercet.train.timing import measure_step
from tercet.util.settings import override

SMALL = {"data.sequence_length": 32, "data.batch_sequences": 2, "train.micro_batch_sequences": 1}


def test_train_prints_rates_and_phases(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    flags = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    assert main(["bench", "train", "tiny", "--steps", "1", "--peak", "1e12", *flags]) == 0
    out = capsys.readouterr().out
    for word in ("tokens per second", "MFU of 1T", "KDA", "MLA", "MoE", "AttnRes", "loss", "optimizer", "rest"):
        assert word in out


@pytest.mark.parametrize("recompute", [False, True])
def test_phases_cover_the_step_and_leave_the_model_alone(recompute):
    config = override(preset("tiny"), SMALL | {"train.recompute": recompute})
    timing = measure_step(config, torch.device("cpu"), steps=1)
    assert timing.tokens == 64
    assert all(seconds >= 0 for phase, seconds in timing.phases.items() if phase != "rest")
    assert sum(timing.phases.values()) > 0
    from tercet.model import decoder
    from tercet.ops import attn_res

    assert decoder.attn_res is attn_res


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--peak", "-1"], "must be positive"),
        (["--set", "data.batch_sequences=3", "--set", "train.micro_batch_sequences=2"], "must be a multiple"),
    ],
)
def test_nonsense_is_refused(flags, message, capsys):
    assert main(["bench", "train", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err


def test_ops_writes_a_table(tmp_path, capsys):
    assert main(["bench", "ops", "--only", "newton_schulz", "--seconds", "0.01", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert len(rows) == 3
    assert all(row["right"] and row["times"]["ours"]["ms"] > 0 for row in rows)
    assert "Newton–Schulz" in (tmp_path / "ops.md").read_text()
