"""``tercet checkpoint``: what it prints, what it returns, what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from tercet.checkpoint.comparison import compare_layers, first_divergence
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.inspection import code_histogram, layer_pattern, rule_of, summarize
from tercet.checkpoint.layouts import RULES
from tercet.checkpoint.load import load_model
from tercet.checkpoint.runs import import_checkpoint
from tercet.checkpoint.weights import weights
from tercet.cli.main import main
from tercet.model.names import published_tensors
from tests.checkpoint.miniatures import MINIATURE, editable, published
from tests.checkpoint.test_directory import SHARD_2, edit_shard


def tercet(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_index_of_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = tercet(capsys, "index", "tiny")
    lines = out.splitlines()
    assert code == 0
    assert len({line.split()[-1] for line in lines}) == len(lines)
    assert f"{len(lines)} tensors" in err
    assert tercet(capsys, "index", "tiny", "--out", tmp_path / "i.json")[0] == 0
    places = json.loads((tmp_path / "i.json").read_text())["weight_map"]
    assert sorted(places) == sorted(line.split()[-1] for line in lines)
    (tmp_path / "i.json").write_text("precious")
    code, _, err = tercet(capsys, "index", "tiny", "--out", tmp_path / "i.json")
    assert code == 2
    assert "already exists" in err
    assert (tmp_path / "i.json").read_text() == "precious"
    assert tercet(capsys, "index", "kimi-linear-48b", "--summary")[1].startswith(
        "kimi-linear-48b, kimi-linear layout: 20,493 tensors"
    )
    assert "cannot hold" in tercet(capsys, "index", "tiny", "--layout", "kimi-linear")[2]


def test_k3_index_prints_the_published_totals(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tercet(capsys, "index", "k3", "--summary")
    assert "497,220 tensors, 1,560,860,324,864 bytes, 96 shards" in out


@pytest.mark.parametrize("layout", ["k3", "kimi-linear"])
def test_new_verify_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path, layout: str) -> None:
    target = tmp_path / "mini"
    assert tercet(capsys, "new", target, "--layout", layout, "--preset", "tiny")[0] == 0
    code, out, _ = tercet(capsys, "verify", target)
    assert code == 0
    assert "sound" in out
    assert "note" not in out
    code, out, _ = tercet(capsys, "inspect", target, "--mx")
    assert code == 0
    assert "kKKM" in out
    assert ("scale rule: floor or even" if layout == "k3" else "quantised: 0.00%") in out
    code, _, err = tercet(capsys, "new", target)
    assert code == 2
    assert "already exists" in err


def test_verify_lists_problems(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    edit_shard(directory, SHARD_2, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n])
    code, out, _ = tercet(capsys, "verify", directory)
    assert code == 1
    assert "36 problems" in out
    assert "and 16 more" in out
    assert tercet(capsys, "verify", directory, "--all")[1].count("missing tensor") == 36
    code, _, err = tercet(capsys, "verify", tmp_path)
    assert code == 2
    assert "config.json" in err


def test_import_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tercet(capsys, "import", published("k3"), tmp_path / "run")[0] == 0
    assert tercet(capsys, "verify", tmp_path / "run")[0] == 0
    assert tercet(capsys, "export", "hf", tmp_path / "run", tmp_path / "out")[0] == 0
    code, out, _ = tercet(capsys, "compare", published("k3"), tmp_path / "out")
    assert code == 0
    assert "0 different" in out
    assert tercet(capsys, "export", "hf", tmp_path / "run", tmp_path / "plain", "--experts", "plain")[0] == 0
    assert "0 different" in tercet(capsys, "compare", published("k3"), tmp_path / "plain")[1]


def test_compare_finds_the_first_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = editable("k3", tmp_path)
    name = "language_model.model.layers.2.self_attn.o_proj.weight"
    edit_shard(other, "model-00003-of-000007.safetensors", lambda tensors: tensors[name].mul_(1.25))
    code, out, _ = tercet(capsys, "compare", published("k3"), other)
    assert code == 1
    assert "model.layers.2.self_attn.o_proj.weight: relative 0.25" in out
    assert "1 different" in out
    assert "layer 1 (KDA, MoE): relative distance 0\n" in out
    assert "first divergence beyond 0.0001: layer 2" in out
    assert "layer" not in tercet(capsys, "compare", published("k3"), other, "--no-run")[1].replace("layers", "")
    code, out, _ = tercet(capsys, "compare", published("k3"), published("kimi-linear"))
    assert code == 1
    assert "setting activation" in out


def test_compare_two_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two runs of one preset with other weights differ from the first layer on; a run against itself in nothing."""
    for seed in (1, 2):
        new = ("new", tmp_path / f"mini{seed}", "--preset", "tiny", "--seed", seed, "--no-vision")
        assert tercet(capsys, *map(str, new))[0] == 0
        assert tercet(capsys, "import", tmp_path / f"mini{seed}", tmp_path / f"run{seed}")[0] == 0
    code, out, _ = tercet(capsys, "compare", tmp_path / "run1", tmp_path / "run2")
    assert code == 1
    assert "first divergence beyond 0.0001: layer 0" in out
    code, out, _ = tercet(capsys, "compare", tmp_path / "run1", tmp_path / "run1")
    assert code == 0
    assert "0 different" in out


def test_pinned_routing_separates_values_from_choices() -> None:
    """A tiny push on selection biases reroutes tokens; with the routing pinned no value changes."""
    a, b = load_model(published("k3")), load_model(published("k3"))
    for name, tensor in published_tensors(b):
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.linspace(-1, 1, 6))
    rows = compare_layers(a, b, torch.randint(0, 320, (2, 30)))
    assert first_divergence(rows, 0.0) is None
    assert max(row.rerouted for row in rows) > 0.1
    assert [row.kind for row in rows] == ["KDA, dense", "KDA, MoE", "MLA, MoE", "MLA, MoE", "logits"]


def test_summary_adds_up() -> None:
    directory = CheckpointDirectory.open(published("k3"))
    summary = summarize(directory)
    assert summary.nbytes == sum(size for _, size in summary.dtypes.values())
    assert summary.nbytes == sum(size for _, size in summary.components.values())
    text = sum(weight.numel for weight in weights(MINIATURE))
    vision = sum(summary.components[name][0] for name in ("vision tower", "vision projector"))
    assert summary.weights == text + vision
    experts = sum(weight.numel for weight in weights(MINIATURE) if weight.role == "expert")
    assert summary.quantised_weights == experts == summary.components["routed experts"][0]
    assert summary.components["routed experts"][1] == experts // 2 + experts // 32
    assert layer_pattern(MINIATURE) == "kKMM"


def test_largest_codes_tell_the_rule(tmp_path: Path) -> None:
    from tercet.checkpoint.convert import ModelSource, write_published
    from tercet.checkpoint.layouts import LAYOUTS
    from tercet.checkpoint.miniature import random_model

    model = random_model(MINIATURE)
    for rule in RULES:
        write_published(ModelSource(model), tmp_path / rule, LAYOUTS["k3"], rule=rule)
        histogram = code_histogram(CheckpointDirectory.open(tmp_path / rule))
        assert sum(histogram.values()) == pytest.approx(1)
        assert rule_of(histogram) == ("rceil" if rule == "rceil" else "floor or even")
    assert rule_of({}) == "no quantised blocks"
    assert rule_of({1.0: 1.0}) == "none of even, floor, rceil"


def test_export_of_a_run_in_training_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32 weights of a run come out in the published dtypes, quantised by the stated rule."""
    import_checkpoint(published("k3"), tmp_path / "run", dtype="F32")
    (tmp_path / "run" / "published").rename(tmp_path / "away")
    code, _, _ = tercet(capsys, "export", "hf", tmp_path / "run", tmp_path / "out")
    assert code == 0
    out = CheckpointDirectory.open(tmp_path / "out")
    assert out.dtypes().keys() == {"BF16", "F32", "U8"}
    assert out.vision is None
    code, text, _ = tercet(capsys, "export", "hf", tmp_path / "run", tmp_path / "with", "--base", tmp_path / "away")
    assert code == 0
    assert CheckpointDirectory.open(tmp_path / "with").vision is not None
    assert "verify" in text


@pytest.mark.parametrize("name", ["tiny", "kimi-linear-48b", "k3"])
def test_plan_and_index_agree_on_bytes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    _, out, _ = tercet(capsys, "index", name, "--summary")
    nbytes = out.split(" tensors, ")[1].split(" bytes")[0]
    assert main(["plan", name]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "published files" in line)
    assert f"{nbytes} B" in row
