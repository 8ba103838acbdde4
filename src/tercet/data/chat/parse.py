"""Completions to messages: a pure state machine, fed token by token.

`Parser` takes token ids, where only real marker ids are structure; `TextParser` takes text in chunks of any size, for
engines that return no ids, and reads the markers by their spelling. Both drive one `Machine`, which sees markers and
the text between them, so the two ways, and streaming and not streaming, cannot classify differently.

    parser = Parser(tokenizer, start=prompt.start, tools=prompt.tools)
    for token in stream:
        for delta in parser.feed(token): ...
    completion = parser.finish()

The canonical completion, which starts inside the channel that the prompt opened (chat.md §7)::

    REASONING close(think) open(response) TEXT close(response) [ open(tools) call+ close(tools) ] close(message) end

Models deviate. The rules by which nothing is lost and no marker is shown:

- opening a channel closes the one before it; ``close(response)`` inside *think* ends the reasoning;
- a missing separator is implied by the next marker, or by text that cannot belong to the tag;
- text after the reasoning without an opened channel is the response;
- a tag that means nothing where it stands (a repeated ``open(think)``, an unknown name) is dropped, its body is not;
- ``close(message)``, the end tokens and a new message end the completion;
- a call counts if its own close arrives before another call opens, and if its body is arguments alone or one ``json``
  block alone. An argument of unknown type, or whose text is not JSON, is a string; a repeated key is dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tercet.data.chat import syntax
from tercet.data.chat.calls import CallBuilder
from tercet.data.chat.deltas import Completion, Delta, FinishReason, ReasoningDelta, TextDelta, merge
from tercet.data.chat.syntax import Channel, unescape
from tercet.data.tokenizer import Tokenizer

Marker = Literal["open", "sep", "close", "end"]
_MARKERS: dict[str, Marker] = {
    syntax.OPEN: "open",
    syntax.SEP: "sep",
    syntax.CLOSE: "close",
    syntax.END_OF_MESSAGE: "end",
}
_TAG = re.compile(r'(message|think|response|tools|call|argument|json)((?:[ \n]+[a-z]+="[^"]*")*)')
_CHANNEL_AND_TEXT = re.compile(r"(?:think|response)(?!\Z)")
_ATTRIBUTE = re.compile(r'([a-z]+)="([^"]*)"')


@dataclass
class Machine:
    """The state machine. Markers and text go in, deltas come out; it never raises and never emits marker text."""

    start: Channel
    tools: bool
    """Whether calls are returned; without it they are read and dropped, and never become content."""
    state: Literal["think", "response", "tools", "between", "done"] = "think"
    _tag: Literal["open", "close"] | None = None
    """The tag being read; its text collects in `_header`."""
    _header: list[str] = field(default_factory=list)
    _call: CallBuilder | None = None
    _calls_begun: int = 0
    _calls_done: int = 0
    _untouched: bool = True
    """Nothing but tags that restate the prompt has arrived."""
    _unanswered: bool = False
    """The reasoning was closed and no channel opened since."""
    _out: list[Delta] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.start

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        out, self._out = self._out, []
        return out

    def text(self, text: str) -> None:
        """Add text between markers."""
        if not text or self.state == "done":
            return
        if self._tag is not None:
            self._header.append(text)
        else:
            self._body(text)

    def marker(self, marker: Marker) -> None:
        """Add a marker."""
        if self._tag is not None:
            self._finish_tag(implied=marker != "sep")
        if self.state == "done":
            return
        if marker == "end":
            self._end()
        elif marker != "sep":
            self._tag, self._header = marker, []

    def finish(self) -> None:
        """End the input. A tag cut off is dropped, unless it is a channel's and text followed it."""
        if self._tag is not None and _CHANNEL_AND_TEXT.match("".join(self._header)):
            self._finish_tag(implied=True)
        self._drop_call()

    def reason(self, stopped: bool) -> FinishReason:
        """Why the completion ended: complete calls first, else a terminator or *stopped*, else the length limit."""
        if self.tools and self._calls_done:
            return "tool_calls"
        return "stop" if self.state == "done" or stopped else "length"

    def _finish_tag(self, *, implied: bool) -> None:
        """Act on the collected tag.

        With an *implied* separator, what follows the tag proper is body text. With a real one it is a longer, unknown
        name, or spoils the attributes: a call or argument without them is broken rather than guessed.
        """
        header, opening = "".join(self._header), self._tag == "open"
        self._tag, self._header = None, []
        match = _TAG.match(header)
        if match is None:
            return
        rest = header[match.end() :]
        attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(match[2])}
        if rest and not implied and not rest[0].isspace():
            if not match[2] and rest[0].isalnum():
                return
            attributes = {}
        if opening:
            self._open(match[1], attributes)
        else:
            self._close(match[1])
        if implied and rest and self.state != "done":
            self._body(rest)

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in ("think", "response", "tools"):
            if self.state != tag:
                self._enter(tag)
        elif tag == "message":
            if not (self._untouched and attributes.get("role") == "assistant"):
                self._end()
        elif tag == "call":
            if self.state != "tools":
                self._enter("tools")
            self._drop_call()
            self._call = CallBuilder(self._calls_begun, attributes.get("tool", ""), self._emit_call)
            self._calls_begun += bool(self._call.name)
        elif self._call is not None:
            self._call.open(tag, attributes)

    def _close(self, tag: str) -> None:
        self._untouched = False
        if tag == "message":
            self._end()
        elif tag == "call":
            if self._call is not None:
                self._calls_done += self._call.close()
                self._call = None
        elif tag in ("argument", "json"):
            if self._call is not None:
                self._call.close_child(tag)
        elif tag == self.state or (tag == "response" and self.state == "think"):
            reasoning = self.state == "think"
            self._enter("between")
            self._unanswered = reasoning

    def _enter(self, state: str) -> None:
        self._drop_call()
        self._untouched = self._unanswered = False
        self.state = state  # type: ignore[assignment]

    def _end(self) -> None:
        self._drop_call()
        self.state = "done"

    def _drop_call(self) -> None:
        self._call = None

    def _body(self, text: str) -> None:
        self._untouched = False
        if self.state == "between" and self._unanswered:
            text = text.lstrip()
            if not text:
                return
            self._enter("response")
        if self.state == "think":
            self._out.append(ReasoningDelta(text))
        elif self.state == "response":
            self._out.append(TextDelta(text))
        elif self._call is not None:
            self._call.text(text)

    def _emit_call(self, delta: Delta) -> None:
        if self.tools:
            self._out.append(delta)


class _Front:
    """What the two parsers share: the machine and the record of everything it said."""

    def __init__(self, start: Channel, tools: bool) -> None:
        self._machine = Machine(start, tools)
        self._said: list[Delta] = []

    @property
    def done(self) -> bool:
        """Whether a terminator has ended the completion; whatever follows is ignored."""
        return self._machine.state == "done"

    def _release(self) -> list[Delta]:
        deltas = self._machine.take()
        self._said += deltas
        return deltas

    def finish(self, *, stopped: bool = False) -> Completion:
        """End the stream and return the whole completion.

        Args:
            stopped: the caller ended it on purpose (a stop string), so that it was not cut off by a limit.
        """
        self._machine.finish()
        deltas = tuple(self._release())
        reasoning, content, calls = merge(self._said)
        return Completion(reasoning, content, calls, self._machine.reason(stopped), deltas)


class Parser(_Front):
    """Parse token ids."""

    def __init__(self, tokenizer: Tokenizer, *, start: Channel = "think", tools: bool = True) -> None:
        """Start in the channel that the rendered prompt left open (`Prompt.start`).

        Raises:
            DataError: the vocabulary lacks the markers.
        """
        super().__init__(start, tools)
        ids = syntax.marker_ids(tokenizer)
        self._tokenizer = tokenizer
        self._markers = {ids[surface]: marker for surface, marker in _MARKERS.items()}
        if syntax.END_OF_SEQUENCE in tokenizer.control:
            self._markers[tokenizer.control[syntax.END_OF_SEQUENCE]] = "end"
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> list[Delta]:
        """Add one id and return what became known by it.

        Control tokens other than the markers, and ids outside the vocabulary, stand for nothing and are dropped. A
        character spread over several tokens appears when its last byte has arrived.
        """
        marker = self._markers.get(token)
        if marker is not None:
            self._machine.text(self._utf8.decode(b"", final=True))
            self._utf8.reset()
            self._machine.marker(marker)
        elif 0 <= token < self._tokenizer.vocab_size:
            self._machine.text(self._utf8.decode(self._tokenizer.decode_bytes([token], skip_control=True)))
        return self._release()


class TextParser(_Front):
    """Parse text in chunks of any size; use `Parser` where token ids are at hand."""

    def __init__(self, *, start: Channel = "think", tools: bool = True) -> None:
        super().__init__(start, tools)
        self._held = ""
        """The end of the input so far that may be the beginning of a marker."""

    def feed(self, chunk: str) -> list[Delta]:
        """Add *chunk* and return what became known by it; at most one marker less one character is held back."""
        text = self._held + chunk
        done = 0
        for match in _MARKER_TEXT.finditer(text):
            self._machine.text(text[done : match.start()])
            self._machine.marker(_MARKERS[match[0]])
            done = match.end()
        text = text[done:]
        hold = max((n for n in range(1, min(len(text), _LONGEST) + 1) if text[-n:] in _PREFIXES), default=0)
        self._held = text[len(text) - hold :]
        self._machine.text(text[: len(text) - hold])
        return self._release()


_MARKER_TEXT = re.compile("|".join(map(re.escape, _MARKERS)))
_PREFIXES = frozenset(surface[:n] for surface in _MARKERS for n in range(1, len(surface)))
_LONGEST = max(map(len, _PREFIXES))


def parse(ids: Iterable[int], tokenizer: Tokenizer, *, start: Channel = "think", tools: bool = True) -> Completion:
    """Parse a whole completion, by the same machine as a stream."""
    parser = Parser(tokenizer, start=start, tools=tools)
    for token in ids:
        parser.feed(token)
    return parser.finish()
