"""The acceptance table of chat.md §7, round trips, splits and noise."""

import itertools
import json

import pytest
from chat_kit import SPELLINGS, TOOL, conversations, encoded, plain, stream, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.data.chat import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Conversation,
    Message,
    Parser,
    ReasoningDelta,
    TextDelta,
    TextParser,
    ToolCall,
    merge,
    parse,
)

OPEN, SEP, CLOSE, END = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"


def opened(tag: str) -> str:
    return OPEN + tag + SEP


def closed(tag: str) -> str:
    return CLOSE + tag + SEP


def argument(key: str, kind: str, value: str) -> str:
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *body: str, index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + "".join(body) + closed("call")


THOUGHT = "R" + closed("think")
ANSWER = opened("response") + "T" + closed("response")
CALL = call("f", argument("k", "string", "v"))
TOOLS = opened("tools") + CALL + closed("tools")
ENDING = closed("message") + END
F = ("f", '{"k": "v"}')

TABLE = [
    # canonical
    (THOUGHT + ANSWER + ENDING, "R", "T", [], "stop"),
    (THOUGHT + ANSWER + TOOLS + ENDING, "R", "T", [F], "tool_calls"),
    (closed("think") + ANSWER + ENDING, "", "T", [], "stop"),
    # leading open(think) repeated: dropped; never shown later either
    (opened("think") + THOUGHT + ANSWER + ENDING, "R", "T", [], "stop"),
    (opened('message role="assistant"') + opened("think") + THOUGHT + ANSWER + ENDING, "R", "T", [], "stop"),
    ("a" + opened("think") + "b" + closed("think") + ANSWER + ENDING, "ab", "T", [], "stop"),
    # think ended by the next channel
    ("R" + ANSWER + ENDING, "R", "T", [], "stop"),
    ("R" + TOOLS + ENDING, "R", "", [F], "tool_calls"),
    ("R" + CALL + ENDING, "R", "", [F], "tool_calls"),
    # missing separators
    ("R" + CLOSE + "think" + ANSWER + ENDING, "R", "T", [], "stop"),
    (
        "R" + CLOSE + "think" + OPEN + "response" + SEP + "T" + CLOSE + "response" + CLOSE + "message" + END,
        "R",
        "T",
        [],
        "stop",
    ),
    (THOUGHT + OPEN + "response" + "T" + ENDING, "R", "T", [], "stop"),
    (THOUGHT + OPEN + "tools" + CALL + CLOSE + "tools" + CLOSE + "message" + END, "R", "", [F], "tool_calls"),
    # close(response) without a response
    ("R" + closed("response") + ENDING, "R", "", [], "stop"),
    ("R" + closed("response") + ANSWER + ENDING, "R", "T", [], "stop"),
    ("R" + closed("response") + TOOLS + ENDING, "R", "", [F], "tool_calls"),
    ("R" + closed("response") + "T" + ENDING, "R", "T", [], "stop"),
    # other terminators of the answer
    (THOUGHT + opened("response") + "T" + closed("message") + END, "R", "T", [], "stop"),
    (THOUGHT + opened("response") + "T" + END, "R", "T", [], "stop"),
    (THOUGHT + opened("response") + "T" + "[EOS]", "R", "T", [], "stop"),
    (THOUGHT + opened("response") + "T" + opened('message role="user"') + "U" + END, "R", "T", [], "stop"),
    ("R" + END, "R", "", [], "stop"),
    ("R" + closed("message"), "R", "", [], "stop"),
    # no response channel
    (THOUGHT + TOOLS + ENDING, "R", "", [F], "tool_calls"),
    (THOUGHT + " \nT" + ENDING, "R", "T", [], "stop"),
    (THOUGHT + "\n" + TOOLS + ENDING, "R", "", [F], "tool_calls"),
    # truncation
    ("R", "R", "", [], "length"),
    ("", "", "", [], "length"),
    ("R" + CLOSE, "R", "", [], "length"),
    ("R" + CLOSE + "th", "R", "", [], "length"),
    (THOUGHT + OPEN + "resp", "R", "", [], "length"),
    (THOUGHT + OPEN + "responseT", "R", "T", [], "length"),
    (THOUGHT + opened("response") + "T" + CLOSE, "R", "T", [], "length"),
    (THOUGHT + opened("tools") + OPEN + 'call tool="f" ind', "R", "", [], "length"),
    (THOUGHT + opened("tools") + CALL[:-20], "R", "", [], "length"),
    (THOUGHT + opened("tools") + CALL + opened('call tool="g" index="2"'), "R", "", [F], "tool_calls"),
    # several calls, odd indices, missing index
    (
        THOUGHT + opened("tools") + call("a", index=7) + opened('call tool="b"') + closed("call") + ENDING,
        "R",
        "",
        [("a", "{}"), ("b", "{}")],
        "tool_calls",
    ),
    # a call whose own close never came
    (
        THOUGHT + opened("tools") + opened('call tool="a" index="1"') + argument("k", "number", "1") + CALL + ENDING,
        "R",
        "",
        [F],
        "tool_calls",
    ),
    (THOUGHT + opened("tools") + opened('call tool="a" index="1"') + closed("tools") + ENDING, "R", "", [], "stop"),
    (THOUGHT + opened("tools") + opened('call index="1"') + closed("call") + ENDING, "R", "", [], "stop"),
    (THOUGHT + opened("tools") + opened('call tool="a"b"') + closed("call") + ENDING, "R", "", [], "stop"),
    (THOUGHT + opened("tools") + call("a", "stray") + ENDING, "R", "", [], "stop"),
    (THOUGHT + opened("tools") + call("a", opened('argument type="string"') + "x") + ENDING, "R", "", [], "stop"),
    # bare closes and unknown tags leave the text around them
    ("Q" + CLOSE + CLOSE + CLOSE + closed("nothing") + "S" + THOUGHT + ANSWER + ENDING, "QSR", "T", [], "stop"),
    (THOUGHT + opened("response") + "a" + opened("b") + "c" + closed("b") + "d" + ENDING, "R", "acd", [], "stop"),
]


@pytest.mark.parametrize(("output", "reasoning", "content", "calls", "reason"), TABLE)
def test_acceptance_table(byte_tokenizer, output, reasoning, content, calls, reason) -> None:
    ids = tokens(output, byte_tokenizer)
    completion, _ = stream(ids, byte_tokenizer)
    got = [(c.name, c.arguments) for c in completion.calls]
    assert (completion.reasoning, completion.content, got) == (reasoning, content, calls)
    assert completion.finish_reason == reason
    assert parse(ids, byte_tokenizer) == completion


@pytest.mark.parametrize(("output", "reasoning", "content", "calls", "reason"), TABLE)
def test_acceptance_table_in_text(output, reasoning, content, calls, reason) -> None:
    """The same rows from text, whole, letter by letter, and cut in two at every place."""
    output = output.replace("[EOS]", END)
    for chunks in ([output], list(output), *([output[:n], output[n:]] for n in range(len(output)))):
        parser = TextParser()
        deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
        completion = parser.finish()
        assert (completion.reasoning, completion.content) == (reasoning, content)
        assert [(c.name, c.arguments) for c in completion.calls] == calls
        assert completion.finish_reason == reason
        assert merge([*deltas, *completion.deltas]) == (reasoning, content, completion.calls)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (argument("k", "number", "1e5"), '{"k": 1e5}'),
        (argument("k", "number", " 2\n"), '{"k": 2}'),
        (argument("k", "object", '{"a":[1, 2]}'), '{"k": {"a":[1, 2]}}'),
        (argument("k", "boolean", "true") + argument("n", "null", "null"), '{"k": true, "n": null}'),
        (argument("k", "object", '{"a": '), '{"k": "{\\"a\\": "}'),
        (argument("k", "number", "NaN"), '{"k": "NaN"}'),
        (argument("k", "number", "1e999"), '{"k": "1e999"}'),
        (argument("k", "object", '"\\ud800"'), '{"k": "\\"\\\\ud800\\""}'),
        (argument("k", "array", "[" * 100_000), json.dumps({"k": "[" * 100_000})),
        (argument("k", "integer", "2"), '{"k": "2"}'),
        (opened('argument key="k"') + "x" + closed("argument"), '{"k": "x"}'),
        (argument("&quot;&amp;amp;", "string", 'q"\\\n&quot;'), '{"\\"&amp;": "q\\"\\\\\\n&quot;"}'),
        (argument("k", "string", "a") + argument("k", "string", "b"), '{"k": "a"}'),
        (argument("k", "string", "") + argument("", "number", "0"), '{"k": "", "": 0}'),
        (opened('argument key="a" type="string"') + "x" + argument("b", "string", "y"), '{"a": "x", "b": "y"}'),
        (opened('argument key="a" type="string"') + "x", '{"a": "x"}'),
        ("\n" + argument("k", "number", "1") + "\n", '{"k": 1}'),
        (opened('json type="object"') + '{"a":  1}' + closed("json"), '{"a":  1}'),
        (opened('json type="object"') + '{"a": ' + closed("json"), '{"a": '),
        (opened('json type="object"') + closed("json"), "{}"),
    ],
)
def test_argument_bodies(byte_tokenizer, body, expected) -> None:
    completion, _ = stream(tokens(THOUGHT + opened("tools") + call("f", body) + ENDING, byte_tokenizer), byte_tokenizer)
    assert [c.arguments for c in completion.calls] == [expected]


@pytest.mark.parametrize(
    "body",
    [
        argument("k", "string", "v") + opened('json type="object"') + "{}" + closed("json"),
        opened('json type="object"') + "{}" + closed("json") + argument("k", "string", "v"),
        opened("json") + "{}" + closed("json") + opened("json") + "{}" + closed("json"),
        opened("json") + "[1]" + closed("json"),
        opened("json") + "{}" + closed("json") + "x",
    ],
)
def test_a_body_of_both_kinds_is_no_call(byte_tokenizer, body) -> None:
    completion, _ = stream(tokens(THOUGHT + opened("tools") + call("f", body) + ENDING, byte_tokenizer), byte_tokenizer)
    assert completion.calls == ()
    assert completion.finish_reason == "stop"


def test_ordinary_characters_are_never_structure(byte_tokenizer) -> None:
    """The markers' spellings, produced as ordinary tokens, are text (chat.md §7)."""
    spelled = THOUGHT + ANSWER + TOOLS + ENDING
    ids = byte_tokenizer.encode(spelled) + tokens(closed("think") + opened("response"), byte_tokenizer)
    completion, _ = stream(ids + byte_tokenizer.encode(spelled), byte_tokenizer)
    assert (completion.reasoning, completion.content) == (spelled, spelled)


def test_other_control_tokens_stand_for_nothing(byte_tokenizer) -> None:
    controls = list(byte_tokenizer.control.values())
    stops = {byte_tokenizer.control[name] for name in (OPEN, SEP, CLOSE, END, "[EOS]")}
    ids = list(itertools.chain.from_iterable((65, token) for token in controls if token not in stops))
    completion, _ = stream([*ids, -1, 10**9, 66], byte_tokenizer)
    assert completion.reasoning == "A" * (256 - len(stops)) + "B"


def test_half_a_character_is_never_shown(byte_tokenizer) -> None:
    ids = list("é🙂".encode())
    completion, steps = stream(ids[:-1], byte_tokenizer)
    assert [delta.text for step in steps for delta in step] == ["é"]
    assert completion.reasoning == "é"
    broken, _ = stream([*ids[:-1], *tokens(ANSWER, byte_tokenizer)], byte_tokenizer)
    assert (broken.reasoning, broken.content) == ("é\ufffd", "T")


def test_without_tools_a_call_is_nothing(byte_tokenizer) -> None:
    completion, steps = stream(tokens(THOUGHT + ANSWER + TOOLS + ENDING, byte_tokenizer), byte_tokenizer, tools=False)
    assert (completion.content, completion.calls, completion.finish_reason) == ("T", (), "stop")
    assert {type(delta) for step in steps for delta in step} == {ReasoningDelta, TextDelta}


def test_instruct_mode_and_stop_strings(byte_tokenizer) -> None:
    completion, _ = stream(tokens("T" + closed("response") + ENDING, byte_tokenizer), byte_tokenizer, start="response")
    assert (completion.reasoning, completion.content, completion.finish_reason) == ("", "T", "stop")
    parser = TextParser(start="response")
    parser.feed("T<|cl")
    assert parser.finish(stopped=True).finish_reason == "stop"


def test_deltas_of_a_call(byte_tokenizer) -> None:
    _, steps = stream(tokens(THOUGHT + TOOLS, byte_tokenizer), byte_tokenizer)
    deltas = [delta for step in steps for delta in step][1:]
    assert deltas == [
        CallStart(0, "f"),
        ArgumentsDelta(0, '{"k": '),
        ArgumentsDelta(0, '"'),
        ArgumentsDelta(0, "v"),
        ArgumentsDelta(0, '"'),
        ArgumentsDelta(0, "}"),
        CallEnd(0),
    ]


def completion_ids(conversation: Conversation, tokenizer) -> tuple[list[int], list[int], dict]:
    """Return prompt and completion ids of the last turn, and how its parser starts."""
    from tercet.data.chat import encode, render

    whole = encoded(conversation, tokenizer, generate=False).ids
    before = Conversation(
        conversation.messages[:-1], conversation.tools, conversation.effort, conversation.tool_choice
    )  # fmt: skip
    prompt = render(before)
    ids = encode(prompt.segments, tokenizer).ids
    assert whole[: len(ids)] == ids
    return ids, whole[len(ids) :], {"start": prompt.start, "tools": prompt.tools}


def rerendered(conversation: Conversation, completion, tokenizer) -> list[int]:
    ids = [call.id for call in conversation.messages[-1].calls]
    again = (*conversation.messages[:-1], completion.as_message(ids))
    return encoded(
        Conversation(again, conversation.tools, conversation.effort), tokenizer, generate=False
    ).ids  # fmt: skip


@given(conversations())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_render_parse_render_is_a_fixed_point(merged_tokenizer, conversation) -> None:
    prompt, output, start = completion_ids(conversation, merged_tokenizer)
    completion, _ = stream(output, merged_tokenizer, **start)
    last = conversation.messages[-1]
    assert completion.content == last.text
    if conversation.effort is not None and last.has_reasoning:
        assert completion.reasoning == last.reasoning
    assert [c.name for c in completion.calls] == [c.name for c in last.calls]
    assert rerendered(conversation, completion, merged_tokenizer) == prompt + output


@given(conversations(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_parsing_does_not_depend_on_the_split(merged_tokenizer, conversation, data) -> None:
    """Cut the output at every token: the head's deltas are a prefix, head and tail together give the whole."""
    _, output, start = completion_ids(conversation, merged_tokenizer)
    whole, steps = stream(output, merged_tokenizer, **start)
    cut = data.draw(st.integers(0, len(output)))
    head, head_steps = stream(output[:cut], merged_tokenizer, **start)
    assert head_steps[:cut] == steps[:cut]
    assert whole.reasoning.startswith(head.reasoning)
    assert whole.content.startswith(head.content)
    assert whole.calls[: len(head.calls)] == head.calls
    parser = Parser(merged_tokenizer, **start)
    for part in (output[:cut], output[cut:]):
        for token in part:
            parser.feed(token)
    assert parser.finish() == whole


@given(
    st.lists(st.sampled_from([OPEN, SEP, CLOSE, END, *SPELLINGS]) | plain, max_size=20),
    st.lists(st.integers(1, 9), min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_text_parsing_does_not_depend_on_the_chunks(pieces, sizes) -> None:
    text = "".join(pieces)
    whole = TextParser()
    expected = merge([*whole.feed(text), *whole.finish().deltas])
    parser, deltas, rest = TextParser(), [], text
    for size in itertools.cycle(sizes):
        if not rest:
            break
        deltas += parser.feed(rest[:size])
        rest = rest[size:]
    completion = parser.finish()
    assert merge([*deltas, *completion.deltas]) == expected
    assert completion.finish_reason == whole.finish().finish_reason


def test_text_and_ids_agree(byte_tokenizer) -> None:
    conversation = Conversation(
        (Message("user", "q"), Message("assistant", "a🙂", reasoning="r", calls=(ToolCall("f", {"k": [1, "é"]}),))),
        tools=(TOOL,),
    )
    _, output, _ = completion_ids(conversation, byte_tokenizer)
    parser = TextParser()
    parser.feed(byte_tokenizer.decode(output))
    by_text, by_ids = parser.finish(), parse(output, byte_tokenizer)
    assert (by_text.reasoning, by_text.content, by_text.calls) == (by_ids.reasoning, by_ids.content, by_ids.calls)


CALLING = 'call tool="f" index="1"'
NOISE = [
    *(
        OPEN,
        SEP,
        CLOSE,
        END,
        "think",
        "response",
        "tools",
        "message",
        CALLING,
        ' key="',
        "{",
        "}",
        "[1]",
        " ",
        "\n",
        "Z",
    ),
    *("é", "<|media_pad|>", "[BOS]", "[PAD]", opened("tools"), opened(CALLING), closed("call"), CALL),
    *(opened('argument key="k" type="string"'), opened('argument key="l" type="object"'), closed("argument")),
    *(opened('json type="object"'), closed("json"), closed("think"), opened("response"), closed("response")),
]


@given(st.lists(st.one_of(st.sampled_from(NOISE), st.integers(0, 511)), max_size=60), st.booleans(), st.booleans())
@settings(max_examples=500, deadline=None)
def test_noise_never_raises_and_never_leaks(byte_tokenizer, noise, thinking, tools) -> None:
    ids = [i for piece in noise for i in (tokens(piece, byte_tokenizer) if isinstance(piece, str) else [piece])]
    completion, steps = stream(ids, byte_tokenizer, start="think" if thinking else "response", tools=tools)
    deltas = [delta for step in steps for delta in step]
    shown = "".join(getattr(delta, "text", "") or getattr(delta, "name", "") for delta in deltas)
    assert not any(spelling in shown for spelling in byte_tokenizer.control)
    assert all(isinstance(delta, ReasoningDelta | TextDelta) for delta in deltas) or tools
    ended = {delta.position for delta in deltas if isinstance(delta, CallEnd)}
    assert ended == {call.position for call in completion.calls}
    assert completion.finish_reason in ("stop", "length", "tool_calls")
    assert (completion.finish_reason == "tool_calls") == bool(completion.calls)
    encoded(Conversation((completion.as_message(),)), byte_tokenizer)
    if thinking and not any(token >= 256 for token in ids):
        assert completion.content == ""
        assert completion.finish_reason == "length"
