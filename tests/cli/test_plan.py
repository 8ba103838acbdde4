"""``tercet plan`` prints the published figures and refuses nonsense."""

import pytest

from tercet.cli.main import main
from tercet.cli.plan import GIB, layout
from tercet.model.sizes import sizes
from tercet.presets import PRESETS, preset


def _plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_k3_prints_what_the_report_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = _plan(capsys, "k3")
    for figure in ("2,779,484,476,000", "104,189,612,640", "2,722,740,830,208", "27,648 B", "414.00 MiB", "97.96%"):
        assert figure in out
    assert "69 KDA + 24 MLA layers" in out


def test_kimi_linear(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = _plan(capsys, "kimi-linear-48b")
    for figure in ("49,122,681,728", "3,106,", "8,064 B", "40.00 MiB"):
        assert figure in out


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_at_any_width(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = _plan(capsys, name, "--gpus", "8")
    assert "layout on 8" in out
    assert f"{sizes(preset(name).model).total:,}" in out


def test_settings_change_the_plan(capsys, tmp_path):
    before = _plan(capsys, "tiny")
    after = _plan(capsys, "tiny", "--set", "model.vocab_size=8192")
    assert before != after and "1,048,576" in after
    file = tmp_path / "run.toml"
    file.write_text("[model]\nvocab_size = 8192\n")
    assert _plan(capsys, "tiny", "--config", str(file)) == after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "did you mean 'tiny'"),
        (["tiny", "--set", "model.vocab_sise=3"], "did you mean 'vocab_size'"),
        (["tiny", "--set", "model.vocab_size"], "KEY=VALUE"),
        (["tiny", "--gpus", "0"], "must be positive"),
        (["tiny", "--flops", "-1"], "must be positive"),
        (["tiny", "--gpu-memory", "nan"], "must be positive"),
        (["tiny", "--config", "/nowhere/run.toml"], "cannot read the configuration"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_layout_names_the_number_of_gpus_that_fits():
    config = preset("k3")
    counted = sizes(config.model)
    *_, verdict = layout(config, counted, 64, 141 * GIB)
    needed = int(verdict.split("at least ")[1].split(" ")[0].replace(",", ""))
    assert "fits, with" in layout(config, counted, needed, 141 * GIB)[-1]
    assert "does not fit" in layout(config, counted, needed - 1, 141 * GIB)[-1]
    assert "raise data.batch_sequences" in layout(config, counted, 2048, 141 * GIB)[-1]
    assert "does not fit on any number" in layout(config, counted, 2048, 16 * GIB)[-1]


def test_layout_divides_the_experts():
    config = preset("k3")
    first = layout(config, sizes(config.model), 512, 141 * GIB)[0]
    assert "expert parallel 128 (7 of 896 experts a rank)" in first
