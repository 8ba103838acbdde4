"""Every field of the chat schema, and chat files with file, line and field."""

import json
from pathlib import Path

import pytest
from chat_kit import TOOL
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.cli.main import main
from tercet.data.chat import check_chat, conversation_from, read_conversation
from tercet.errors import DataError

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
SCHEMA = {"name": "n", "schema": {"type": "object"}}


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "f", **function}}


GOOD = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": ""}, USER, ASSISTANT]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
    {"messages": [USER, CALLING, RESULT, ASSISTANT]},
    {"messages": [USER, CALLING, {"role": "tool", "id": "c", "content": "r"}]},
    {"messages": [USER, {"role": "assistant", "reasoning": "r", "partial": True}]},
    {"messages": [USER, {"role": "system", "tools": [TOOL]}], "tool_choice": "required"},
    {"messages": [{"role": "system", "tools": [TOOL], "content": None}, USER], "tools": [tool(name="g_-9")]},
    {"messages": [USER], "tools": [], "tool_choice": "none"},
    {"messages": [USER], "response_format": {"type": "text"}},
    {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"messages": [USER], "thinking": {"type": "disabled", "keep": "last", "effort": "medium"}},
    {"messages": [USER], "thinking": {"type": "enabled", "keep": "all"}, "temperature": 1, "unknown": "echo"},
]
BAD = [
    ([], "", "must be a JSON object"),
    ({}, "messages", "non-empty list"),
    ({"messages": []}, "messages", "non-empty list"),
    ({"messages": [3]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "got nothing"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role", "'developer'"),
    ({"messages": [{"role": "users", "content": "x"}]}, "messages[0].role", "did you mean 'user'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string or a list of parts"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name", "must be a string"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0]", "'image_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
        "must be a string",
    ),
    ({"messages": [USER, {**ASSISTANT, "reasoning_content": []}]}, "messages[1].reasoning_content", "string"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": {}}]}, "messages[1].tool_calls", "must be a list"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function", "object"),
    (
        {"messages": [{**ASSISTANT, "tool_calls": [{**CALL, "type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
        "'custom'",
    ),
    (
        {"messages": [{**ASSISTANT, "tool_calls": [{"function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
        "must not be empty",
    ),
    (
        {"messages": [{**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "must be a JSON object, got the array",
    ),
    (
        {"messages": [{**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON text or an object",
    ),
    (
        {"messages": [{**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": {"a": float("nan")}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "cannot be written as JSON",
    ),
    ({"messages": [USER, {"role": "tool", "content": "r"}]}, "messages[1].tool_call_id", "must be a string"),
    ({"messages": [USER, RESULT]}, "messages[1]", "answers no call"),
    ({"messages": [{**ASSISTANT, "partial": True}, USER]}, "messages[0].partial", "only the last"),
    ({"messages": [{**ASSISTANT, "partial": 1}]}, "messages[0].partial", "true or false"),
    ({"messages": [{**CALLING, "partial": True}]}, "messages[0].tool_calls", "cannot hold calls"),
    # tools
    ({"messages": [USER], "tools": {}}, "tools", "must be a list"),
    ({"messages": [USER], "tools": [3]}, "tools[0]", "must be an object"),
    ({"messages": [USER], "tools": [{"function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function", "object"),
    *(
        ({"messages": [USER], "tools": [tool(name=name)]}, "tools[0].function.name", "1 to 256")
        for name in (None, "", "9f", "a@b", "é", "a" * 257, "f\n")
    ),
    ({"messages": [USER], "tools": [tool(description=1)]}, "tools[0].function.description", "a string"),
    ({"messages": [USER], "tools": [tool(parameters=[])]}, "tools[0].function.parameters", "JSON schema"),
    ({"messages": [USER], "tools": [tool(x=float("inf"))]}, "tools[0]", "cannot be written"),
    ({"messages": [USER], "tools": [tool(), tool()]}, "tools[1].function.name", "already declared at tools[0]"),
    (
        {"messages": [{"role": "system", "tools": [tool()]}], "tools": [tool()]},
        "messages[0].tools[0].function.name",
        "already declared",
    ),
    (
        {"messages": [{"role": "system", "tools": [tool()]}, {"role": "system", "tools": [tool()]}]},
        "messages[1].tools[0].function.name",
        "already declared",
    ),
    ({"messages": [{**USER, "tools": [tool()]}]}, "messages[0].tools", "only a system message"),
    ({"messages": [{**ASSISTANT, "content": None, "tools": [tool()]}]}, "messages[0].tools", "only a system message"),
    ({"messages": [{"role": "system", "content": "x", "tools": [tool()]}]}, "messages[0].content", "must be empty"),
    ({"messages": [{"role": "system", "tools": "f"}]}, "messages[0].tools", "must be a list"),
    ({"messages": [{"role": "system", "tools": []}]}, "messages[0].tools", "must not be empty"),
    # options
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice", "no tool is declared"),
    ({"messages": [USER], "tools": [], "tool_choice": "required"}, "tool_choice", "no tool is declared"),
    ({"messages": [USER], "tool_choice": "always"}, "tool_choice", "'always'"),
    ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
    ({"messages": [USER], "response_format": "json"}, "response_format.type", "got nothing"),
    ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    *(
        ({"messages": [USER], "response_format": {"type": "json_schema", "json_schema": SCHEMA | change}}, field, text)
        for change, field, text in (
            ({"name": None}, "response_format.json_schema.name", "must be a string"),
            ({"schema": None}, "response_format.json_schema.schema", "JSON schema object"),
            ({"schema": []}, "response_format.json_schema.schema", "JSON schema object"),
            ({"strict": 1}, "response_format.json_schema.strict", "true or false"),
        )
    ),
    ({"messages": [USER], "thinking": True}, "thinking", "must be an object"),
    ({"messages": [USER], "thinking": {"type": "auto"}}, "thinking.type", "'enabled' or 'disabled'"),
    ({"messages": [USER], "thinking": {"keep": "last"}}, "thinking.keep", "must be 'all'"),
    ({"messages": [USER], "chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking", "true or false"),
    (
        {"messages": [USER], "chat_template_kwargs": {"preserve_thinking": False}},
        "chat_template_kwargs.preserve_thinking",
        "must be true",
    ),
]
STRICT = [
    ({"messages": [USER, ASSISTANT], "tool": []}, "tool", "unknown key"),
    ({"messages": [USER, {**ASSISTANT, "reasoning_contnt": "x"}]}, "messages[1].reasoning_contnt", "did you mean"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": [{**CALL, "fn": 1}]}]}, "messages[1].tool_calls[0].fn", "unknown"),
    ({"messages": [USER]}, "messages", "no assistant message"),
    ({"messages": [USER, {**ASSISTANT, "partial": True}]}, "messages[1].partial", "for requests"),
    (
        {"messages": [USER, CALLING, {**RESULT, "tool_call_id": "d", "name": "f"}, ASSISTANT]},
        "messages[2].tool_call_id",
        "'d' answers no open call",
    ),
    ({"messages": [USER, CALLING, RESULT, RESULT, ASSISTANT]}, "messages[3].tool_call_id", "answers no open call"),
    (
        {"messages": [USER, {**CALLING, "tool_calls": [CALL, CALL]}, RESULT]},
        "messages[1].tool_calls",
        "must be unique",
    ),
]


@pytest.mark.parametrize("data", GOOD)
def test_good_requests(data) -> None:
    assert read_conversation(data)[1] == []
    assert len(conversation_from(data).messages) == len(data["messages"])


@pytest.mark.parametrize(("data", "field", "message"), BAD)
@pytest.mark.parametrize("strict", [False, True])
def test_bad_fields_are_named(data, field, message, strict) -> None:
    conversation, problems = read_conversation(data, strict=strict)
    assert conversation is None
    assert any(p.field == field and message in p.message for p in problems), problems
    if not strict:
        assert len(problems) == 1, problems
        with pytest.raises(DataError) as caught:
            conversation_from(data)
        assert field in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize(("data", "field", "message"), STRICT)
def test_files_are_checked_more_strictly(data, field, message) -> None:
    assert read_conversation(data)[1] == []
    _, problems = read_conversation(data, strict=True)
    assert [p.field for p in problems] == [field]
    assert message in problems[0].message


def test_every_problem_is_reported() -> None:
    data = {"messages": [{"role": "who"}, {"role": "user"}], "tool_choice": "x", "reasoning_effort": "medium"}
    fields = [problem.field for problem in read_conversation(data)[1]]
    assert fields == ["messages[0].role", "messages[1].content", "reasoning_effort", "tool_choice"]
    with pytest.raises(DataError, match=r"\(and 3 more\)"):
        conversation_from(data)


KEYS = ["messages", "role", "content", "tools", "tool_calls", "function", "name", "arguments", "type", "id", "thinking"]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["user", "assistant", "tool", "system", "function", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), anything, max_size=5), max_size=3), anything)
@settings(max_examples=300, deadline=None)
def test_no_data_crashes_the_reader(messages, extra) -> None:
    for data in ({"messages": messages, "tools": extra}, {"messages": extra}, extra):
        conversation, problems = read_conversation(data, strict=True)
        assert (conversation is None) == bool(problems)


def write(path: Path, *lines: bytes | dict) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines) + b"\n")
    return path


def test_check_chat_names_file_line_and_field(tmp_path) -> None:
    good = {"messages": [USER, ASSISTANT], "id": 7, "metadata": {"source": "x"}}
    a = write(
        tmp_path / "a.jsonl",
        good,
        b"",
        b"{",
        b'{"messages": "\xff"}',
        b'{"messages": [], "messages": []}',
        b'{"messages": [NaN]}',
        b"[" * 100_000,
        {"messages": [{"role": "owner", "content": ""}, RESULT]},
        b"\xef\xbb\xbf{}",
        b'{"messages": [1' + b"0" * 5000 + b"]}",
    )
    b = write(tmp_path / "b.jsonl", good, good)
    empty, absent = write(tmp_path / "c.jsonl"), tmp_path / "d.jsonl"
    report = check_chat([a, b, empty, absent, tmp_path])
    assert (report.files, report.conversations, report.ok) == (5, 3, False)
    assert check_chat([b]).ok
    lines = [str(problem) for problem in report.problems]
    for expected in (
        f"{a}:3: not JSON at column 2: ",
        f"{a}:4: byte 15 is not UTF-8",
        f"{a}:5: not JSON: the key 'messages' occurs twice in one object",
        f"{a}:6: not JSON: NaN is not a JSON number",
        f"{a}:7: nested too deeply",
        f"{a}:8: messages[0].role: unknown role",
        f"{a}:9: not JSON at column 1: ",
        f"{a}:10: not JSON: ",
        f"{empty}: holds no conversation",
        f"{absent}: cannot be read: No such file",
        f"{tmp_path}: cannot be read: Is a directory",
    ):
        assert sum(line.startswith(expected) for line in lines) == 1, (expected, lines)
    assert len(lines) == 11


def test_check_chat_command(tmp_path, capsys) -> None:
    good = write(tmp_path / "good.jsonl", {"messages": [USER, ASSISTANT]})
    bad = write(tmp_path / "bad.jsonl", {"messages": [USER]}, b"x", b"y")
    assert main(["data", "check-chat", str(good)]) == 0
    assert "1 good conversations, 0 problems in 1 files" in capsys.readouterr().out
    assert main(["data", "check-chat", str(good), str(bad), "--limit", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{bad}:1: messages: has no assistant message" in out
    assert "… and 2 more" in out


def test_the_documented_lines_are_good(tmp_path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "chat.md").read_text(encoding="utf-8")
    lines = page.split("```jsonl\n")[1].split("```")[0]
    (tmp_path / "doc.jsonl").write_text(lines, encoding="utf-8")
    report = check_chat([tmp_path / "doc.jsonl"])
    assert report.ok, [str(problem) for problem in report.problems]
    assert report.conversations == 3
