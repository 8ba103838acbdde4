"""The page that leads from a fault to its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_test_named_there_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 50
    for file, test in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file}::{test}"


def test_every_row_is_there_once_and_has_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| M(\d+) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 38))
    without = {number: cell for number, cell in rows if "tests/" not in cell}
    assert without.keys() == {"17", "23", "24", "26"}
    assert all(" on main" in cell for cell in without.values())
    kernels = re.findall(r"^\| K(\d+) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in kernels] == list(range(1, 19))
    assert all("tests/" in cell for _, cell in kernels)
