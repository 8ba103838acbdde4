"""One tool call as its body arrives: typed argument elements to JSON text.

The text is sent while the model still writes it, so it is built only by appending: ``{"key": "``, pieces of an escaped
string, ``"``, …, ``}``. A string argument streams piece by piece; a value of another type is sent when its element
closes, because until then nobody knows whether it is JSON (faults A-06; chat.md §7).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from tercet.data.chat import syntax
from tercet.data.chat.deltas import ArgumentsDelta, CallEnd, CallStart, Delta


class CallBuilder:
    """Turns the body of one call into deltas.

    A call whose body is not what the format allows becomes *broken*: it stays silent from there on and is never ended.
    """

    def __init__(self, position: int, name: str, emit: Callable[[Delta], None]) -> None:
        self.name = name
        self._position = position
        self._emit = emit
        self._broken = not name
        self._child: Literal["string", "value", "dropped", "json"] | None = None
        """Kind of the open child element."""
        self._pieces: list[str] = []
        """Text of an open value or json element."""
        self._keys: set[str] = set()
        self._whole: bool = False
        """The body is a json block."""
        if not self._broken:
            emit(CallStart(position, name))

    def open(self, tag: str, attributes: dict[str, str]) -> None:
        """Open an argument or a json block; an element still open ends here."""
        self._end_child()
        if tag == "json":
            if self._keys or self._whole:
                self._broken = True
            self._whole, self._child, self._pieces = True, "json", []
            return
        key = attributes.get("key")
        if key is None or self._whole:
            self._broken = True
        elif key in self._keys:
            self._child = "dropped"
        else:
            self._send(("{" if not self._keys else ", ") + _quoted(key) + ": ")
            self._keys.add(key)
            kind = attributes.get("type")
            self._child = "value" if kind in syntax.ARGUMENT_TYPES and kind != "string" else "string"
            self._pieces = []
            if self._child == "string":
                self._send('"')

    def text(self, text: str) -> None:
        """Add text of the open child; text of the call itself can only be white space."""
        if self._child == "string":
            self._send(_quoted(text)[1:-1])
        elif self._child == "json":
            self._pieces.append(text)
            self._send(text)
        elif self._child == "value":
            self._pieces.append(text)
        elif self._child is None and text.strip():
            self._broken = True

    def close_child(self, tag: str) -> None:
        """Close the open child, if it is a *tag*."""
        if self._child is not None and (tag == "json") == (self._child == "json"):
            self._end_child()

    def close(self) -> bool:
        """End the call; returns whether it counts."""
        self._end_child()
        if self._broken:
            return False
        if not self._whole:
            self._send("}" if self._keys else "{}")
        self._emit(CallEnd(self._position))
        return True

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child == "string":
            self._send('"')
        elif child == "value":
            raw = "".join(self._pieces)
            self._send(raw.strip() if _is_json(raw) else _quoted(raw))
        elif child == "json":
            self._end_json("".join(self._pieces))

    def _end_json(self, raw: str) -> None:
        """Accept an object, or text that is no JSON at all, which the history keeps as it is; nothing else."""
        if not raw.strip():
            self._send("{}")
        elif _is_json(raw) and not isinstance(syntax.load_json(raw), dict):
            self._broken = True

    def _send(self, text: str) -> None:
        if text and not self._broken:
            self._emit(ArgumentsDelta(self._position, text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        syntax.load_json(text)
    except ValueError:
        return False
    return True
