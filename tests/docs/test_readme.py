"""What the front page says can be typed."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tercet.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(path: Path) -> list[str]:
    """Commands of all fenced bash blocks, without comments."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_both_languages_give_the_same_commands() -> None:
    assert commands(ROOT / "README.md") == commands(ROOT / "README.zh.md")


def test_figures_are_filled_in() -> None:
    for name in ("README.md", "README.zh.md"):
        assert not re.search(r"@[A-Z]+@", (ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_tercet_command_parses(page: Path) -> None:
    for command in commands(page):
        if not command.startswith("tercet "):
            continue
        words = shlex.split(command.split(" | ")[0].split(" > ")[0])[1:]
        if words[0].startswith("-"):
            continue
        assert words[0] in VERBS, command
        module = importlib.import_module(f"tercet.cli.{words[0]}")
        parser = argparse.ArgumentParser(exit_on_error=False)
        module.add_arguments(parser)
        try:
            parser.parse_args(words[1:])
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{page.name}: {command}: {error}")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "README.zh.md", *PAGES[1:]], ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for command in commands(page):
            if match := re.match(r"make ([a-z-]+)", command):
                assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), f"{page.name}: {command}"
