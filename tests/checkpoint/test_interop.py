"""The comparison with llama.cpp as far as it can be tried without building it: steps, refusals, eight-bit rounding."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "bench" / "interop"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"interop_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("engine", monkeypatch)


def fake_pip(work: Path, script: str) -> None:
    python = work / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_missing_programs_are_named_before_anything_is_made(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(engine.BuildError, match=r"cannot find cmake, cc, no-such-compiler; .*apt install cmake"):
        engine.build(tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_half_built_environment_is_made_again(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its stamp an environment is removed; with it nothing is done; another version's does not count."""
    done: list[str] = []
    monkeypatch.setattr(engine, "check_programs", lambda: None)
    monkeypatch.setattr(engine.venv, "create", lambda path, with_pip: (path / "bin").mkdir(parents=True))
    monkeypatch.setattr(engine, "_imports", lambda python: (python.parents[1] / "installed").exists())

    def pip(work: Path, arguments: list[str], purpose: str) -> None:
        done.append(arguments[0])
        if arguments[-1] == str(work / engine.NAME):
            (work / "venv" / "installed").touch()

    monkeypatch.setattr(engine, "_pip", pip)
    monkeypatch.setattr(engine, "_fetch", lambda work: work / "archive")
    monkeypatch.setattr(engine, "_unpack", lambda work, archive: (work / engine.NAME).mkdir(exist_ok=True))
    (tmp_path / "venv" / "half").mkdir(parents=True)
    (tmp_path / "venv" / "installed").touch()
    built = engine.build(tmp_path)
    assert not (tmp_path / "venv" / "half").exists()
    assert built.source == tmp_path / engine.NAME / "vendor" / "llama.cpp"
    assert len(done) == 2
    assert engine.build(tmp_path) == built
    assert len(done) == 2
    (tmp_path / "venv" / "complete").write_text("another version")
    engine.build(tmp_path)
    assert len(done) == 4


def test_a_failing_step_shows_the_end_of_its_log(engine: ModuleType, tmp_path: Path) -> None:
    fake_pip(tmp_path, "echo first; echo 'No route to host' >&2; exit 1")
    with pytest.raises(engine.BuildError, match=r"(?s)cannot download .*put it at .*tar\.gz.*No route to host.*log"):
        engine._fetch(tmp_path)
    assert "first" in (tmp_path / "build.log").read_text()
    assert not (tmp_path / f"{engine.NAME}.tar.gz").exists()


def test_a_damaged_archive_is_named_and_leaves_no_sources(engine: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / f"{engine.NAME}.tar.gz"
    archive.write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(engine.BuildError, match=rf"(?s)cannot unpack {archive} .*remove it"):
        engine._unpack(tmp_path, archive)
    assert not (tmp_path / engine.NAME).exists()


def test_progress_of_the_compiler_is_shown(
    engine: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_pip(tmp_path, 'for n in $(seq 40); do echo "[$n/40] cc x.c"; done')
    engine._pip(tmp_path, ["install", "x"], "compile")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("  40 of 40 steps, ")


def test_eight_bit_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked by hand: the largest value has code ±127, the scale is rounded to fp16, zeros stay zero."""
    pytest.importorskip("gguf")
    experts = module("run", monkeypatch).EightBitExperts()
    block = torch.zeros(32, dtype=torch.float64)
    block[:4] = torch.tensor([1.27, -0.6349, 0.0149, 0.0051])
    scale = float(torch.tensor(0.01).half())
    expected = torch.zeros(32, dtype=torch.float64)
    expected[:4] = torch.tensor([127, -63, 1, 1], dtype=torch.float64) * scale
    assert torch.allclose(experts.rounded(block), expected, rtol=1e-12, atol=0)
    assert experts.closest == pytest.approx(0.01, abs=1e-6)  # 63.49, 1.49 and 0.51
    assert torch.equal(experts.rounded(torch.zeros(2, 64)), torch.zeros(2, 64))
