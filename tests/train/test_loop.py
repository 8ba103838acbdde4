"""The loop as a whole: it learns, resumes bit for bit, does not depend on how a batch is cut, and stops politely."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercet.checkpoint import distributed
from tercet.checkpoint.state import checkpoints
from tercet.config import RunConfig
from tercet.data import Corpus
from tercet.errors import CheckpointError, ConfigError, StorageError
from tercet.eval.compression import token_losses
from tercet.train.checkpoint import load_run
from tercet.train.loop import Trainer
from tercet.train.metrics import read_metrics
from tercet.train.optimizer import StepReport
from tests.train.conftest import losses

# At 32 dimensions an untrained router scores all tokens alike, so one histogram bin holds most of them.
pytestmark = pytest.mark.filterwarnings("ignore:one histogram bin holds")


def change(config: RunConfig, **train: object) -> RunConfig:
    return replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]


def test_it_learns_and_writes_everything(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    outcome = Trainer(change(config, steps=40), corpus, tmp_path / "run").run()
    assert outcome.finished
    assert outcome.step == 40
    curve = losses(tmp_path / "run")
    assert len(curve) == 40
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])
    rows = read_metrics(tmp_path / "run")
    assert {row["kind"] for row in rows} == {"train", "validation", "probe", "sample"}
    assert all(row["mtp_loss"] > 0 for row in rows if row["kind"] == "train")
    last = [row for row in rows if row["kind"] == "validation"][-1]
    assert last["bytes"] == len(corpus.validation_bytes())
    loaded = load_run(tmp_path / "run")
    assert loaded.step == 40
    assert loaded.tokenizer.vocab_size == corpus.vocab_size


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_resumed_equals_uninterrupted_bit_for_bit(config: RunConfig, corpus: Corpus, tmp_path: Path, stop: int) -> None:
    ema = replace(config, balance=replace(config.balance, ema=0.5))
    Trainer(ema, corpus, tmp_path / "whole").run()
    first = Trainer(ema, corpus, tmp_path / "parts")
    for _ in range(stop):
        first.log.append(first.train_step())
    first.save()
    first.log.append(first.train_step())  # done after the checkpoint, lost in the crash
    Trainer(ema, corpus, tmp_path / "parts").run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (load_run(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_killed_at_a_random_moment_resumes_to_the_same_losses(
    config: RunConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """SIGKILL from outside, several times, whatever the process is doing."""
    config = change(config, steps=30, checkpoint_every=2)
    Trainer(config, corpus, tmp_path / "whole").run()
    settings = tmp_path / "config.json"
    from tercet.util.settings import to_dict

    settings.write_text(json.dumps(to_dict(config)))
    script = (
        "import json,sys\n"
        "from tercet.config import RunConfig\nfrom tercet.data import Corpus\n"
        "from tercet.train.loop import Trainer\nfrom tercet.util.settings import from_dict\n"
        "config = from_dict(RunConfig, json.load(open(sys.argv[1])))\n"
        "Trainer(config, Corpus.open(config.data.path), sys.argv[2]).run()\n"
    )
    command = [sys.executable, "-c", script, str(settings), str(tmp_path / "killed")]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for lines in (3, 11):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_micro_batch_split_changes_nothing_beyond_rounding(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    curves = []
    for micro in (8, 2, 1):
        trainer = Trainer(change(config, micro_batch_sequences=micro), corpus, tmp_path / str(micro))
        rows = [trainer.train_step() for _ in range(4)]
        curves.append(torch.tensor([[row["loss"], row["mtp_loss"], row["grad_norm"]] for row in rows]))
    assert torch.allclose(curves[0], curves[1], rtol=1e-4, atol=0)
    assert torch.allclose(curves[0], curves[2], rtol=1e-4, atol=0)


def test_first_step_loads_do_not_depend_on_the_micro_batch_split(
    config: RunConfig, corpus: Corpus, tmp_path: Path
) -> None:
    loads = []
    for micro in (8, 2):
        trainer = Trainer(change(config, micro_batch_sequences=micro), corpus, tmp_path / str(micro))
        row = trainer.train_step()
        loads.append({layer: entry["load"] for layer, entry in row["balance"].items()})
    assert loads[0] == loads[1]


def test_recomputation_changes_neither_gradients_nor_balance(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    rows = []
    for recompute in (False, True):
        trainer = Trainer(change(config, recompute=recompute), corpus, tmp_path / str(recompute))
        rows.append([trainer.train_step() for _ in range(3)])
    for plain, again in zip(*rows):
        assert plain["loss"] == pytest.approx(again["loss"], rel=1e-6)
        assert plain["balance"] == again["balance"]


def test_workers_change_nothing(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    """Two micro-batches at once on one core each, or one after the other on one core: the same bits."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for workers in (1, 2, 3):
            split = change(config, micro_batch_sequences=2, workers=workers)
            trainer = Trainer(split, corpus, tmp_path / str(workers))
            rows.append([trainer.train_step() for _ in range(4)])
    finally:
        torch.set_num_threads(cores)
    for one, *others in zip(*rows):
        for other in others:
            assert (one["loss"], one["mtp_loss"], one["grad_norm"]) == (
                other["loss"],
                other["mtp_loss"],
                other["grad_norm"],
            )
            assert one["balance"] == other["balance"]


def test_every_parameter_group_receives_gradient_and_moves(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    """Through the Trainer's own batches and the real optimiser: nothing is disconnected, nothing is frozen."""
    trainer = Trainer(config, corpus, tmp_path / "run")
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    seen: set[str] = set()
    step = trainer.optimizer.step

    def watched(lr: float) -> StepReport:
        seen.update(name for name, p in trainer.model.named_parameters() if p.grad is not None and bool(p.grad.any()))
        return step(lr)

    trainer.optimizer.step = watched  # type: ignore[method-assign, assignment]
    for _ in range(3):
        trainer.train_step()
    names = {name for name, _ in trainer.model.named_parameters()}
    assert {trainer.optimizer.group(name) for name in names} == {"muon", "adamw", "adamw_no_decay"}
    unread = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}  # its bank is empty
    assert seen == names - unread
    after = trainer.model.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == unread  # the selection bias, which balancing writes, moves as well


def test_packed_equals_separate_in_the_trainers_own_batches(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    """The loss of a packed micro-batch is the sum over its documents, each computed alone."""
    trainer = Trainer(config, corpus, tmp_path / "run")
    batch = trainer.loader.micro_batches()[0]
    model = trainer.model.double()
    packed = token_losses(model, batch)
    bounds = batch.cu_seqlens.tolist()
    assert len(bounds) > 5
    for first, last in itertools.pairwise(bounds):
        alone = replace(
            batch,
            tokens=batch.tokens[first:last],
            targets=batch.targets[first:last],
            loss_weight=batch.loss_weight[first:last],
            cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32),
        )
        assert torch.allclose(token_losses(model, alone), packed[first:last], rtol=0, atol=1e-9)


def test_evaluation_leaves_training_untouched(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    quiet, watched = (Trainer(config, corpus, tmp_path / name) for name in ("quiet", "watched"))
    for _ in range(3):
        list(watched.evaluate())
        assert quiet.train_step()["loss"] == watched.train_step()["loss"]


@pytest.mark.parametrize("kind", ["none", "aux", "sign", "sign_centred", "qb_micro", "bip"])
def test_every_balancing_rule_trains_and_resumes(config: RunConfig, corpus: Corpus, tmp_path: Path, kind: str) -> None:
    config = replace(config, balance=replace(config.balance, kind=kind))
    whole = Trainer(config, corpus, tmp_path / "a")
    expected = [whole.train_step()["loss"] for _ in range(4)]
    first = Trainer(config, corpus, tmp_path / "b")
    got = [first.train_step()["loss"] for _ in range(2)]
    first.save()
    second = Trainer(config, corpus, tmp_path / "b")
    assert got + [second.train_step()["loss"] for _ in range(2)] == expected


def test_sigterm_saves_and_says_how_to_go_on(
    config: RunConfig, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(config, corpus, tmp_path / "run")
    step = trainer.train_step

    def interrupted() -> dict:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    trainer.train_step = interrupted  # type: ignore[method-assign]
    outcome = trainer.run()
    assert not outcome.finished
    assert outcome.step == 4
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000004"
    assert "everything is saved" in capsys.readouterr().out
    assert Trainer(config, corpus, tmp_path / "run").run().finished


def test_another_configuration_is_refused(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    Trainer(config, corpus, tmp_path / "run")
    other = replace(config, optim=replace(config.optim, lr=1e-3))
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.004 → 0\.001"):
        Trainer(other, corpus, tmp_path / "run")


def test_vocabulary_must_be_the_corpus_s(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    other = replace(config, model=replace(config.model, vocab_size=999))
    with pytest.raises(ConfigError, match="999"):
        Trainer(other, corpus, tmp_path / "run")


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "trainer.json",
        "manifest.json",
    ],
)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_named(
    config: RunConfig, corpus: Corpus, tmp_path: Path, name: str, damage: str
) -> None:
    trainer = Trainer(config, corpus, tmp_path / "run")
    trainer.train_step()
    older = trainer.save()
    trainer.train_step()
    path = trainer.save() / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    if name == "manifest.json":
        if damage == "flip":
            pytest.skip("a flipped bit in the manifest may be in a hash, which another case covers")
        if damage == "remove":  # an unpublished checkpoint does not count
            assert checkpoints(tmp_path / "run") == [older]
            return
    with pytest.raises(CheckpointError, match=rf"{name}.*{older.name}"):
        Trainer(config, corpus, tmp_path / "run")


def test_a_full_disk_keeps_the_older_checkpoint(
    config: RunConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(config, corpus, tmp_path / "run")
    trainer.train_step()
    kept = trainer.save()
    trainer.train_step()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(distributed, "write_shard", full)
    with pytest.raises(StorageError, match="No space left"):
        trainer.save()
    monkeypatch.undo()
    assert checkpoints(tmp_path / "run") == [kept]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [kept.name]
    assert Trainer(config, corpus, tmp_path / "run").step == 1


def test_old_checkpoints_are_deleted(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(config, corpus, tmp_path / "run")
    for _ in range(4):
        trainer.train_step()
        trainer.save()
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000003", "step-00000004"]


def test_bf16_matrices_keep_fp32_masters_and_learn(config: RunConfig, corpus: Corpus, tmp_path: Path) -> None:
    config = change(config, steps=40, dtype="bfloat16")
    trainer = Trainer(config, corpus, tmp_path / "run")
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16
    rows = [trainer.train_step() for _ in range(30)]
    assert sum(row["loss"] for row in rows[-5:]) < 0.85 * sum(row["loss"] for row in rows[:5])
    trainer.save()
    resumed = Trainer(config, corpus, tmp_path / "run")
    assert resumed.train_step()["loss"] == trainer.train_step()["loss"]
