"""The letters of XTML: markers, attributes and typed values.

XTML writes a chat as elements whose brackets are control tokens, so no sequence of ordinary characters can imitate
structure::

    <|open|>message role="user"<|sep|> … <|close|>message<|sep|><|end_of_msg|>

Everything here is shared by the renderer and the parser, so that the two cannot drift apart: the marker surfaces,
attribute escaping, the mapping between JSON values and argument types, and one strict notion of "this is JSON".

Source: report appendix F; chat.md §1, §2, §5.4, §7.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError

OPEN = "<|open|>"
SEP = "<|sep|>"
CLOSE = "<|close|>"
END_OF_MESSAGE = "<|end_of_msg|>"
END_OF_SEQUENCE = "[EOS]"
"""Legacy end token; a model that emits it has stopped as well."""
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""A string that marks where an image goes. It is not a token: it is replaced on strings, before BPE (chat.md §1)."""

MARKERS = (OPEN, SEP, CLOSE, END_OF_MESSAGE)
MEDIA_MARKERS = (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)

Channel = Literal["think", "response"]
"""The channel in which a completion starts, because the prompt ended by opening it."""
Effort = Literal["low", "high", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ArgumentType = Literal["string", "number", "boolean", "null", "object", "array"]
ARGUMENT_TYPES: tuple[ArgumentType, ...] = get_args(ArgumentType)


def marker_ids(tokenizer: Tokenizer, surfaces: Iterable[str] = MARKERS) -> dict[str, int]:
    """Return the id of each of *surfaces*.

    Raises:
        DataError: the vocabulary has no such control token, so it cannot carry XTML.
    """
    known = tokenizer.control
    absent = [surface for surface in surfaces if surface not in known]
    if absent:
        raise DataError(
            f"this tokenizer has no control token {', '.join(absent)}; chats need a vocabulary with the K3 control "
            "tokens — prepare the data with `tercet data prepare`, which reserves them"
        )
    return {surface: known[surface] for surface in surfaces}


def escape(value: str) -> str:
    """Escape an attribute value: ``&`` first, then ``"``; nothing else (chat.md §2)."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Invert `escape`: ``&quot;`` first, then ``&amp;``."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def argument_type(value: Any) -> ArgumentType:
    """Return the XTML type of a JSON *value*; booleans before numbers, because Python's bool is an int.

    Raises:
        DataError: the value is not JSON.
    """
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int | float, "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return "array"
    raise DataError(f"{value!r} of type {type(value).__name__} is not a JSON value")


def dump_value(value: Any) -> str:
    """Write a non-string argument as the reference renderer does: ``", "`` and ``": "``, key order kept (§5.4).

    Raises:
        DataError: the value is not JSON, is NaN or infinite, or holds half a surrogate pair.
    """
    return _dump(value, sort_keys=False, separators=(", ", ": "))


def compact_json(value: Any) -> str:
    """Write *value* as option bodies do: keys sorted recursively, no spaces, non-ASCII kept (chat.md §4).

    Raises:
        DataError: as `dump_value`.
    """
    return _dump(value, sort_keys=True, separators=(",", ":"))


def _dump(value: Any, **style: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **style)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"this value cannot be written as JSON: {error}") from error
    return text


def load_json(text: str) -> Any:
    """Read JSON strictly: no NaN or Infinity, no number beyond a double, no half surrogate pair, no bottomless nesting.

    What passes can be written again by `dump_value`, so a parsed argument always renders.

    Raises:
        ValueError: the text is not such JSON.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        dump_value(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_arguments(arguments: str | Mapping[str, Any] | None) -> Mapping[str, Any] | str:
    """Return a call's arguments as an object, or as the raw text when they are a string that is not JSON.

    Null, empty and white space mean no arguments (chat.md §5.4).

    Raises:
        DataError: a JSON string that holds something other than an object.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = load_json(arguments)
    except ValueError:
        return arguments
    if not isinstance(value, dict):
        raise DataError(f"arguments must be a JSON object, got the {argument_type(value)} {arguments[:80]!r}")
    return value


def is_text(value: str) -> bool:
    """Say whether *value* can be encoded: a Python string may hold half a surrogate pair, UTF-8 may not."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
