"""Segments, layout and protocol sentences (chat.md §2–§5), without any vendor file."""

import itertools

import pytest
from chat_kit import INJECTIONS, TOOL, encoded, hostile
from hypothesis import given
from hypothesis import strategies as st

from tercet.data.chat import (
    Conversation,
    ImagePart,
    ImageSize,
    Message,
    ResponseFormat,
    Segment,
    ToolCall,
    encode,
    image_sources,
    render,
)
from tercet.data.chat.syntax import argument_type, escape, unescape
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError

PREFIX = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
INSTRUCT_PREFIX = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


def shown(*messages: Message, effort=None, **options) -> str:
    keywords = {name: options.pop(name) for name in ("images", "generate", "text_placeholders") if name in options}
    return render(Conversation(messages, effort=effort, **options), **keywords).display


def option(kind: str, body: str) -> str:
    return f'<|open|>message role="system" type="{kind}"<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>'


def message(header: str, body: str) -> str:
    return f"<|open|>message {header}<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>"


TOOL_JSON = '[{"function":{"name":"get_weather","parameters":{"type":"object"}},"type":"function"}]'


def test_layout_and_option_sentences() -> None:
    schema = ResponseFormat("json_schema", {"name": "x", "schema": {"type": "object", "a": "é"}})
    got = shown(
        Message("user", "hi"), effort="high", tools=(TOOL,), tool_choice="required", response_format=schema
    )  # fmt: skip
    assert got == (
        option(
            "tool-declare",
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n" + TOOL_JSON + "\n```",
        )
        + option(
            "thinking-effort",
            "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
            "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
            "Now the system is invoked with `thinking_effort=high`.",
        )
        + message('role="user"', "hi")
        + option(
            "tool-choice",
            "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
        )
        + option(
            "response-format",
            "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without "
            "markdown code blocks (```json) or any additional formatting.\nThe JSON data must match the following "
            'schema:\n```json\n{"a":"é","type":"object"}\n```',
        )
        + PREFIX
    )


def test_tool_choice_none_and_json_object() -> None:
    got = shown(Message("user", "hi"), tool_choice="none", response_format=ResponseFormat("json_object"))
    assert got == (
        message('role="user"', "hi")
        + option(
            "tool-choice",
            "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
        )
        + option(
            "response-format",
            "The system is invoked with `response_format=json_object`.\nYour response must be raw JSON data without "
            "markdown code blocks (```json) or any additional formatting.",
        )
        + INSTRUCT_PREFIX
    )


def test_dynamic_tools_and_names() -> None:
    got = shown(Message("system", tools=(TOOL,)), Message("user", ("a", "b"), name='x"&'))
    assert got == (
        option(
            "tool-declare",
            "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to "
            "all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n"
            + TOOL_JSON
            + "\n```",
        )
        + message('role="user" name="x&quot;&amp;"', "ab")
        + INSTRUCT_PREFIX
    )


def test_assistant_channels_in_both_modes() -> None:
    turn = Message("assistant", "yes", reasoning="hm")
    body = "<|open|>response<|sep|>yes<|close|>response<|sep|>"
    assert message('role="assistant"', body) in shown(turn)
    thought = "<|open|>think<|sep|>hm<|close|>think<|sep|>"
    assert message('role="assistant"', thought + body) in shown(turn, effort="max")
    for blank in ("", " \n"):
        got = shown(Message("assistant", "yes", reasoning=blank), effort="max")
        assert message('role="assistant"', "<|open|>think<|sep|><|close|>think<|sep|>" + body) in got


def test_typed_arguments() -> None:
    arguments = {"s": "a<b", "i": 2, "f": 0.5, "t": True, "n": None, "o": {"b": 1, "a": [1, "é"]}, "l": [1, 2]}
    got = shown(Message("assistant", calls=(ToolCall("f", arguments, "c"),)), effort=None)

    def element(key: str, kind: str, value: str) -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    assert (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        + element("s", "string", "a<b")
        + element("i", "number", "2")
        + element("f", "number", "0.5")
        + element("t", "boolean", "true")
        + element("n", "null", "null")
        + element("o", "object", '{"b": 1, "a": [1, "é"]}')
        + element("l", "array", "[1, 2]")
        + "<|close|>call<|sep|><|close|>tools<|sep|>"
    ) in got


@pytest.mark.parametrize("nothing", [None, "", "  \n", {}, "{}"])
def test_no_arguments(nothing) -> None:
    got = shown(Message("assistant", calls=(ToolCall("f", nothing, "c"),)))
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in got


def test_unparsable_arguments_become_a_json_block_without_loss() -> None:
    conversation = Conversation((Message("assistant", calls=(ToolCall("f", '{"a": ', "c"),)),), effort=None)
    prompt = render(conversation, generate=False)
    assert '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>' in prompt.display
    learnt = "".join(segment.text for segment in prompt.segments if segment.learn)
    assert "json" not in learnt
    assert '{"a": ' not in learnt


@pytest.mark.parametrize("bad", ["[1]", "3", '"x"', "null"])
def test_arguments_that_are_no_object(bad) -> None:
    with pytest.raises(DataError, match="must be a JSON object"):
        shown(Message("assistant", calls=(ToolCall("f", bad, "c"),)))


def calls(*names: str) -> Message:
    return Message("assistant", calls=tuple(ToolCall(name, None, f"id_{name}") for name in names))


def headers(*messages: Message) -> list[str]:
    marker = '<|open|>message role="tool" '
    return [part.split("<|sep|>")[0] for part in shown(*messages).split(marker)[1:]]


def result(call_id: str | None, **fields) -> Message:
    return Message("tool", "r", call_id=call_id, **fields)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_results_in_call_order(order) -> None:
    got = headers(calls("a", "b", "c"), *(result(f"id_{name}", name="ignored") for name in order))
    assert got == ['tool="a" index="1"', 'tool="b" index="2"', 'tool="c" index="3"']


def test_results_keep_their_order_unless_all_match() -> None:
    got = headers(calls("a", "b", "c"), result("id_b", tool="t", name="n"), result("?", name="n"), result(None))
    assert got == ['tool="t" index="1"', 'tool="n" index="2"', 'tool="c" index="3"']


def test_result_names_fall_back_to_the_call_at_the_same_position() -> None:
    assert headers(calls("a", "b"), result(None), result(None)) == ['tool="a" index="1"', 'tool="b" index="2"']
    with pytest.raises(DataError, match=r"messages\[1\]: this tool result answers no call .*'x'"):
        shown(Message("user", "hi"), result("x"))
    with pytest.raises(DataError, match=r"messages\[2\]"):
        shown(calls("a"), result(None), result(None))


def test_results_count_since_the_last_assistant_message() -> None:
    got = headers(
        calls("a", "b"), result("id_b"), Message("system", "x"), result("id_a"), calls("c"), result("id_c")
    )  # fmt: skip
    assert got == ['tool="b" index="1"', 'tool="a" index="2"', 'tool="c" index="1"']


def test_the_first_of_duplicate_ids_wins() -> None:
    twice = Message("assistant", calls=(ToolCall("a", None, "id"), ToolCall("b", None, "id")))
    assert headers(twice, result("id")) == ['tool="a" index="1"']


@pytest.mark.parametrize(
    ("reasoning", "content", "effort", "ending", "start"),
    [
        ("r", "c", "max", "<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>c", "response"),
        ("r", "", "max", "<|open|>think<|sep|>r", "think"),
        ("", "c", "max", "<|open|>response<|sep|>c", "response"),
        (" ", "c", "max", "<|open|>response<|sep|>c", "response"),
        ("", "", "max", "<|open|>think<|sep|>", "think"),
        ("r", "c", None, "<|open|>response<|sep|>c", "response"),
        ("r", "", None, "<|open|>response<|sep|>", "response"),
    ],
)
def test_partial_message(reasoning, content, effort, ending, start) -> None:
    partial = Message("assistant", content, reasoning=reasoning, partial=True)
    prompt = render(Conversation((Message("user", "q"), partial), effort=effort, tool_choice="none"))
    assert prompt.start == start
    head, _, tail = prompt.display.rpartition('<|open|>message role="assistant"<|sep|>')
    assert tail == ending
    assert head.endswith("in the next message.<|close|>message<|sep|><|end_of_msg|>")


def test_a_training_sample_is_the_prompt_and_the_turn(merged_tokenizer) -> None:
    conversation = Conversation(
        (Message("user", "q"), Message("assistant", "a", reasoning="r")), tool_choice="none", tools=(TOOL,)
    )
    whole = encoded(conversation, merged_tokenizer, generate=False).ids
    prompt = encoded(
        Conversation(conversation.messages[:1], tool_choice="none", tools=(TOOL,)), merged_tokenizer
    ).ids  # fmt: skip
    assert whole[: len(prompt)] == prompt


def test_loss_covers_the_assistant_turn_only(byte_tokenizer) -> None:
    turns = (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a", reasoning="r", calls=(ToolCall("f", {"k": "v"}, "c"),)),
        Message("tool", "t", call_id="c"),
        Message("assistant", "b"),
    )
    sample = encoded(Conversation(turns, tools=(TOOL,)), byte_tokenizer, generate=False)
    learnt = [token for token, learn in zip(sample.ids, sample.learn, strict=True) if learn]
    assert byte_tokenizer.decode(learnt) == (
        "r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        "<|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


def test_segments_are_encoded_on_their_own(merged_tokenizer) -> None:
    conversation = Conversation((Message("user", "北京天气怎么样？", name="_a"),))
    prompt = render(conversation)
    apart = encode(prompt.segments, merged_tokenizer).ids
    assert apart == [i for s in prompt.segments for i in encode([s], merged_tokenizer).ids]
    assert apart != merged_tokenizer.encode(prompt.display, allow_special=True)


@given(hostile)
def test_escape_round_trip(value: str) -> None:
    assert unescape(escape(value)) == value
    assert '"' not in escape(value)


def test_argument_types() -> None:
    values = {"string": "1", "number": 1.0, "boolean": False, "null": None, "object": {}, "array": []}
    assert {name: argument_type(value) for name, value in values.items()} == {name: name for name in values}
    with pytest.raises(DataError, match="set"):
        argument_type({1})


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": [float("inf")]}, {"a": {"b": "\ud800"}}, {"a": object()}])
def test_arguments_that_are_no_json(bad) -> None:
    with pytest.raises(DataError):
        shown(Message("assistant", calls=(ToolCall("f", bad, "c"),)))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(DataError, match="surrogate"):
        shown(Message("user", "a\udc80b"))


IMAGE = ImageSize(448, 448, 3)
BLOCK = "<|media_begin|>image 448x448<|media_content|><|media_pad|><|media_pad|><|media_pad|><|media_end|>"


def test_image_blocks_in_rendering_order(byte_tokenizer) -> None:
    turns = (
        Message("user", (ImagePart("0"), "text", ImagePart("1"))),
        calls("a", "b"),
        Message("tool", (ImagePart("3"),), call_id="id_b"),
        Message("tool", (ImagePart("2"),), call_id="id_a"),
    )
    assert image_sources(turns) == ["0", "1", "2", "3"]
    sizes = [ImageSize(10 + n, 20, n + 1) for n in range(4)]
    prompt = encoded(Conversation(turns), byte_tokenizer, images=sizes)
    pad = byte_tokenizer.control["<|media_pad|>"]
    assert [len(positions) for positions in prompt.pads] == [1, 2, 3, 4]
    assert [i for i, token in enumerate(prompt.ids) if token == pad] == [i for span in prompt.pads for i in span]
    assert not any(prompt.learn[i] for span in prompt.pads for i in span)


@pytest.mark.parametrize("given_", [0, 2])
def test_image_counts_must_match(given_) -> None:
    with pytest.raises(DataError, match=f"1 images and {given_} were given"):
        shown(Message("user", (ImagePart("x"),)), images=[IMAGE] * given_)
    with pytest.raises(DataError, match="at least 1"):
        shown(Message("user", (ImagePart("x"),)), images=[ImageSize(1, 1, 0)])


def test_published_image_overhead(published_tokenizer) -> None:
    """8, 9 and 10 ids besides the pads (vision.md §5)."""
    for width, height, overhead in ((448, 448, 8), (1280, 720, 9), (1920, 1080, 10)):
        segment = Segment(BLOCK.replace("448x448", f"{width}x{height}"), control=True, image=0)
        got = encode([segment], published_tokenizer)
        assert len(got.ids) - len(got.pads[0]) == overhead


def test_a_vocabulary_without_markers_is_refused() -> None:
    ranks = {bytes([value]): value for value in range(256)}
    bare = Tokenizer(ranks, {"<|im_end|>": 256})
    with pytest.raises(DataError, match=r"no control token <\|open\|>"):
        encoded(Conversation((Message("user", "x"),)), bare)


@given(st.sampled_from(INJECTIONS), st.sampled_from(["low", None]))
def test_text_is_text_wherever_it_stands(byte_tokenizer, text, effort) -> None:
    """Decoding the ids gives the display, and control ids stand exactly where the renderer put control segments."""
    turns = (
        Message("system", text, name=text),
        Message("user", (text, text), name=text),
        Message("assistant", text, reasoning=text, calls=(ToolCall(text, {text: text, "o": {text: text}}, text),)),
        Message("tool", text, call_id=text),
    )
    prompt = render(Conversation(turns, effort=effort))
    ids = encode(prompt.segments, byte_tokenizer).ids
    assert byte_tokenizer.decode(ids) == prompt.display
    assert sum(map(byte_tokenizer.is_control, ids)) == sum(segment.control for segment in prompt.segments)
