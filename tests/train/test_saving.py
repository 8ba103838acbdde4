"""Saving beside training: who waits for what, what a crash or a full disk leaves, which formats are read."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tercet.checkpoint import distributed, state
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.state import Piece, checkpoints, describe, number_files, portions, verify
from tercet.config import RunConfig
from tercet.data import Corpus
from tercet.errors import CheckpointError, StorageError
from tercet.model import build
from tercet.train.checkpoint import load_checkpoint, load_run, state_tensors
from tercet.train.loop import Trainer

# At 32 dimensions an untrained router scores all tokens alike, so one histogram bin holds most of them.
pytestmark = pytest.mark.filterwarnings("ignore:one histogram bin holds")

WAIT = 30.0


class Gate:
    """Holds the background writer until it is opened, and notes what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.reached = threading.Event(), threading.Event()
        self.events: list[str] = []
        write = distributed.write_shard

        def gated(path: Path, *args: Any) -> None:
            self.reached.set()
            assert self.open.wait(WAIT)
            self.events.append(path.parent.name)
            write(path, *args)

        monkeypatch.setattr(distributed, "write_shard", gated)


@pytest.fixture
def trainer(config: RunConfig, corpus: Corpus, tmp_path: Path) -> Trainer:
    return Trainer(config, corpus, tmp_path / "run")


def copies(trainer: Trainer) -> dict[str, torch.Tensor]:
    optimizer = trainer.optimizer.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state_tensors(trainer.model, optimizer, {}).items()}


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_goes_on_while_a_snapshot_is_written(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    gate = Gate(monkeypatch)
    expected = copies(trainer)
    target = trainer.save(wait=False)
    assert gate.reached.wait(WAIT)
    for _ in range(3):
        trainer.train_step()
        assert trainer.saver.poll(stop=False) == (False, None)  # not a byte is written yet, and nobody waited
    assert not target.exists()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000001"]
    assert not equal(copies(trainer), expected)
    gate.open.set()
    assert trainer.saver.wait() == 2
    assert trainer.saver.poll(stop=True) == (True, None)
    assert equal(saved(target), expected)


def test_a_save_waits_for_the_one_before(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    trainer.train_step()
    trainer.save(wait=False)
    assert gate.reached.wait(WAIT)
    trainer.train_step()
    threading.Timer(0.1, gate.open.set).start()
    trainer.save(wait=False)
    assert "step-00000001" in [path.name for path in checkpoints(tmp_path / "run")]
    trainer.saver.wait()
    assert gate.events == [".step-00000001.part"] * 2 + [".step-00000002.part"] * 2


def test_without_async_checkpoint_the_step_waits(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    waiting = replace(config, train=replace(config.train, async_checkpoint=False))
    trainer = Trainer(waiting, corpus, tmp_path / "run")
    trainer.train_step()
    assert (trainer.save(wait=False) / "manifest.json").is_file()


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(distributed, "write_shard", full)


def test_what_fails_in_the_background_surfaces_once_and_older_checkpoints_stay(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train_step()
    kept = trainer.save()
    for surface in (lambda: trainer.saver.poll(stop=False), lambda: trainer.save(wait=False)):
        with monkeypatch.context() as disk:
            fill_the_disk(disk)
            trainer.train_step()
            trainer.save(wait=False)
            assert isinstance(trainer.saver._pending, tuple)
            trainer.saver._pending[2].exception(WAIT)
            with pytest.raises(StorageError, match=r"step-0000000.: No space left on device"):
                surface()
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [kept.name]
        assert trainer.saver.poll(stop=False) == (False, None)
    trainer.save()
    assert len(checkpoints(tmp_path / "run")) == 2


def test_a_run_ends_with_the_error_of_its_last_save(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill_the_disk(monkeypatch)
    with pytest.raises(StorageError, match="No space left"):
        trainer.run()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_an_error_of_training_lets_the_save_end(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, step = Gate(monkeypatch), trainer.train_step

    def stumble() -> dict[str, Any]:
        if trainer.step == 5:  # the first checkpoint is under way
            threading.Timer(0.1, gate.open.set).start()
            raise RuntimeError("stumbled")
        return step()

    monkeypatch.setattr(trainer, "train_step", stumble)
    with pytest.raises(RuntimeError, match="stumbled"):
        trainer.run()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000005"]
    verify(checkpoints(tmp_path / "run")[0])


def test_the_run_says_what_it_saved(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.run()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved")]
    assert said == ["saved step 5", "saved step 10", "saved step 12"]


def test_what_a_crash_left_is_swept_away(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    part = tmp_path / "run" / "checkpoints" / ".step-00000003.part"
    part.mkdir(parents=True)
    (part / "model-00001-of-00001.safetensors").write_bytes(b"half")
    assert Trainer(config, corpus, tmp_path / "run").step == 0
    assert not part.exists()


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=12), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_files_partition_the_tensors(drawn: list[list[tuple[bool, int]]], limit: int) -> None:
    ranks = [
        [Piece(f"{rank}.{n}/momentum" if moment else f"{rank}.{n}", size) for n, (moment, size) in enumerate(row)]
        for rank, row in enumerate(drawn)
    ]
    named = number_files(ranks, limit)
    files = [file for rank in named for file in rank]
    assert len(set(files)) == len(files)
    for kind in ("model", "optimizer"):
        numbers = [file.split("-")[1:] for file in sorted(files) if file.startswith(kind)]
        assert numbers == [[f"{n + 1:05d}", "of", f"{len(numbers):05d}.safetensors"] for n in range(len(numbers))]
    for pieces, placed in zip(ranks, named):
        size = {piece.name: piece.nbytes for piece in pieces}
        assert sorted(name for names in placed.values() for name in names) == sorted(size)
        for file, names in placed.items():
            assert {state.is_state(name) for name in names} == {file.startswith("optimizer")}
            assert len(names) == 1 or sum(size[name] for name in names) <= limit


def test_a_file_holds_a_bounded_number_of_tensors() -> None:
    cut = list(portions(Piece(str(n), 0) for n in range(40_000)))
    assert [len(names) for names in cut] == [16_384, 16_384, 40_000 - 2 * 16_384]


def test_a_split_checkpoint_is_read_by_everybody(
    trainer: Trainer, config: RunConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own reader, ours for published directories, the trainer's; several files of a few tensors each."""
    init = distributed.StateWriter.__init__

    def small(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs, max_file_bytes=100_000)

    monkeypatch.setattr(distributed.StateWriter, "__init__", small)
    trainer.train_step()
    checkpoint, expected = trainer.save(), copies(trainer)
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 3
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(checkpoint)), planner=planner, no_dist=True)
    assert equal(targets, expected)
    directory = CheckpointDirectory.open(tmp_path / "run")
    assert directory.entries.keys() == {name for name in expected if not state.is_state(name)}
    assert all(torch.equal(directory.tensor(name), expected[name]) for name in directory.entries)
    assert equal(copies(Trainer(config, corpus, tmp_path / "run")), expected)


def as_format_1(checkpoint: Path) -> None:
    """Rewrite a checkpoint as earlier versions wrote it: one file of weights, one of state, no index."""
    tensors = saved(checkpoint)
    for path in [*checkpoint.glob("*.safetensors"), checkpoint / "model.safetensors.index.json"]:
        path.unlink()
    save_file({k: v for k, v in tensors.items() if not state.is_state(k)}, checkpoint / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if state.is_state(k)}, checkpoint / "optimizer.safetensors")
    files = ("model.safetensors", "optimizer.safetensors", "trainer.json")
    manifest = {"format": 1, "step": 2, "files": {name: describe(checkpoint / name) for name in files}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_checkpoints_of_format_1_go_on_bit_for_bit(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    ema = replace(config, balance=replace(config.balance, ema=0.5))
    trainer = Trainer(ema, corpus, tmp_path / "run")
    for _ in range(2):
        trainer.train_step()
    as_format_1(trainer.save())
    resumed = Trainer(ema, corpus, tmp_path / "run")
    assert resumed.step == 2
    assert load_run(tmp_path / "run").step == 2
    for _ in range(2):
        assert resumed.train_step()["loss"] == trainer.train_step()["loss"]
    assert equal(copies(resumed), copies(trainer))


def test_a_checkpoint_that_is_not_what_it_says(trainer: Trainer, config: RunConfig, tmp_path: Path) -> None:
    trainer.train_step()
    checkpoint = trainer.save()
    manifest = json.loads((checkpoint / "manifest.json").read_text())

    def refused(message: str, **changes: Any) -> None:
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(CheckpointError, match=message):
            verify(checkpoint)

    refused("format 3, this version reads 1 and 2", format=3)
    refused("outside its directory", files={"../../config.json": {"bytes": 1, "sha256": ""}})
    refused("unreadable", files=["model.safetensors"])
    refused("unreadable", files={"trainer.json": 7})
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    save_file({"model.norm.weight": torch.zeros(32)}, checkpoint / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors is not in manifest\.json"):
        verify(checkpoint)
    (checkpoint / "more.safetensors").unlink()
    shapes = replace(config.model, intermediate_size=65)
    fewer = replace(config.model, moe=replace(config.model.moe, num_experts=4))
    more = build(config.model)
    more.extra = torch.nn.Linear(2, 3)
    for model, message in (
        (build(fewer), r"experts\.4\.w1\.weight', which the configured model does not have"),
        (build(shapes), r"gate_proj\.weight is \(64, 32\), the model needs \(65, 32\)"),
        (more, r"lacks 'extra\.weight' of shape \(3, 2\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(checkpoint, model)
