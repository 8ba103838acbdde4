"""Faults that others shipped, each with the test that would have caught it (known_faults_*.md)."""

import itertools
import json

import pytest
from chat_kit import INJECTIONS, TOOL, encoded, stream, tokens
from test_chat_parse import ANSWER, CALL, ENDING, THOUGHT, TOOLS, closed, opened

from tercet.data.chat import (
    ArgumentsDelta,
    CallStart,
    Conversation,
    ImagePart,
    ImageSize,
    Message,
    TextDelta,
    ToolCall,
    check_feature_rows,
    conversation_from,
    parse,
    render,
)
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError

PLACEHOLDER = "<|kimi_image_placeholder|>"


def test_M25_one_pad_for_a_whole_image(byte_tokenizer) -> None:
    conversation = Conversation((Message("user", (ImagePart("a"), ImagePart("b"))),))
    sample = encoded(conversation, byte_tokenizer, images=[ImageSize(448, 448, 256), ImageSize(28, 28, 1)])
    check_feature_rows(sample, [256, 1])
    for rows in ([1, 1], [1, 256], [257], [256, 1, 1], []):
        with pytest.raises(DataError, match="must be equal"):
            check_feature_rows(sample, rows)


def test_M25_the_largest_image_keeps_every_pad(byte_tokenizer, merged_tokenizer) -> None:
    """16,817 pads (vision.md §2) are one run without a space, longer than the cuts that the tokenizer makes in text."""
    conversation = Conversation((Message("user", ("before", ImagePart("a"), "after")),))
    for tokenizer in (byte_tokenizer, merged_tokenizer):
        sample = encoded(conversation, tokenizer, images=[ImageSize(1860, 7040, 16_817)])
        check_feature_rows(sample, [16_817])
        pad = tokenizer.control["<|media_pad|>"]
        assert [sample.ids[position] for position in sample.pads[0]] == [pad] * 16_817
        assert sample.ids.count(pad) == 16_817


@pytest.mark.parametrize("fixture", ["merged_tokenizer", "published_tokenizer"])
def test_M27_placeholder_before_a_newline(request, fixture) -> None:
    tokenizer = request.getfixturevalue(fixture)
    conversation = Conversation((Message("user", f"a{PLACEHOLDER}\n{PLACEHOLDER}b"),))
    sizes = [ImageSize(448, 448, 4), ImageSize(14, 28, 2)]
    sample = encoded(conversation, tokenizer, images=sizes, text_placeholders=True)
    check_feature_rows(sample, [4, 2])
    assert "image 448x448<|media_content|>" in tokenizer.decode(sample.ids)
    assert PLACEHOLDER not in tokenizer.decode(sample.ids)
    with pytest.raises(DataError, match="places for 2 images and 1"):
        render(conversation, images=sizes[:1], text_placeholders=True)


def test_M27_the_reference_ids(published_tokenizer) -> None:
    """The reason for the rule: the placeholder's last id changes when a newline follows."""
    assert published_tokenizer.encode(PLACEHOLDER + "\n")[-1] == 719
    assert published_tokenizer.encode(PLACEHOLDER)[-1] == 29


def test_M28_control_names_of_another_family() -> None:
    ranks = {bytes([value]): value for value in range(256)}
    with pytest.raises(DataError, match="no control token"):
        encoded(Conversation((Message("user", "x"),)), Tokenizer(ranks, {"<|im_user|>": 300}))
    with pytest.raises(DataError, match="outside the reserved ids"):
        Tokenizer(ranks, {"<|open|>": 512})

    class Wide(Tokenizer):
        def encode(self, text: str, allow_special: bool = False) -> list[int]:
            return [512]

    with pytest.raises(DataError, match="id 512"):
        encoded(Conversation((Message("user", "x"),)), Wide(ranks))


def test_M29_markers_keep_their_published_ids(published_tokenizer) -> None:
    ids = encoded(Conversation((Message("user", "x"),)), published_tokenizer).ids
    assert [token for token in ids if token >= 163584][-7:] == [
        163588, 163589, 163586, 163587, 163589, 163587, 163589,
    ]  # fmt: skip


M30_OUTPUTS = [
    ("R" + TOOLS + ENDING, "R", "", 1),
    ("R" + closed("think")[:-7] + TOOLS + ENDING, "R", "", 1),
    (THOUGHT + opened("response") + "T" + ENDING, "R", "T", 0),
    ("R" * 50, "R" * 50, "", 0),
]


@pytest.mark.parametrize(("output", "reasoning", "content", "calls"), M30_OUTPUTS)
def test_M30_waiting_for_a_close_that_never_comes(byte_tokenizer, output, reasoning, content, calls) -> None:
    """Stream and non-stream: no call lost, no terminator shown, markerless reasoning stays reasoning."""
    ids = tokens(output, byte_tokenizer)
    streamed, _ = stream(ids, byte_tokenizer)
    assert (streamed.reasoning, streamed.content, len(streamed.calls)) == (reasoning, content, calls)
    assert parse(ids, byte_tokenizer) == streamed


def test_M31_reasoning_survives_the_history(byte_tokenizer) -> None:
    completion = parse(tokens(THOUGHT + ANSWER + ENDING, byte_tokenizer), byte_tokenizer)
    history = (Message("user", "q"), completion.as_message(), Message("user", "again"))
    assert "<|open|>think<|sep|>R<|close|>think<|sep|>" in render(Conversation(history)).display


@pytest.mark.parametrize("effort", ["medium", "minimal", "xhigh", "", "MAX", 3, ["low"], False])
def test_M31_unsupported_efforts_are_refused(effort) -> None:
    base = {"messages": [{"role": "user", "content": "q"}]}
    for request in (
        {"reasoning_effort": effort},
        {"thinking": {"effort": effort}},
        {"chat_template_kwargs": {"thinking_effort": effort}},
        {"reasoning_effort": effort, "thinking": {"effort": "low"}},
    ):
        with pytest.raises(DataError, match="must be one of low, high, max"):
            conversation_from(base | request)


@pytest.mark.parametrize("tail", [ANSWER + ENDING, TOOLS + ENDING, ANSWER + TOOLS + ENDING])
def test_A01_channel_opened_without_closing_think(byte_tokenizer, tail) -> None:
    with_close, without = (tokens(text + tail, byte_tokenizer) for text in (THOUGHT, "R"))
    expected = parse(with_close, byte_tokenizer)
    assert parse(without, byte_tokenizer) == expected
    for cut in range(len(without)):
        head, _ = stream(without[:cut], byte_tokenizer)
        assert expected.reasoning.startswith(head.reasoning)
        assert expected.content.startswith(head.content)
        assert expected.calls[: len(head.calls)] == head.calls


@pytest.mark.parametrize("ending", [closed("message") + "<|end_of_msg|>", "<|end_of_msg|>", "[EOS]", closed("message")])
def test_A02_answer_ended_by_any_terminator(byte_tokenizer, ending) -> None:
    ids = tokens(THOUGHT + opened("response") + "T" + ending + "U", byte_tokenizer)
    completion, steps = stream(ids, byte_tokenizer)
    assert (completion.content, completion.finish_reason) == ("T", "stop")
    assert "".join(d.text for step in steps for d in step if isinstance(d, TextDelta)) == "T"


def test_A03_nothing_is_said_twice(merged_tokenizer) -> None:
    """Token by token through a vocabulary with merges: no duplicate, no piece of a marker."""
    text = "A < b <| c <|clo 北京 🙂 a b  c\n\n"
    ids = [*merged_tokenizer.encode(text), *tokens(closed("think") + opened("response"), merged_tokenizer)]
    ids += [*merged_tokenizer.encode(text), *tokens(closed("response") + ENDING, merged_tokenizer)]
    completion, _ = stream(ids, merged_tokenizer)
    assert (completion.reasoning, completion.content) == (text, text)


def test_A04_the_parser_starts_where_the_prompt_ended() -> None:
    closed_think = Message("assistant", "a", reasoning="r")
    for effort, start in (("max", "think"), ("low", "think"), (None, "response")):
        assert render(Conversation((closed_think, Message("user", "q")), effort=effort)).start == start
    partial = Message("assistant", "so far", partial=True)
    assert render(Conversation((Message("user", "q"), partial))).start == "response"


def test_A05_every_separator_omitted(byte_tokenizer) -> None:
    """Without any one separator the answer and the call are the same."""
    text = THOUGHT + ANSWER + TOOLS + ENDING
    expected = parse(tokens(text, byte_tokenizer), byte_tokenizer)
    pieces = text.split("<|sep|>")
    assert len(pieces) == 11
    for omitted in range(len(pieces) - 1):
        broken = "<|sep|>".join(pieces[: omitted + 1]) + "<|sep|>".join(pieces[omitted + 1 :])
        assert parse(tokens(broken, byte_tokenizer), byte_tokenizer) == expected


def test_A06_arguments_stream(byte_tokenizer) -> None:
    """The name comes with its tag, every letter of a string at once; what has come is a prefix of what will be."""
    value = 'line "one"\n' + "x" * 200
    turn = Message("assistant", calls=(ToolCall("f", {"code": value, "n": 1}),))
    ids = encoded(Conversation((turn,), effort=None), byte_tokenizer, generate=False).ids
    completion, steps = stream(
        ids[ids.index(byte_tokenizer.control["<|sep|>"]) + 1 :], byte_tokenizer, start="response"
    )
    started = next(i for i, step in enumerate(steps) if CallStart(0, "f") in step)
    talking = [i for i, step in enumerate(steps) if any(isinstance(d, ArgumentsDelta) for d in step)]
    tag = len('argument key="code" type="string"') + 3
    assert max(b - a for a, b in itertools.pairwise([started, *talking])) <= tag
    assert len(talking) > len(value)
    final = completion.calls[0].arguments
    assert json.loads(final) == {"code": value, "n": 1}
    pieces = [d.text for step in steps for d in step if isinstance(d, ArgumentsDelta)]
    assert all(final.startswith(prefix) for prefix in itertools.accumulate(pieces))


def test_A07_length_limit_at_every_token(byte_tokenizer) -> None:
    ids = tokens(THOUGHT + ANSWER + opened("tools") + CALL + CALL + closed("tools") + ENDING, byte_tokenizer)
    first_call = len(tokens(THOUGHT + ANSWER + opened("tools") + CALL, byte_tokenizer))
    for cut in range(len(ids) + 1):
        streamed, _ = stream(ids[:cut], byte_tokenizer)
        assert parse(ids[:cut], byte_tokenizer) == streamed
        assert streamed.finish_reason == ("tool_calls" if cut >= first_call else "length")


def fields(text: str) -> list[Conversation]:
    """One conversation for every field that a user, a tool or a client fills."""
    user, tool = Message("user", "q"), {"type": "function", "function": {"name": "f", "description": text}}
    call = ToolCall("f", {}, "c")
    return [
        Conversation((Message("system", text),)),
        Conversation((Message("user", text),)),
        Conversation((Message("user", (text, "", text)),)),
        Conversation((Message("user", "q", name=text or "n"),)),
        Conversation((Message("assistant", text), user)),
        Conversation((Message("assistant", "", reasoning=text or "r"), user)),
        Conversation((Message("assistant", calls=(ToolCall("f" + text, {}, "c"),)),)),
        Conversation((Message("assistant", calls=(ToolCall("f", {"k" + text: 1}, "c"),)),)),
        Conversation((Message("assistant", calls=(ToolCall("f", {"k": text}, "c"),)),)),
        Conversation((Message("assistant", calls=(ToolCall("f", {"k": [text]}, "c"),)),)),
        Conversation((Message("assistant", calls=(ToolCall("f", "{" + text, "c"),)),)),
        Conversation((Message("assistant", calls=(call,)), Message("tool", text, call_id="c"))),
        Conversation((user, Message("tool", "r", call_id=text, name="n" + text))),
        Conversation((user,), tools=({**tool},)),
        Conversation((Message("system", tools=(tool,)),)),
        Conversation((user, Message("assistant", text or "a", reasoning=text or "r", partial=True))),
    ]


@pytest.mark.parametrize("text", INJECTIONS)
def test_A08_no_field_produces_control_tokens(byte_tokenizer, text) -> None:
    for hostile, harmless in zip(fields(text), fields(""), strict=True):
        got, expected = (encoded(c, byte_tokenizer).ids for c in (hostile, harmless))
        controls = [[t for t in ids if byte_tokenizer.is_control(t)] for ids in (got, expected)]
        assert controls[0] == controls[1]


def test_A08_a_tokenizer_that_reads_markers_in_text_is_caught() -> None:
    class Gullible(Tokenizer):
        def encode(self, text: str, allow_special: bool = False) -> list[int]:
            return super().encode(text, allow_special=True)

    tokenizer = Gullible({bytes([value]): value for value in range(256)})
    encoded(Conversation((Message("user", "harmless"),)), tokenizer)
    with pytest.raises(DataError, match="ordinary text must map to ordinary ids"):
        encoded(Conversation((Message("user", "a<|open|>b"),)), tokenizer)


@pytest.mark.parametrize("spelling", ["<|open|>", PLACEHOLDER])
def test_A08_prompt_tokens_are_those_of_ordinary_text(published_tokenizer, spelling) -> None:
    """A message costs exactly the ids of its text, encoded as text."""
    counts = [len(encoded(Conversation((Message("user", text),)), published_tokenizer).ids) for text in ("", spelling)]
    assert counts[1] - counts[0] == len(published_tokenizer.encode(spelling)) > 3


@pytest.mark.parametrize("inner", [None, "low", "high", "max"])
@pytest.mark.parametrize("outer", [None, "low", "high", "max", "none"])
@pytest.mark.parametrize("kind", [None, "enabled", "disabled"])
def test_A09_thinking_effort_wins(inner, outer, kind) -> None:
    thinking = {key: value for key, value in (("type", kind), ("effort", inner)) if value is not None}
    request = {"messages": [{"role": "user", "content": "q"}], "thinking": thinking, "reasoning_effort": outer}
    chosen = inner or outer or "max"
    expected = None if kind == "disabled" or chosen == "none" else chosen
    assert conversation_from(request).effort == expected
    self_hosted = {"thinking": kind != "disabled", "preserve_thinking": True, "thinking_effort": outer}
    got = conversation_from({"messages": request["messages"], "chat_template_kwargs": self_hosted}).effort
    assert got == (None if kind == "disabled" or outer == "none" else outer or "max")


def test_tools_in_the_output_need_tools_in_the_request() -> None:
    user = Message("user", "q")
    assert not render(Conversation((user,))).tools
    assert render(Conversation((user,), tools=(TOOL,))).tools
    assert render(Conversation((Message("system", tools=(TOOL,)), user))).tools
    assert not render(Conversation((user,), tools=(TOOL,), tool_choice="none")).tools
