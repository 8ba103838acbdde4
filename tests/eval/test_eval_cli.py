"""``tercet eval`` on a small run written by the trainer's own code."""

import gzip
import json

import numpy as np
import pytest

from tercet.cli.main import main
from tercet.data import prepare
from tercet.model import build
from tercet.presets import preset
from tercet.train.checkpoint import copy_tokenizer, save_checkpoint, write_config
from tercet.util.settings import override

SIZES = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.full_attention_layers": [1],
    "model.intermediate_size": 32,
    "model.kda.num_heads": 2,
    "model.kda.head_dim": 16,
    "model.mla.num_heads": 2,
    "model.mla.kv_lora_rank": 16,
    "model.mla.q_lora_rank": 16,
    "model.moe.num_experts": 4,
    "model.moe.latent_size": 16,
    "model.moe.intermediate_size": 16,
    "data.sequence_length": 32,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    (root / "text").mkdir()
    random = np.random.default_rng(0)
    for n in range(10):
        lines = (" ".join(random.choice(["def", "return", "self", "naïve"], 6)) for _ in range(8))
        (root / "text" / f"{n}.txt").write_text("\n".join(lines), encoding="utf-8")
    corpus = prepare([root / "text"], root / "corpus", vocab_size=560, validation=0.3)
    extra = {"model.vocab_size": corpus.vocab_size, "data.path": str(root / "corpus")}
    config = override(preset("tiny"), SIZES | extra)
    directory = root / "run"
    directory.mkdir()
    write_config(directory, config)
    copy_tokenizer(corpus.tokenizer, directory)
    state = {"parameters": {}, "skipped_in_a_row": 0}
    save_checkpoint(directory, 7, build(config.model), state, {"tensors": {}}, keep=1)
    return root


def _json(capsys, *arguments) -> object:
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_held_out_split(run, capsys):
    result = _json(capsys, run / "run")
    assert result["step"] == 7 and 0 < result["bytes"] < 3000
    assert result["bits_per_byte"] == pytest.approx(
        result["nats_per_token"] * result["tokens"] / result["bytes"] / np.log(2)
    )
    assert main(["eval", str(run / "run")]) == 0
    out = capsys.readouterr().out
    assert f"{result['bits_per_byte']:.4f}" in out and f"{result['xz_bits_per_byte']:.4f}" in out


def test_other_files(run, capsys):
    files = [run / "text" / "1.txt", run / "text" / "2.txt"]
    data = b"".join(path.read_bytes() for path in files)
    result = _json(capsys, run / "run", "--files", *files)
    assert result["bytes"] == len(data)
    assert result["gzip_bits_per_byte"] == 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def test_tasks_both_ways(run, capsys):
    flags = [run / "run", "--lengths", 9, "--examples", 4]
    scored = _json(capsys, *flags, "--tasks", "all")
    assert [score["name"] for score in scored] == ["recall", "copy", "palindrome", "needle"]
    generated = _json(capsys, *flags, "--tasks", "copy", "--generate")
    assert generated[0]["solved"] == scored[1]["solved"] and generated[0]["choice"] is None
    assert main(["eval", *map(str, flags), "--tasks", "needle"]) == 0
    assert "needle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "kopy"], "did you mean 'copy'"),
        (["--tasks", "copy", "--lengths", "3"], "length 3"),
        (["--tasks", "copy", "--examples", "0"], "at least 1"),
        (["--files", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--data", "/nowhere/at/all"], "no prepared corpus"),
    ],
)
def test_bad_arguments(run, arguments, message, capsys):
    assert main(["eval", str(run / "run"), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_no_run_and_foreign_corpus(run, tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("one two three four five six seven\n" * 40)
    (tmp_path / "b.txt").write_text("seven six five four three two one\n" * 40)
    prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "corpus", vocab_size=560, validation=0.5)
    assert main(["eval", str(run / "run"), "--data", str(tmp_path / "corpus")]) == 2
    assert "another tokenizer" in capsys.readouterr().err
