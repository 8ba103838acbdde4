"""The public verifier's token counts and the ids of chat.md §6."""

import json

import pytest
from chat_kit import tokens

from tercet.data.chat import conversation_from, encode, render

PENDING = 3
"""The verifier does not count the channel marker of the generation prefix."""

SYSTEM_AND_USER = [
    {"role": "system", "content": "你是一个简洁、准确的助手。"},
    {"role": "user", "content": "你好"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City name"}},
            "required": ["location"],
        },
    },
}


def count(request: dict, tokenizer) -> int:
    return len(encode(render(conversation_from(request)).segments, tokenizer).ids)


def test_every_verifier_constant(vendor_cases, published_tokenizer) -> None:
    cases = [json.loads(line) for line in vendor_cases.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 22
    got = {case["id"]: count(case["request"], published_tokenizer) - PENDING for case in cases}
    assert got == {case["id"]: case["expected_prompt_tokens"] for case in cases}


@pytest.mark.parametrize(
    ("request_", "reported"),
    [
        ({"messages": [{"role": "user", "content": "Hello, how are you?"}]}, 91),
        ({"messages": [{"role": "user", "content": "hello"}]}, 86),
        ({"messages": SYSTEM_AND_USER, "reasoning_effort": "none"}, 36),
        ({"messages": SYSTEM_AND_USER, "thinking": {"type": "disabled"}}, 36),
        ({"messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "hi"}],
          "reasoning_effort": "low"}, 102),
        ({"messages": [{"role": "user", "content": "hello"}], "thinking": {"type": "disabled"},
          "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
              "type": "object", "required": ["answer"], "properties": {"answer": {"type": "string"}}}}}}, 97),
    ],
)  # fmt: skip
def test_worked_counts(request_, reported, published_tokenizer) -> None:
    assert count(request_, published_tokenizer) - PENDING == reported


@pytest.mark.parametrize(("file", "cases"), [("cases.jsonl", 44), ("cases.partial.jsonl", 8)])
def test_the_verifiers_own_files(file, cases, verifier_folder, published_tokenizer) -> None:
    """All text constants, and the continued assistant messages, of the verifier's ``testdata/prompt_token_cases``.

    The verifier's repository keeps both files in Git LFS, so a clone without LFS has only pointers to them.
    """
    path = verifier_folder / file
    if not path.is_file() or path.read_bytes().startswith(b"version https://git-lfs"):
        pytest.skip(f"{file} of the vendor verifier's testdata/prompt_token_cases (Git LFS) is not at {path}")
    listed = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(listed) == cases
    got = {case["id"]: count(case["request"], published_tokenizer) - PENDING for case in listed}
    assert got == {case["id"]: case["expected_prompt_tokens"] for case in listed}


def test_a_schema_costs_what_the_verifier_says(published_tokenizer) -> None:
    """The pair 36 / 119 of its response-format tests: the same question without and with a schema, in instruct mode.

    Segments are encoded apart, so the difference of 83 belongs to the schema alone, whatever the question was.
    """
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "boolean"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    without = {"messages": [{"role": "user", "content": "Is Oslo a capital?"}], "thinking": {"type": "disabled"}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "capital_answer", "schema": schema}}}
    assert count(without | asked, published_tokenizer) - count(without, published_tokenizer) == 119 - 36


def test_worked_example_two_calls_out_of_order(published_tokenizer) -> None:
    call = [
        {"id": "a", "function": {"name": "get_weather", "arguments": '{"location":"Oslo","days":2}'}},
        {
            "id": "b",
            "function": {
                "name": "get_weather",
                "arguments": {"location": "Rome", "opts": {"units": "C", "hourly": True}},
            },
        },
    ]
    request = {
        "tools": [WEATHER],
        "tool_choice": "none",
        "messages": [
            {"role": "user", "content": "Weather in Oslo and Rome?"},
            {"role": "assistant", "reasoning_content": "Two calls.", "content": None, "tool_calls": call},
            {"role": "tool", "tool_call_id": "b", "content": "21 C"},
            {"role": "tool", "tool_call_id": "a", "content": "4 C"},
        ],
    }
    assert count(request, published_tokenizer) == 397


def test_worked_example_ids(published_tokenizer) -> None:
    request = {
        "messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "hi"}],
        "reasoning_effort": "low",
    }
    ids = encode(render(conversation_from(request)).segments, published_tokenizer).ids
    expected = (
        "163587 2778 6244 878 14062 1 163589 3900 554 93330 13 163588 2778 163589 163586 163587 2778 6244 878 2482 1 "
        "163589 9663 163588 2778 163589 163586 163587 2778 6244 878 69702 1 163589 163587 39964 163589"
    )
    assert ids[-37:] == [int(token) for token in expected.split()]


def test_option_costs(published_tokenizer) -> None:
    base = {"messages": [{"role": "user", "content": "hello"}], "tools": [WEATHER]}
    plain = count(base, published_tokenizer)
    for extra, cost in (
        ({"tool_choice": "required"}, 36),
        ({"tool_choice": "none"}, 38),
        ({"response_format": {"type": "json_object"}}, 47),
    ):
        assert count(base | extra, published_tokenizer) - plain == cost
    instruct = count(base | {"reasoning_effort": "none"}, published_tokenizer)
    for effort, cost in (("low", 68), ("high", 68), ("max", 67)):
        assert count(base | {"reasoning_effort": effort}, published_tokenizer) - instruct == cost


def test_attributes_are_split_in_four(published_tokenizer) -> None:
    """For ``_x`` the split gives other ids than the joined text; the reference splits (chat.md §2)."""
    conversation = conversation_from(
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "_x"}}]},
                {"role": "tool", "tool_call_id": "a", "content": ""},
            ]
        }
    )
    ids = encode(render(conversation).segments, published_tokenizer).ids
    text = " ".join(map(str, ids))
    assert text.count("4453 878 7213 1 ") == 2
    assert "4453 14151 87 1" not in text
    assert tokens(' tool="_x"', published_tokenizer) == [4453, 14151, 87, 1]
