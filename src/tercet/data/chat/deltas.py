"""What the parser tells as a completion arrives, and what it has said in the end.

Deltas concatenate to the final result for every way of cutting the stream; `merge` is that concatenation, and a test
holds the two together. A call is announced by name at once and its arguments follow as pieces of JSON text; it counts
only when its `CallEnd` arrives, so a truncated call is never reported — its pieces are no complete JSON either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tercet.data.chat.messages import Message, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the think channel."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the response channel."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    position: int
    """Number of the call in order of appearance, from 0."""
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments, as JSON text."""

    position: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete and its arguments are one JSON object (or the text of a ``json`` block)."""

    position: int


Delta = ReasoningDelta | TextDelta | CallStart | ArgumentsDelta | CallEnd


@dataclass(frozen=True)
class ParsedCall:
    """A complete call of a completion."""

    position: int
    """Number in order of appearance among all calls begun, as in the deltas."""
    name: str
    arguments: str
    """JSON text, arguments in the order in which the model gave them."""


@dataclass(frozen=True)
class Completion:
    """A parsed completion."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]
    finish_reason: FinishReason
    deltas: tuple[Delta, ...] = ()
    """What finishing itself still released; the end of the stream."""

    def as_message(self, call_ids: Sequence[str] | None = None) -> Message:
        """Return the completion as a message of the history, reasoning included (fault M31).

        Args:
            call_ids: an id for each call; without them the results are matched by position.
        """
        ids: Sequence[str | None] = call_ids if call_ids is not None else [None] * len(self.calls)
        calls = tuple(ToolCall(c.name, c.arguments, i) for c, i in zip(self.calls, ids, strict=True))
        return Message("assistant", self.content, reasoning=self.reasoning, calls=calls)


def merge(deltas: Iterable[Delta]) -> tuple[str, str, tuple[ParsedCall, ...]]:
    """Concatenate *deltas* to reasoning, content and complete calls, as a client of the stream would."""
    reasoning: list[str] = []
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    calls: list[ParsedCall] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text):
                content.append(text)
            case CallStart(position, name):
                names[position], arguments[position] = name, []
            case ArgumentsDelta(position, text):
                arguments[position].append(text)
            case CallEnd(position):
                calls.append(ParsedCall(position, names[position], "".join(arguments[position])))
    return "".join(reasoning), "".join(content), tuple(calls)
