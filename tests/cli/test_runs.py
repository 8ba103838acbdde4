"""train, sample and demo as a person types them, in process, on a toy corpus: what they print, refuse and keep."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.conftest import WORDS

from tercet.cli.main import main
from tercet.data import prepare
from tercet.train.checkpoint import checkpoints, lock_run, read_config
from tercet.train.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:one histogram bin holds")

MICRO = """
[model]
hidden_size = 32
intermediate_size = 64
[model.kda]
num_heads = 2
head_dim = 16
[model.mla]
num_heads = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
[model.moe]
num_experts = 8
intermediate_size = 32
latent_size = 16
[data]
sequence_length = 48
[train]
device = "cpu"
eval_every = 4
eval_sequences = 4
checkpoint_every = 2
"""

Tercet = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a settings file and two corpora: ``data``, and ``all`` which holds nothing out."""
    root = tmp_path_factory.mktemp("house")
    (root / "text").mkdir()
    rng = random.Random(0)
    for n in range(30):
        text = "\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(rng.randint(3, 30)))
        (root / "text" / f"{n:02d}.txt").write_text(text)
    prepare([root / "text"], root / "data", vocab_size=600, validation=0.1)
    prepare([root / "text"], root / "all", vocab_size=600, validation=0)
    (root / "micro.toml").write_text(MICRO)
    return root


@pytest.fixture
def tercet(capsys: pytest.CaptureFixture[str]) -> Tercet:
    """Run a command line; returns status, standard output and standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def train(house: Path, tmp_path: Path, tercet: Tercet) -> Tercet:
    """Train the micro model into ``tmp_path/run``."""

    def run(*words: object, data: str = "data") -> tuple[int, str, str]:
        fixed = ("--config", house / "micro.toml", "--data", house / data, "--out", tmp_path / "run")
        return tercet("train", "tiny", *fixed, *words)

    return run


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run) if row["kind"] == "train"]


def test_train_then_sample(train: Tercet, tercet: Tercet, tmp_path: Path, house: Path) -> None:
    status, out, err = train("--steps", 4)
    assert (status, err) == (0, "")
    assert f"report: {tmp_path / 'run' / 'report.html'}" in out
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    said = [tercet("sample", tmp_path / "run", "the model", "--tokens", 8, "--seed", s) for s in (1, 1, 2)]
    assert all(status == 0 and out.startswith("the model") and err == "" for status, out, err in said)
    assert said[0] == said[1] != said[2]
    (tmp_path / "start.txt").write_text("the model")
    assert tercet("sample", tmp_path / "run", "--file", tmp_path / "start.txt", "--tokens", 8, "--seed", 1) == said[0]
    assert tercet("sample", tmp_path / "run", "", "--tokens", 3)[0] == 0


def test_the_same_command_goes_on(train: Tercet, tercet: Tercet, tmp_path: Path) -> None:
    train("--steps", 4)
    status, out, _ = train("--steps", 4)
    assert status == 0
    assert "all 4 steps are done" in out
    status, out, _ = tercet("train", "--resume", tmp_path / "run", "--steps", 6)
    assert status == 0
    assert "resumed at step 4" in out
    assert "train.steps was 4" in out
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    status, _, err = tercet("train", "--resume", tmp_path / "run", "--steps", 5)
    assert status == 2
    assert "has done 6 steps, train.steps is 5" in err
    assert read_config(tmp_path / "run").train.steps == 6


def test_resume_obeys_set_and_config_or_refuses_them(train: Tercet, tercet: Tercet, tmp_path: Path) -> None:
    train("--steps", 2)
    status, _, err = tercet("train", "--resume", tmp_path / "run", "--set", "optim.lr=3e-3")
    assert status == 2
    assert "optim.lr: 0.01 → 0.003" in err
    status, _, err = tercet("train", "--resume", tmp_path / "run", "--set", "train.seed=5")
    assert status == 2
    assert "train.seed" in err
    assert tercet("train", "--resume", tmp_path / "run", "--set", "train.steps=3")[0] == 0
    (tmp_path / "longer.toml").write_text("[train]\nsteps = 4\n")
    assert tercet("train", "--resume", tmp_path / "run", "--config", tmp_path / "longer.toml")[0] == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]


def test_a_corpus_may_move_but_not_change(train: Tercet, tercet: Tercet, house: Path, tmp_path: Path) -> None:
    train("--steps", 2)
    prepare([house / "text"], tmp_path / "moved", vocab_size=600, validation=0.1)
    status, _, _ = tercet("train", "--resume", tmp_path / "run", "--data", tmp_path / "moved", "--steps", 3)
    assert status == 0
    assert read_config(tmp_path / "run").data.path == str(tmp_path / "moved")
    status, _, err = tercet("train", "--resume", tmp_path / "run", "--data", tmp_path / "gone", "--steps", 4)
    assert status == 2
    assert "no prepared corpus" in err
    assert "name it with --data" in err
    status, _, err = tercet("train", "--resume", tmp_path / "run", "--data", house / "all", "--steps", 4)
    assert status == 2
    assert err.count("\n") == 1
    assert read_config(tmp_path / "run").data.path == str(tmp_path / "moved")


def test_a_corpus_without_held_out_text_trains_to_the_end(train: Tercet, tercet: Tercet, tmp_path: Path) -> None:
    status, out, err = train("--steps", 5, data="all")
    assert (status, err) == (0, "")
    assert "no text out" in out
    assert {row["kind"] for row in read_metrics(tmp_path / "run")} == {"train", "sample"}
    status, _, err = tercet("eval", tmp_path / "run")
    assert status == 2
    assert "validation split" in err


def _hold(run: str, ready: object, done: object) -> None:
    lock = lock_run(Path(run))
    ready.set()  # type: ignore[attr-defined]
    done.wait(30)  # type: ignore[attr-defined]
    assert lock is not None


def test_two_processes_cannot_train_into_one_run(train: Tercet, tmp_path: Path) -> None:
    train("--steps", 2)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path / "run"), ready, done))
    other.start()
    try:
        assert ready.wait(60)
        status, _, err = train("--steps", 4)
    finally:
        done.set()
        other.join()
    assert other.exitcode == 0
    assert status == 2
    assert "another process is training" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert train("--steps", 4)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "optim.lrr=1"], "unknown setting 'optim.lrr' — did you mean 'lr'?"),
        (["--set", "optim.lr=fast"], "optim.lr must be float, got 'fast'"),
        (["--set", "optim.lr=inf"], "optim.lr is inf"),
        (["--set", "train.eval_sequences=0"], "train.eval_sequences is 0"),
        (["--set", "train.workers=-1"], "train.workers is -1"),
        (["--set", "data.sequence_length=0"], "data.sequence_length is 0"),
        (["--set", "data.sequence_length=100000"], "less than one sequence"),
        (["--set", "model.vocab_size=77"], "model.vocab_size is 77"),
        (["--set", "train.steps=3", "--set", "train.steps=4"], "twice"),
        (["--device", "abacus"], "does not offer the device 'abacus'"),
        (["--config", "nowhere.toml"], "cannot read the configuration"),
    ],
)
def test_bad_settings_stop_in_one_line_and_write_nothing(
    train: Tercet, tmp_path: Path, words: list[str], message: str
) -> None:
    status, _, err = train(*words)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_place_of_a_run_must_be_a_folder(house: Path, tercet: Tercet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        status, _, err = tercet(
            "train", "tiny", "--config", house / "micro.toml", "--data", house / "data", "--out", out
        )
        assert status == 2
        assert err.startswith("tercet train: cannot write")
    assert (tmp_path / "file").read_text() == "mine"


def test_sample_refuses_what_it_cannot_use(
    train: Tercet, tercet: Tercet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = tercet("sample", tmp_path / "nothing", "x")
    assert (status, err.count("\n")) == (2, 1)
    train("--steps", 2)
    run = tmp_path / "run"
    for words, message in (
        (["x", "--tokens", 0], "--tokens is 0"),
        (["x", "--temperature", "nan"], "temperature is nan"),
        (["x", "--seed", 1 << 70], "seed is"),
        (["x", "--device", "abacus"], "abacus"),
        (["--file", sys.executable], "cannot read the prompt"),
    ):
        status, _, err = tercet("sample", run, *words)
        assert status == 2
        assert message in err
        assert err.count("\n") == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    status, _, err = tercet("sample", run)
    assert status == 2
    assert "from standard input" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    assert tercet("sample", run, "--tokens", 2)[1].startswith("é")
    assert tercet("sample", run, "a\udcff", "--tokens", 2)[1].startswith("a\ufffd")  # an argument that is no UTF-8


def test_a_run_without_a_checkpoint_says_so(train: Tercet, tercet: Tercet, tmp_path: Path) -> None:
    train("--steps", 2)
    for checkpoint in checkpoints(tmp_path / "run"):
        (checkpoint / "manifest.json").unlink()
    status, _, err = tercet("sample", tmp_path / "run", "x")
    assert status == 2
    assert "no checkpoint yet" in err


@pytest.fixture
def small_demo(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo on thirty small files and a micro model instead of the Python library and the tiny preset."""
    from tercet import data, presets
    from tercet.util.settings import override, read_toml

    micro = override(presets.preset("tiny"), read_toml(house / "micro.toml"))
    monkeypatch.setattr(data, "python_library_corpus", lambda: [house / "text"])
    monkeypatch.setattr(presets, "preset", lambda name: micro)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_from_text_to_sample(tercet: Tercet, tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "corpus"
    words = ("demo", "--out", run, "--data", data, "--steps", 4)
    status, out, _ = tercet(*words)
    assert status == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens"] == 4 * 4 * 48
    assert summary["bits_per_byte"] > 0
    assert min(summary["gzip_bits_per_byte"], summary["xz_bits_per_byte"], summary["training_seconds"]) > 0
    *_, before, sample, evaluate, more = out.rstrip().split("\n")
    assert before.startswith("report:")
    assert sample.startswith("next:")
    assert "tercet eval" in evaluate
    assert f"--data {data}" in more
    assert tercet(*words)[0] == 0  # finished: scores and shows again, trains nothing
    assert steps_of(run) == [1, 2, 3, 4]
    assert tercet(*words, "--fresh")[0] == 0
    assert steps_of(run) == [1, 2, 3, 4]


@pytest.mark.usefixtures("small_demo")
def test_the_demo_leaves_other_runs_alone(train: Tercet, tercet: Tercet, tmp_path: Path) -> None:
    train("--steps", 2)
    for words in ((), ("--fresh",)):
        status, _, err = tercet("demo", "--out", tmp_path / "run", "--data", tmp_path / "corpus", "--steps", 2, *words)
        assert status == 2
        assert "not a demo's" in err
    assert steps_of(tmp_path / "run") == [1, 2]
    assert tercet("demo", "--seconds", 0)[0] == 2
