"""Check chat JSONL files before anything is trained on them: every problem with file, line and field.

One line is one conversation, the same object that a request carries (docs/chat.md). Lines are read one at a time, so a
file of any size needs the memory of its longest line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet.data.chat.messages import Conversation
from tercet.data.chat.schema import Problem, read_conversation


@dataclass(frozen=True)
class FileProblem:
    """One problem in one file."""

    path: Path
    line: int
    """Line number from 1; 0 concerns the file as a whole."""
    problem: Problem

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{where}: {self.problem}"


@dataclass
class Report:
    """What a check found."""

    files: int = 0
    conversations: int = 0
    """Lines without a problem."""
    problems: list[FileProblem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every line is fit for training."""
        return not self.problems


def read_chats(path: str | Path) -> Iterator[tuple[int, Conversation | None, list[Problem]]]:
    """Yield for every non-blank line of a chat file its number, the conversation, or None and its problems.

    A file that cannot be read yields line 0 with the reason.
    """
    try:
        with open(path, "rb") as handle:
            for number, raw in enumerate(handle, 1):
                if raw.strip():
                    yield number, *_read_line(raw)
    except OSError as error:
        yield 0, None, [Problem("", f"cannot be read: {error.strerror}; give the path of a chat JSONL file")]


def _read_line(raw: bytes) -> tuple[Conversation | None, list[Problem]]:
    try:
        text = raw.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return None, [Problem("", f"byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8")]
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return None, [Problem("", f"not JSON at column {error.colno}: {error.msg}")]
    except ValueError as error:
        return None, [Problem("", f"not JSON: {error}")]
    except RecursionError:
        return None, [Problem("", "nested too deeply")]
    return read_conversation(data, strict=True)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def check_chat(paths: Iterable[str | Path]) -> Report:
    """Check chat JSONL files and return everything that is wrong with them."""
    report = Report()
    for path in map(Path, paths):
        report.files += 1
        lines = 0
        for number, conversation, problems in read_chats(path):
            lines += 1
            report.conversations += conversation is not None
            report.problems += [FileProblem(path, number, problem) for problem in problems]
        if not lines:
            report.problems.append(FileProblem(path, 0, Problem("", "holds no conversation; one JSON object a line")))
    return report
