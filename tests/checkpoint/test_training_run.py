"""Runs as the trainer writes them, and runs as import writes them, seen from the other room."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.load import load_model
from tercet.checkpoint.runs import export_checkpoint, import_checkpoint
from tercet.config import RunConfig
from tercet.data import Tokenizer
from tercet.errors import CheckpointError
from tercet.model import CausalLM, build
from tercet.model.names import published_tensors
from tercet.train.checkpoint import load_run, save_checkpoint, write_config
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
