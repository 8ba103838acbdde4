"""The parsers under long noise: the properties of `test_chat_parse`, deeper, and attacks that aim at one weak place."""

import itertools

import pytest
from chat_kit import SPELLINGS, conversations, plain, stream, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat_parse import (
    ANSWER,
    CALL,
    CLOSE,
    END,
    ENDING,
    NOISE,
    OPEN,
    SEP,
    THOUGHT,
    TOOLS,
    argument,
    closed,
    opened,
    test_noise_never_raises_and_never_leaks,
    test_parsing_does_not_depend_on_the_split,
    test_render_parse_render_is_a_fixed_point,
    test_text_parsing_does_not_depend_on_the_chunks,
)

from fuzzing import longer
from tercet.data.chat import Parser, TextParser, merge, parse

pieces = st.lists(st.sampled_from([OPEN, SEP, CLOSE, END, *SPELLINGS]) | plain, max_size=60)
noise = st.lists(st.one_of(st.sampled_from(NOISE), st.integers(0, 511)), max_size=300)
test_fixed_point_for_long = longer(test_render_parse_render_is_a_fixed_point, conversations(), examples=5_000)
test_splits_for_long = longer(test_parsing_does_not_depend_on_the_split, conversations(), st.data(), examples=2_000)
test_chunks_for_long = longer(
    test_text_parsing_does_not_depend_on_the_chunks, pieces, st.lists(st.integers(1, 9), min_size=1), examples=20_000
)
test_noise_for_long = longer(
    test_noise_never_raises_and_never_leaks, noise, st.booleans(), st.booleans(), examples=20_000
)
for name in [name for name in globals() if name.startswith("test_") and not name.endswith("for_long")]:
    del globals()[name]  # the short ones run where they are written


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.sampled_from(NOISE), st.integers(0, 511)), max_size=25))
def test_every_cut_of_noise_is_a_prefix(byte_tokenizer, noise) -> None:
    """Malformed output too: stopping anywhere shows a beginning of the whole, in both channels and in every call."""
    ids = [i for piece in noise for i in (tokens(piece, byte_tokenizer) if isinstance(piece, str) else [piece])]
    whole, steps = stream(ids, byte_tokenizer)
    for cut in range(len(ids)):
        head = merge(itertools.chain.from_iterable(steps[:cut]))
        assert whole.reasoning.startswith(head[0])
        assert whole.content.startswith(head[1])
        assert whole.calls[: len(head[2])] == head[2]


@pytest.mark.parametrize("text", [THOUGHT + ANSWER + TOOLS + ENDING, "R" + TOOLS + ENDING, "é🙂中" + ANSWER + ENDING])
def test_every_split_in_three_of_a_completion(text) -> None:
    """Text in three chunks, at all pairs of places, gives the deltas of the whole."""
    whole = TextParser()
    expected = merge([*whole.feed(text), *whole.finish().deltas])
    for first, second in itertools.combinations(range(0, len(text) + 1, 3), 2):
        parser = TextParser()
        deltas = [d for chunk in (text[:first], text[first:second], text[second:]) for d in parser.feed(chunk)]
        assert merge([*deltas, *parser.finish().deltas]) == expected


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xc0\xaf", b"\x80" * 9]
)
def test_invalid_utf8_at_every_place(byte_tokenizer, bad) -> None:
    """Bytes that are no UTF-8 become U+FFFD inside the text, and never swallow the marker behind them."""
    call = opened("tools") + opened('call tool="f" index="1"') + opened('argument key="k" type="string"')
    for before, after in (
        ("", closed("think") + ANSWER + ENDING),
        (THOUGHT + opened("response"), closed("response") + ENDING),
        (THOUGHT + call, closed("argument") + closed("call") + ENDING),
    ):
        ids = [*tokens(before, byte_tokenizer), *bad, *tokens(after, byte_tokenizer)]
        completion, _ = stream(ids, byte_tokenizer)
        shown = completion.reasoning + completion.content + "".join(call.arguments for call in completion.calls)
        assert "\ufffd" in shown or "\\ufffd" in shown
        assert completion.finish_reason == ("tool_calls" if "tools" in before else "stop")


@pytest.mark.parametrize(
    "text",
    [
        OPEN * 5_000,
        CLOSE * 5_000,
        (OPEN + "think") * 2_000,
        opened("tools") + opened('call tool="f" index="1"') * 2_000,
        opened("tools") + opened('call tool="f" index="1"') + opened('argument key="k" type="object"') + "[" * 50_000,
        opened("tools") + opened('call tool="f" index="1"') + argument("k", "object", '{"a":' * 20_000),
        OPEN + "call" + ' a="' * 5_000,
        opened("call" + ' tool="f"' * 5_000),
        (THOUGHT + ANSWER) * 1_000,
        CALL * 500,
    ],
)
def test_endless_structure_ends(byte_tokenizer, text) -> None:
    """Markers without end, nesting without end: a result, the same whole and streamed, and no marker in it."""
    ids = tokens(text, byte_tokenizer)
    completion = parse(ids, byte_tokenizer)
    parser = Parser(byte_tokenizer)
    for token in ids:
        parser.feed(token)
    assert parser.finish() == completion
    assert not any(marker in completion.reasoning + completion.content for marker in (OPEN, CLOSE, SEP, END))
