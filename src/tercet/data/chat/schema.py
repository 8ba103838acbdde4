"""Plain data to `Conversation`, checking every field.

One schema serves requests (OpenAI-compatible chat completions, chat.md §8) and the lines of chat JSONL files
(docs/chat.md). All problems of an object are collected, each with the path of its field, such as
``messages[2].tool_calls[0].id``.

*strict* is for files: unknown keys are reported (they are usually misspelt), tool results must answer a call, and there
must be something to learn. Requests are lenient about unknown keys because clients echo many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tercet.data.chat import syntax
from tercet.data.chat.messages import (
    ROLES,
    TOOL_CHOICES,
    Conversation,
    ImagePart,
    Message,
    Part,
    ResponseFormat,
    ToolCall,
    place,
)
from tercet.data.chat.syntax import EFFORTS, Effort
from tercet.errors import DataError, nearest

_TOOL_NAME = re.compile(r"[A-Za-z_-][A-Za-z0-9_-]{0,255}")
_EFFORT_KEYS = frozenset({"thinking", "reasoning_effort", "chat_template_kwargs"})
_TOP_KEYS = frozenset({"messages", "tools", "tool_choice", "response_format", "id", "metadata"}) | _EFFORT_KEYS
_MESSAGE_KEYS = {
    "system": frozenset({"role", "content", "name", "tools"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "partial"}),
    "tool": frozenset({"role", "content", "name", "tool", "tool_call_id", "id"}),
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one field."""

    field: str
    """Path of the field; empty for the object itself."""
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def read_conversation(data: Any, *, strict: bool = False) -> tuple[Conversation | None, list[Problem]]:
    """Return the conversation in *data*, or None, and everything that is wrong with it.

    Args:
        data: a request body or one JSONL line, parsed.
        strict: apply the rules for files as well.
    """
    reader = _Reader(strict)
    conversation = reader.conversation(data)
    return (None if reader.problems else conversation), reader.problems


def conversation_from(data: Any, *, strict: bool = False) -> Conversation:
    """Return the conversation in *data*.

    Raises:
        DataError: something is wrong; the message names the first field and how many more there are.
    """
    conversation, problems = read_conversation(data, strict=strict)
    if conversation is None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    return conversation


class _Reader:
    """Reads one object; problems accumulate and reading goes on with a stand-in value."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.problems: list[Problem] = []

    def say(self, field: str, message: str) -> None:
        self.problems.append(Problem(field, message))

    def conversation(self, data: Any) -> Conversation | None:
        if not isinstance(data, Mapping):
            self.say("", f"must be a JSON object with `messages`, got {_shown(data)}")
            return None
        self._known_keys("", data, _TOP_KEYS)
        items = data.get("messages")
        if not isinstance(items, list) or not items:
            self.say("messages", f"must be a non-empty list, got {_shown(items)}")
            return None
        tools = self._tools("tools", data.get("tools"))
        messages = tuple(
            self._message(f"messages[{i}]", item, last=i == len(items) - 1) for i, item in enumerate(items)
        )
        self._unique_names(tools, messages)
        conversation = Conversation(
            messages,
            tools,
            self._effort(data),
            self._tool_choice(data.get("tool_choice")),
            self._response_format(data.get("response_format")),
        )
        if conversation.tool_choice == "required" and not conversation.has_tools:
            self.say("tool_choice", "is 'required', but no tool is declared; add `tools`")
        if not self.problems:
            self._results(conversation)
        if self.strict and not self.problems and not any(m.role == "assistant" for m in messages):
            self.say("messages", "has no assistant message, so there is nothing to learn")
        return conversation

    def _known_keys(self, where: str, data: Mapping[str, Any], known: Iterable[str]) -> None:
        if self.strict:
            for key in data:
                if key not in known:
                    self.say(_join(where, str(key)), f"unknown key{nearest(str(key), known)}")

    def _string(self, field: str, value: Any, *, required: bool = False) -> str:
        """Read a string; None is the empty string unless *required*."""
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            self.say(field, f"must be a string, got {_shown(value)}")
            return ""
        if not syntax.is_text(value):
            self.say(field, f"holds half a surrogate pair, which UTF-8 cannot encode: {_shown(value)}")
            return ""
        if required and not value:
            self.say(field, "must not be empty")
        return value

    # Messages

    def _message(self, where: str, data: Any, *, last: bool) -> Message:
        nothing = Message("user")
        if not isinstance(data, Mapping):
            self.say(where, f"must be an object with `role` and `content`, got {_shown(data)}")
            return nothing
        role = data.get("role")
        if not isinstance(role, str):
            self.say(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {_shown(role)}")
            return nothing
        if role not in ROLES:
            self.say(f"{where}.role", f"unknown role {_shown(role)}{nearest(role, ROLES)}")
            return nothing
        self._known_keys(where, data, _MESSAGE_KEYS[role])
        tools = self._tools(f"{where}.tools", data.get("tools"))
        name = self._string(f"{where}.name", data.get("name"))
        if data.get("tools") is not None:
            if role != "system":
                self.say(f"{where}.tools", f"only a system message may declare tools, this one is of role {role!r}")
            elif data.get("content"):
                self.say(f"{where}.content", "must be empty, because the message declares `tools`; use two messages")
            elif data["tools"] == []:
                self.say(f"{where}.tools", "must not be empty")
            return Message("system", tools=tools)
        content = self._content(f"{where}.content", data.get("content"), optional=role == "assistant")
        if role == "assistant":
            return self._assistant(where, data, content, last=last)
        if role == "tool":
            key = "tool_call_id" if data.get("tool_call_id") is not None or data.get("id") is None else "id"
            call_id = self._string(f"{where}.{key}", data.get(key), required=True)
            tool = self._string(f"{where}.tool", data.get("tool"))
            return Message("tool", content, name=name, call_id=call_id, tool=tool)
        return Message(role, content, name=name)

    def _content(self, field: str, value: Any, *, optional: bool) -> str | tuple[Part, ...]:
        if isinstance(value, list):
            return tuple(self._part(f"{field}[{i}]", part) for i, part in enumerate(value))
        if value is None and not optional:
            self.say(field, "is missing; give a string or a list of parts")
            return ""
        if value is not None and not isinstance(value, str):
            self.say(field, f"must be a string or a list of parts, got {_shown(value)}")
            return ""
        return self._string(field, value)

    def _part(self, where: str, data: Any) -> Part:
        kind = data.get("type") if isinstance(data, Mapping) else None
        if kind == "text":
            self._known_keys(where, data, ("type", "text"))
            value = data.get("text")
            return self._string(f"{where}.text", "" if value == "" else value, required=value != "")
        if kind == "image_url":
            self._known_keys(where, data, ("type", "image_url"))
            image = data.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            return ImagePart(self._string(f"{where}.image_url.url", url, required=True))
        self.say(where, f"must be an object of type 'text' or 'image_url', got {_shown(data)}")
        return ""

    def _assistant(
        self, where: str, data: Mapping[str, Any], content: str | tuple[Part, ...], *, last: bool
    ) -> Message:
        key = "reasoning_content" if data.get("reasoning_content") is not None else "reasoning"
        reasoning = self._string(f"{where}.{key}", data.get(key))
        calls = data.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            self.say(f"{where}.tool_calls", f"must be a list, got {_shown(calls)}")
            calls = None
        read = tuple(self._call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls or ()))
        partial = data.get("partial", False)
        if not isinstance(partial, bool | None):
            self.say(f"{where}.partial", f"must be true or false, got {_shown(partial)}")
        elif partial and not last:
            self.say(f"{where}.partial", "only the last message may be partial")
        elif partial and read:
            self.say(f"{where}.tool_calls", "a partial message cannot hold calls")
        elif partial and self.strict:
            self.say(f"{where}.partial", "a partial message is for requests; a file holds complete messages")
        return Message("assistant", content, reasoning=reasoning, calls=read, partial=bool(partial))

    def _call(self, where: str, data: Any) -> ToolCall:
        function = data.get("function") if isinstance(data, Mapping) else None
        if not isinstance(function, Mapping):
            self.say(f"{where}.function", f"must be an object with `name` and `arguments`, got {_shown(function)}")
            return ToolCall("")
        self._known_keys(where, data, ("id", "type", "index", "function"))
        self._known_keys(f"{where}.function", function, ("name", "arguments"))
        if data.get("type", "function") != "function":
            self.say(f"{where}.type", f"must be 'function', got {_shown(data['type'])}")
        name = self._string(f"{where}.function.name", function.get("name"), required=True)
        call_id = self._string(f"{where}.id", data.get("id"))
        arguments, field = function.get("arguments"), f"{where}.function.arguments"
        if isinstance(arguments, str):
            self._string(field, arguments)
        elif arguments is not None and not isinstance(arguments, Mapping):
            self.say(field, f"must be JSON text or an object, got {_shown(arguments)}")
            arguments = None
        try:
            value = syntax.read_arguments(arguments)
            if not isinstance(value, str):
                syntax.dump_value(value)
        except DataError as error:
            self.say(field, str(error))
        return ToolCall(name, arguments, call_id or None)

    def _results(self, conversation: Conversation) -> None:
        """Check that tool results can be placed; in files also that each answers one call."""
        try:
            list(place(conversation.messages))
        except DataError as error:
            field, _, reason = str(error).partition(": ")
            self.say(field, reason)
            return
        if not self.strict:
            return
        open_ids: set[str] = set()
        for i, message in enumerate(conversation.messages):
            if message.role == "assistant":
                ids = [call.id for call in message.calls if call.id is not None]
                open_ids = set(ids)
                if len(open_ids) < len(ids):
                    self.say(f"messages[{i}].tool_calls", f"ids must be unique within a message, got {ids}")
            elif message.role == "tool":
                if message.call_id not in open_ids:
                    known = nearest(str(message.call_id), open_ids) if open_ids else ""
                    self.say(
                        f"messages[{i}].tool_call_id",
                        f"{message.call_id!r} answers no open call of the assistant message before it{known}",
                    )
                open_ids.discard(str(message.call_id))

    # Options

    def _tools(self, field: str, value: Any) -> tuple[Mapping[str, Any], ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.say(field, f"must be a list of tools, got {_shown(value)}")
            return ()
        for i, tool in enumerate(value):
            self._tool(f"{field}[{i}]", tool)
        return tuple(tool for tool in value if isinstance(tool, Mapping))

    def _tool(self, where: str, tool: Any) -> None:
        if not isinstance(tool, Mapping):
            self.say(where, f"must be an object, got {_shown(tool)}")
            return
        if tool.get("type") != "function":
            self.say(f"{where}.type", f"must be 'function', got {_shown(tool.get('type'))}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            self.say(f"{where}.function", f"must be an object with a `name`, got {_shown(function)}")
            return
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            self.say(
                f"{where}.function.name",
                f"must be 1 to 256 letters, digits, '_' or '-', not starting with a digit, got {_shown(name)}",
            )
        for key, kind in (("description", str), ("parameters", Mapping)):
            if function.get(key) is not None and not isinstance(function[key], kind):
                expected = "a string" if kind is str else "a JSON schema object"
                self.say(f"{where}.function.{key}", f"must be {expected}, got {_shown(function[key])}")
        try:
            syntax.compact_json(tool)
        except DataError as error:
            self.say(where, str(error))

    def _unique_names(self, tools: tuple[Mapping[str, Any], ...], messages: tuple[Message, ...]) -> None:
        seen: dict[str, str] = {}
        groups = [("tools", tools)] + [(f"messages[{i}].tools", m.tools) for i, m in enumerate(messages)]
        for field, group in groups:
            for i, tool in enumerate(group):
                function = tool.get("function")
                name = function.get("name") if isinstance(function, Mapping) else None
                here = f"{field}[{i}].function.name"
                if isinstance(name, str) and seen.setdefault(name, here) != here:
                    self.say(here, f"{name!r} is already declared at {seen[name]}; names are unique in a conversation")

    def _tool_choice(self, value: Any) -> Any:
        if value is None:
            return "auto"
        if not isinstance(value, str) or value not in TOOL_CHOICES:
            self.say(
                "tool_choice",
                f"must be one of {', '.join(TOOL_CHOICES)}, got {_shown(value)}; naming a function is not supported",
            )
            return "auto"
        return value

    def _response_format(self, value: Any) -> ResponseFormat | None:
        if value is None:
            return None
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return ResponseFormat("json_object")
        if kind != "json_schema":
            self.say("response_format.type", f"must be text, json_object or json_schema, got {_shown(kind)}")
            return None
        field, given = "response_format.json_schema", value.get("json_schema")
        if not isinstance(given, Mapping):
            self.say(field, f"must be an object with `name` and `schema`, got {_shown(given)}")
            return None
        self._string(f"{field}.name", given.get("name"), required=True)
        if not isinstance(given.get("schema"), Mapping):
            self.say(f"{field}.schema", f"must be a JSON schema object, got {_shown(given.get('schema'))}")
        if not isinstance(given.get("strict", True), bool):
            self.say(f"{field}.strict", f"must be true or false, got {_shown(given['strict'])}")
        try:
            syntax.compact_json(given)
        except DataError as error:
            self.say(field, str(error))
        return ResponseFormat("json_schema", given)

    def _effort(self, data: Mapping[str, Any]) -> Effort | None:
        """Resolve the effort: ``thinking.effort``, ``reasoning_effort``, the self-hosted spelling, else max.

        ``thinking.effort`` wins over the top-level field (fault A-09); an unsupported name is a problem even where
        another field wins, never ignored (fault M31).
        """
        thinking = self._options("thinking", data.get("thinking"), ("type", "keep", "effort"))
        kwargs = self._options(
            "chat_template_kwargs",
            data.get("chat_template_kwargs"),
            ("thinking", "preserve_thinking", "thinking_effort"),
        )
        kind = thinking.get("type")
        if kind not in (None, "enabled", "disabled"):
            self.say("thinking.type", f"must be 'enabled' or 'disabled', got {_shown(kind)}")
        for key in ("thinking", "preserve_thinking"):
            if not isinstance(kwargs.get(key), bool | None):
                self.say(f"chat_template_kwargs.{key}", f"must be true or false, got {_shown(kwargs[key])}")
        off = kind == "disabled" or (kind is None and kwargs.get("thinking") is False)
        if not off and thinking.get("keep") not in (None, "all"):
            self.say("thinking.keep", f"must be 'all', got {_shown(thinking['keep'])}: history is always preserved")
        if not off and kwargs.get("preserve_thinking") is False:
            self.say("chat_template_kwargs.preserve_thinking", "must be true: history is always preserved")
        given = [
            ("thinking.effort", None if off else thinking.get("effort"), EFFORTS),
            ("reasoning_effort", data.get("reasoning_effort"), (*EFFORTS, "none")),
            ("chat_template_kwargs.thinking_effort", kwargs.get("thinking_effort"), (*EFFORTS, "none")),
        ]
        chosen: Any = None
        for field, value, allowed in given:
            if value is not None and value not in allowed:
                self.say(field, f"must be one of {', '.join(allowed)}, got {_shown(value)}")
            elif chosen is None:
                chosen = value
        return None if off or chosen == "none" else chosen or "max"

    def _options(self, field: str, value: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.say(field, f"must be an object, got {_shown(value)}")
            return {}
        self._known_keys(field, value, known)
        return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _shown(value: Any) -> str:
    """Show a value briefly, safely for a terminal."""
    if value is None:
        return "nothing"
    text = ascii(value) if isinstance(value, str) and not syntax.is_text(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
