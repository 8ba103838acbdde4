"""Bodies of the option messages: the fixed sentences by which a request's settings reach the model.

The sentences are part of the protocol and must be byte-exact (chat.md §4); models were trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tercet.data.chat.messages import ResponseFormat
from tercet.data.chat.syntax import Effort, compact_json

TOOL_DECLARE = "tool-declare"
THINKING_EFFORT = "thinking-effort"
TOOL_CHOICE = "tool-choice"
RESPONSE_FORMAT = "response-format"


def tools_body(tools: Sequence[Mapping[str, Any]]) -> str:
    """Declare the tools of the whole conversation, as given (wrappers kept)."""
    return "\n".join(
        ("# Tools", "Here are the available tools, described in JSONSchema.", "", *_json_block(list(tools)))
    )


def more_tools_body(tools: Sequence[Mapping[str, Any]]) -> str:
    """Declare tools that become available in the middle of a conversation."""
    return "\n".join(
        (
            "## New Tools Available",
            "The system dynamically extends the toolset via lazy-loading.",
            "You have access to all existing and extended tools.",
            "Here are the specs for the extended tools.",
            "",
            *_json_block(list(tools)),
        )
    )


def effort_body(effort: Effort) -> str:
    """State the thinking effort; the sentence names ``medium``, which no request may ask for."""
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        "supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


def tool_choice_body(choice: Literal["none", "required"]) -> str:
    """Require or forbid calls in the next message."""
    duty = "MUST call tools" if choice == "required" else "MUST NOT call any tools"
    return f"The system is invoked with `tool_choice={choice}`.\nYou {duty} in the next message."


def response_format_body(response_format: ResponseFormat) -> str:
    """Ask for JSON, with the schema where there is one."""
    lines = [
        f"The system is invoked with `response_format={response_format.kind}`.",
        "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.",
    ]
    if response_format.kind == "json_schema":
        lines += ["The JSON data must match the following schema:", *_json_block(response_format.schema)]
    return "\n".join(lines)


def _json_block(value: Any) -> tuple[str, str, str]:
    return "```json", compact_json(value), "```"
