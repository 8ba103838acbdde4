"""A conversation as data: messages, calls, results and the options of a request.

These are the renderer's input. `tercet.data.chat.schema` builds them from requests and JSONL lines and checks them;
code that holds trusted values may build them directly.

A system message that carries `tools` extends the toolset from its position on; its content must be empty.
Tool results are rendered in the order of the calls they answer, whatever order they arrived in (chat.md §5.5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tercet.data.chat.syntax import Effort
from tercet.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
ToolChoice = Literal["auto", "none", "required"]
TOOL_CHOICES: tuple[ToolChoice, ...] = get_args(ToolChoice)


@dataclass(frozen=True)
class ImagePart:
    """A place in the content where an image goes; *source* (URL or path) is the caller's business."""

    source: str


Part = str | ImagePart


@dataclass(frozen=True)
class ToolCall:
    """One call of an assistant message."""

    name: str
    arguments: str | Mapping[str, Any] | None = None
    """JSON text or an object. Text that is not JSON is kept and rendered in a ``json`` block, never trained on."""
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message. Fields that a role does not use keep their defaults."""

    role: Role
    content: str | tuple[Part, ...] = ""
    name: str = ""
    """Speaker of a system or user message; of a tool message, the tool's name where it is not found otherwise."""
    reasoning: str = ""
    """Assistant only; white space alone counts as none."""
    calls: tuple[ToolCall, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """System only: declarations added at this point."""
    call_id: str | None = None
    """Tool only: the call that this result answers."""
    tool: str = ""
    """Tool only: name of the tool."""
    partial: bool = False
    """Assistant, last message only: the completion continues it (chat.md §5.7)."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content as parts."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def has_reasoning(self) -> bool:
        """Whether the think channel has anything in it."""
        return bool(self.reasoning.strip())


@dataclass(frozen=True)
class ResponseFormat:
    """A one-shot request for JSON; free text is the absence of one."""

    kind: Literal["json_object", "json_schema"]
    json_schema: Mapping[str, Any] | None = None
    """The request's ``json_schema`` object, as it was given."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema itself: under ``schema``, else under ``json_schema``, else the object (chat.md §4)."""
        given = self.json_schema or {}
        for key in ("schema", "json_schema"):
            if isinstance(given.get(key), Mapping):
                return given[key]
        return given

    @property
    def strict(self) -> bool:
        """Whether decoding must be constrained to the schema."""
        return bool((self.json_schema or {}).get("strict", True))


@dataclass(frozen=True)
class Conversation:
    """Messages and the options they are rendered with."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    effort: Effort | None = "max"
    """Thinking effort; None is instruct mode, without think channels."""
    tool_choice: ToolChoice = "auto"
    response_format: ResponseFormat | None = None

    @property
    def has_tools(self) -> bool:
        """Whether any tool is declared, globally or by a message; without one, calls in the output are not returned."""
        return bool(self.tools) or any(message.tools for message in self.messages)


@dataclass(frozen=True)
class Placed:
    """A message in rendering order."""

    position: int
    """Index in the conversation as it was given, for error messages."""
    message: Message
    tool: str = ""
    """Name in a tool result's header."""
    index: int = 0
    """Number in a tool result's header, from 1."""


def place(messages: Sequence[Message]) -> Iterator[Placed]:
    """Yield the messages in rendering order, each run of tool results sorted by the calls it answers.

    If every id of a run is found among the latest assistant message's calls (the first of duplicate ids wins), the run
    is sorted and takes its names from the calls; otherwise it keeps its order and each result brings its own name,
    failing that the name of the call at its position (chat.md §5.5).

    Raises:
        DataError: a result without a name.
    """
    calls: tuple[ToolCall, ...] = ()
    answered = position = 0
    while position < len(messages):
        message = messages[position]
        if message.role != "tool":
            if message.role == "assistant":
                calls, answered = message.calls, 0
            yield Placed(position, message)
            position += 1
            continue
        end = position
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        run = list(enumerate(messages[position:end], position))
        order = _call_positions([result for _, result in run], calls)
        if order is not None:
            run = [run[i] for i in sorted(range(len(run)), key=order.__getitem__)]
            order.sort()
        for i, (origin, result) in enumerate(run):
            name = calls[order[i]].name if order is not None else result.tool or result.name
            if not name and answered < len(calls):
                name = calls[answered].name
            if not name:
                raise DataError(
                    f"messages[{origin}]: this tool result answers no call (tool_call_id {result.call_id!r}) and names "
                    "no tool; give it the id of a call of the assistant message before it, or a `name`"
                )
            answered += 1
            yield Placed(origin, result, name, answered)
        position = end


def _call_positions(results: Sequence[Message], calls: Sequence[ToolCall]) -> list[int] | None:
    """Return for each result the position of its call, or None unless all are found."""
    first: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            first.setdefault(call.id, position)
    positions = [first.get(result.call_id) if result.call_id is not None else None for result in results]
    found = [position for position in positions if position is not None]
    return found if len(found) == len(positions) else None


def image_sources(messages: Sequence[Message]) -> list[str]:
    """Return the sources of all image parts in rendering order: the order in which `render` takes their sizes."""
    return [part.source for placed in place(messages) for part in placed.message.parts if isinstance(part, ImagePart)]
