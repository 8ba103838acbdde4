"""``tercet doctor`` names every operator, its tiers, and a reason."""

import pytest
import torch

from tercet.cli import doctor
from tercet.cli.main import main
from tercet.ops import OPERATORS
from tercet.ops.registry import Operator


@pytest.fixture
def operator(monkeypatch):
    """An operator with a triton tier that is never imported, removed from the table afterwards."""
    made = Operator("imaginary", lambda x: x, triton_module="tercet.ops.nowhere")
    yield made
    del OPERATORS["imaginary"]


def test_prints_machine_operators_packages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert all(name in out for name in OPERATORS)
    assert all(package in out for package in doctor.OPTIONAL)


def test_absent_packages_name_their_extra(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(doctor, "version", lambda package: None)
    main(["doctor"])
    out = capsys.readouterr().out
    assert all(f"pip install 'tercet[{extra}]'" in out for extra, _ in doctor.OPTIONAL.values())


def test_reasons_against_triton(operator, monkeypatch):
    assert doctor.triton_obstacle(Operator("plain", lambda x: x)) == "it has none"
    del OPERATORS["plain"]
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in doctor.triton_obstacle(operator)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "no CUDA device" in doctor.triton_obstacle(operator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "obstacle", lambda device: "too old")
    assert doctor.triton_obstacle(operator) == "too old"
    monkeypatch.setattr(doctor, "obstacle", lambda device: None)
    assert "cannot be imported" in doctor.triton_obstacle(operator)
    operator.triton_module = "math"
    assert doctor.triton_obstacle(operator) is None


def test_version_imports_nothing():
    assert doctor.version("surely_not_a_package") is None
    assert doctor.version("torch") == torch.__version__
