"""Runs as the trainer writes them, and runs as import writes them, seen from the other room."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercet.checkpoint import runs
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.load import load_model
from tercet.checkpoint.runs import export_checkpoint, import_checkpoint
from tercet.checkpoint.state import checkpoints, number_files, verify
from tercet.cli.main import main
from tercet.config import RunConfig
from tercet.data import Tokenizer, prepare
from tercet.errors import CheckpointError, ConfigError
from tercet.model import CausalLM, build
from tercet.model.names import published_tensors
from tercet.train.checkpoint import (
    check_same_run,
    load_checkpoint,
    load_run,
    read_config,
    save_checkpoint,
    write_config,
)
from tests.checkpoint.miniatures import MINIATURE, MINIATURES, published

TOKENIZER = Tokenizer({bytes([n]): n for n in range(256)})


def write_run(path: Path, name: str, *, steps: tuple[int, ...] = (1, 2)) -> CausalLM:
    """Write a run of the miniature called *name* through the trainer's own functions; returns its last model."""
    config = RunConfig(preset="miniature", model=replace(MINIATURES[name], vocab_size=512))
    path.mkdir()
    write_config(path, config)
    TOKENIZER.save(path / "tokenizer")
    for step in steps:
        model = build(config.model, seed=step)
        save_checkpoint(path, step, model, {"parameters": {}, "skipped_in_a_row": 0}, {}, keep=2)
    return model


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_a_training_run_is_exported(tmp_path: Path, name: str) -> None:
    model = write_run(tmp_path / "run", name)
    assert CheckpointDirectory.open(tmp_path / "run").problems() == []
    export_checkpoint(tmp_path / "run", tmp_path / "out", experts="plain", dtype="F32" if name != "k3" else None)
    exported = load_model(tmp_path / "out")
    for (own, value), (other, copy) in zip(published_tensors(model), published_tensors(exported)):
        assert own == other
        if name == "k3":
            value = value.bfloat16().float() if not torch.equal(value, copy) else value
        assert torch.equal(value, copy), own
    assert Tokenizer.load(tmp_path / "out").fingerprint == TOKENIZER.fingerprint


def test_the_newest_or_a_named_checkpoint(tmp_path: Path) -> None:
    newest = write_run(tmp_path / "run", "k3")
    older = build(newest.config, seed=1)
    tokens = torch.arange(9)[None]
    assert torch.equal(load_model(tmp_path / "run")(tokens), newest(tokens))
    named = load_model(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert torch.equal(named(tokens), older(tokens))
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "old", experts="plain")
    assert (tmp_path / "old" / "tiktoken.model").is_file()


def test_a_run_without_a_finished_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "k3", steps=(1,))
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="without a finished checkpoint"):
        load_model(tmp_path / "run")


def test_the_trainer_opens_what_import_writes(tmp_path: Path) -> None:
    source = tmp_path / "published"
    write_run(tmp_path / "run", "k3")
    export_checkpoint(tmp_path / "run", source)
    import_checkpoint(source, tmp_path / "imported")
    loaded = load_run(tmp_path / "imported")
    assert loaded.step == 0
    assert loaded.config.model == replace(MINIATURE, vocab_size=512)
    assert loaded.tokenizer.fingerprint == TOKENIZER.fingerprint
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded.model(tokens), load_model(source)(tokens))


def test_an_imported_run_is_cut_into_files_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "number_files", functools.partial(number_files, max_bytes=30_000))
    import_checkpoint(published("k3"), tmp_path / "run")
    (checkpoint,) = checkpoints(tmp_path / "run")
    sizes = [path.stat().st_size for path in checkpoint.glob("model-*-of-*.safetensors")]
    assert len(sizes) > 5
    assert all(size < 40_000 for size in sorted(sizes)[:-2])  # embedding and head are larger than a file
    verify(checkpoint)
    tokens = torch.arange(9)[None]
    assert torch.equal(load_model(tmp_path / "run")(tokens), load_model(published("k3"))(tokens))


@pytest.mark.parametrize(("name", "dtype"), [("kimi-linear", "F32"), ("k3", None)])
def test_trained_published_imported_gives_the_same_values(tmp_path: Path, name: str, dtype: str | None) -> None:
    """DCP → published layout → run → DCP; the K3 layout is bf16, so its first trip starts from bf16 values."""
    model = write_run(tmp_path / "run", name)
    if dtype is None:
        with torch.no_grad():
            for _, tensor in published_tensors(model):
                tensor.copy_(tensor.bfloat16())
        save_checkpoint(tmp_path / "run", 3, model, {"parameters": {}, "skipped_in_a_row": 0}, {}, keep=1)
    export_checkpoint(tmp_path / "run", tmp_path / "out", experts="plain", dtype=dtype)
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    again = build(model.config, seed=9)
    load_checkpoint(checkpoints(tmp_path / "again")[-1], again)
    for (own, value), (_, copy) in zip(published_tensors(model), published_tensors(again)):
        assert torch.equal(value, copy), own


def test_an_imported_run_is_trained_with_a_fresh_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under settings of one's own as long as nothing has been trained; afterwards they are the run's."""
    write_run(tmp_path / "first", "k3")
    export_checkpoint(tmp_path / "first", tmp_path / "published", experts="plain")
    run = import_checkpoint(tmp_path / "published", tmp_path / "run")
    weights = load_model(run).state_dict()
    (tmp_path / "text.txt").write_text("a few words that are said again and again\n" * 60)
    prepare([tmp_path / "text.txt"], tmp_path / "data", tokenizer=TOKENIZER, validation=0)
    settings = {
        "train.steps": 2, "train.device": "cpu", "train.micro_batch_sequences": 1, "train.checkpoint_every": 1,
        "data.batch_sequences": 1, "data.sequence_length": 16, "optim.lr": 1e-5,
    }  # fmt: skip
    words = ["train", "--resume", str(run), "--data", str(tmp_path / "data")]
    assert main([*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]) == 0
    said = capsys.readouterr().out
    assert "starts from imported weights, with a fresh optimizer" in said
    assert "saved step 2" in said
    moved = load_run(run)
    assert moved.step == 2
    name = "model.layers.0.self_attn.o_proj.weight"
    change = float((moved.model.state_dict()[name] - weights[name]).abs().max())
    assert 0 < change < 1e-4  # two steps at a tiny rate away from the imported values
    assert main([*words, "--set", "optim.lr=2e-5", "--steps", "3"]) == 2
    assert "was started with other settings" in capsys.readouterr().err
    assert main([*words, "--steps", "3"]) == 0


def test_the_model_of_an_imported_run_is_fixed(tmp_path: Path) -> None:
    run = import_checkpoint(published("k3"), tmp_path / "run")
    config = read_config(run)
    check_same_run(run, replace(config, optim=replace(config.optim, lr=7e-3)))
    with pytest.raises(ConfigError, match=r"model\.situ_beta"):
        check_same_run(run, replace(config, model=replace(config.model, situ_beta=3.0)))


def test_fine_tuning_an_imported_checkpoint(tmp_path: Path) -> None:
    """Continue an imported run with the trainer's own save; the export is the base plus what changed."""
    import_checkpoint(published("k3"), tmp_path / "run")
    model = load_model(tmp_path / "run")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(0.5)
    save_checkpoint(tmp_path / "run", 7, model, {"parameters": {}, "skipped_in_a_row": 0}, {}, keep=2)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    old, new = CheckpointDirectory.open(published("k3")), CheckpointDirectory.open(tmp_path / "out")
    changed = [name for name in old.entries if not torch.equal(old.tensor(name), new.tensor(name))]
    assert changed == ["language_model.model.norm.weight"]
    assert (tmp_path / "out" / "config.json").read_bytes() == (published("k3") / "config.json").read_bytes()
