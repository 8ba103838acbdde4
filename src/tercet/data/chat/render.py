"""Chats to token ids.

A conversation becomes a list of segments, each *control* (markers are read as control tokens) or *text* (the same
spellings are ordinary characters). Ids are the concatenation of the segments' encodings, **each encoded on its own**:
joining them first would give other ids, and would let content imitate structure. `Prompt.display` joins them for
people only.

Layout, in this order (chat.md §3): tools, effort, messages, tool choice, response format, generation prefix. Global
options come first because changing them invalidates everything anyway; one-shot options come last so that the history
stays cacheable.

    prompt = render(conversation)
    encoded = encode(prompt.segments, tokenizer)
    parser = Parser(tokenizer, start=prompt.start, tools=prompt.tools)     # tercet.data.chat.parse

Every segment also says whether a fine-tuned model should learn it, so the loss mask is a by-product of rendering and
never a search in token ids (post_training.md §2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tercet.data.chat import options, syntax
from tercet.data.chat.messages import Conversation, ImagePart, Message, Part, Placed, ToolCall, place
from tercet.data.chat.syntax import CLOSE, END_OF_MESSAGE, IMAGE_PLACEHOLDER, OPEN, SEP, Channel, escape
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError


@dataclass(frozen=True)
class ImageSize:
    """What the text needs to know of an image."""

    width: int
    """Original width in pixels."""
    height: int
    rows: int
    """Feature rows that the vision tower returns for it, hence pads in the text."""


@dataclass(frozen=True)
class Segment:
    """A piece of the rendered chat that is encoded on its own."""

    text: str
    control: bool = False
    """Whether control spellings in it become control tokens; only the renderer sets this."""
    learn: bool = False
    """Whether a model fine-tuned on this chat gets loss on it."""
    image: int | None = None
    """Number of the image whose prompt block this is."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation."""

    segments: tuple[Segment, ...]
    start: Channel
    """Channel that the prompt leaves open, in which the parser of the completion must start (fault A-04)."""
    tools: bool
    """Whether calls in the completion may be returned: tools are declared and not forbidden."""

    @property
    def display(self) -> str:
        """Return the joined text, for people only: encoding it gives other ids."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Encoded:
    """Token ids of a rendered conversation with what trainers need beside them."""

    ids: list[int]
    learn: list[bool]
    """For every id: is there loss on predicting it."""
    pads: tuple[range, ...] = ()
    """For every image, in rendering order, the positions of its pads."""


def render(
    conversation: Conversation,
    *,
    images: Sequence[ImageSize] = (),
    generate: bool = True,
    text_placeholders: bool = False,
) -> Prompt:
    """Render *conversation*.

    Args:
        conversation: messages and options.
        images: sizes of the images in rendering order (`messages.image_sources`).
        generate: end with the prefix that a completion continues. Without it the result is a training sample, whose
            one-shot options stand before its last assistant message, where the model would have seen them.
        text_placeholders: let the string ``<|kimi_image_placeholder|>`` in content stand for an image. Off, it is text
            like any other; set it for trusted data only (fault A-08).

    Raises:
        DataError: a tool result without a name, arguments that are no object, text with half a surrogate pair, or a
            number of images other than the places for them.
    """
    writer = _Writer(images, text_placeholders)
    if conversation.tools:
        writer.option(options.TOOL_DECLARE, options.tools_body(conversation.tools))
    if conversation.effort is not None:
        writer.option(options.THINKING_EFFORT, options.effort_body(conversation.effort))
    placed = list(place(conversation.messages))
    last = placed[-1].message if placed else None
    held: list[Placed] = []
    if last is not None and last.role == "assistant" and (last.partial or not generate):
        held = [placed.pop()]
    for item in placed:
        _message(writer, item, conversation)
    if conversation.tool_choice != "auto":
        writer.option(options.TOOL_CHOICE, options.tool_choice_body(conversation.tool_choice))
    if conversation.response_format is not None:
        writer.option(options.RESPONSE_FORMAT, options.response_format_body(conversation.response_format))
    start: Channel = "response" if conversation.effort is None else "think"
    if generate:
        start = _prefix(writer, held[0].message if held else None, start)
    elif held:
        _message(writer, held[0], conversation)
    writer.check_images()
    return Prompt(tuple(writer.segments), start, conversation.has_tools and conversation.tool_choice != "none")


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> Encoded:
    """Encode every segment on its own and check that text stayed text.

    Raises:
        DataError: the vocabulary lacks the control tokens, an id lies outside it, or text yielded a control id.
    """
    markers = syntax.marker_ids(tokenizer)
    controls = frozenset(tokenizer.control.values())
    encoded = Encoded([], [])
    pads: list[range] = []
    for segment in segments:
        if segment.text in markers and segment.control:
            ids = [markers[segment.text]]
        else:
            ids = tokenizer.encode(segment.text, allow_special=segment.control)
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size or (token in controls and not segment.control):
                raise DataError(
                    f"the tokenizer gave id {token} for the {'control' if segment.control else 'plain'} text "
                    f"{segment.text[:60]!r}; ordinary text must map to ordinary ids below {tokenizer.vocab_size}"
                )
        if segment.image is not None:
            pad = syntax.marker_ids(tokenizer, syntax.MEDIA_MARKERS)[syntax.MEDIA_PAD]
            first = len(encoded.ids) + ids.index(pad)
            pads.append(range(first, first + ids.count(pad)))
        encoded.ids.extend(ids)
        encoded.learn.extend([segment.learn] * len(ids))
    return Encoded(encoded.ids, encoded.learn, tuple(pads))


def check_feature_rows(encoded: Encoded, rows: Sequence[int]) -> None:
    """Require that every image has as many pads as feature rows; one pad for a whole image blinds the model.

    Args:
        encoded: the encoded chat.
        rows: feature rows of every image, in rendering order.

    Raises:
        DataError: the numbers differ (fault M25).
    """
    found = [len(positions) for positions in encoded.pads]
    if found != list(rows):
        raise DataError(
            f"the text has {found} media pads an image and the vision tower returned {list(rows)} feature rows; they "
            "must be equal, in order. Pass `render` the rows that the image processor computed"
        )


class _Writer:
    """Collects segments and hands out images."""

    def __init__(self, images: Sequence[ImageSize], text_placeholders: bool) -> None:
        self.segments: list[Segment] = []
        self._images = images
        self._used = 0
        self._text_placeholders = text_placeholders

    def control(self, marker: str, learn: bool = False) -> None:
        self.segments.append(Segment(marker, control=True, learn=learn))

    def text(self, text: str, learn: bool = False) -> None:
        if not syntax.is_text(text):
            raise DataError(f"{text[:60]!r} holds half a surrogate pair, which UTF-8 cannot encode; repair the text")
        if text:
            self.segments.append(Segment(text, learn=learn))

    def open(self, tag: str, learn: bool = False, **attributes: str) -> None:
        """Open an element; an attribute is four text segments, because ids differ when they are joined (§2)."""
        self.control(OPEN, learn)
        self.text(tag, learn)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', escape(value), '"'):
                self.text(piece, learn)
        self.control(SEP, learn)

    def close(self, tag: str, learn: bool = False) -> None:
        self.control(CLOSE, learn)
        self.text(tag, learn)
        self.control(SEP, learn)

    def end(self, learn: bool = False) -> None:
        """End a message."""
        self.close("message", learn)
        self.control(END_OF_MESSAGE, learn)

    def option(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(body.strip())
        self.end()

    def parts(self, parts: Sequence[Part], learn: bool = False) -> None:
        for part in parts:
            if isinstance(part, ImagePart):
                self._image()
                continue
            pieces = part.split(IMAGE_PLACEHOLDER) if self._text_placeholders else [part]
            for number, piece in enumerate(pieces):
                if number:
                    self._image()
                self.text(piece, learn)

    def _image(self) -> None:
        number, self._used = self._used, self._used + 1
        if number >= len(self._images):
            return
        size = self._images[number]
        if min(size.width, size.height, size.rows) < 1:
            raise DataError(f"image {number} has size {size}; width, height and rows must be at least 1")
        block = (
            f"{syntax.MEDIA_BEGIN}image {size.width}x{size.height}{syntax.MEDIA_CONTENT}"
            f"{syntax.MEDIA_PAD * size.rows}{syntax.MEDIA_END}"
        )
        self.segments.append(Segment(block, control=True, image=number))

    def check_images(self) -> None:
        if self._used != len(self._images):
            raise DataError(
                f"the chat has places for {self._used} images and {len(self._images)} were given; pass one size for "
                "every image part, in rendering order (tercet.data.chat.image_sources)"
            )


def _message(writer: _Writer, placed: Placed, conversation: Conversation) -> None:
    message = placed.message
    if message.role == "assistant":
        _assistant(writer, message, thinking=conversation.effort is not None)
        return
    if message.role == "tool":
        writer.open("message", role="tool", tool=placed.tool, index=str(placed.index))
    elif message.tools:
        writer.option(options.TOOL_DECLARE, options.more_tools_body(message.tools))
        return
    elif message.name:
        writer.open("message", role=message.role, name=message.name)
    else:
        writer.open("message", role=message.role)
    writer.parts(message.parts)
    writer.end()


def _assistant(writer: _Writer, message: Message, *, thinking: bool) -> None:
    """Write a closed assistant message; what the engine always supplies carries no loss, the rest does (§5.3)."""
    writer.open("message", role="assistant")
    if thinking:
        thought = message.has_reasoning
        writer.open("think")
        writer.text(message.reasoning if thought else "", learn=True)
        writer.close("think", learn=thought)
    writer.open("response", learn=thinking)
    writer.parts(message.parts, learn=True)
    writer.close("response", learn=True)
    if message.calls:
        writer.open("tools", learn=True)
        for number, call in enumerate(message.calls, 1):
            _call(writer, number, call)
        writer.close("tools", learn=True)
    writer.end(learn=True)


def _call(writer: _Writer, number: int, call: ToolCall) -> None:
    writer.open("call", learn=True, tool=call.name, index=str(number))
    arguments = syntax.read_arguments(call.arguments)
    if isinstance(arguments, str):
        writer.open("json", type="object")
        writer.text(arguments)
        writer.close("json")
    else:
        for key, value in arguments.items():
            writer.open("argument", learn=True, key=key, type=syntax.argument_type(value))
            writer.text(value if isinstance(value, str) else syntax.dump_value(value), learn=True)
            writer.close("argument", learn=True)
    writer.close("call", learn=True)


def _prefix(writer: _Writer, partial: Message | None, start: Channel) -> Channel:
    """Open the message to be generated and return the channel left open (§3; for a partial message §5.7)."""
    thought = start == "think" and partial is not None and partial.has_reasoning
    answered = partial is not None and any(partial.parts)
    writer.open("message", role="assistant")
    if partial is None or not (thought or answered):
        writer.open(start)
        return start
    if thought:
        writer.open("think")
        writer.text(partial.reasoning)
        if not answered:
            return "think"
        writer.close("think")
    writer.open("response")
    writer.parts(partial.parts)
    return "response"
