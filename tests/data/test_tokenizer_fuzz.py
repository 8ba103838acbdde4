"""Tokenizer files written by an enemy: read and usable, or one clear error that names the file."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError

QUICK = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
LONG = settings(QUICK, max_examples=10_000, suppress_health_check=list(HealthCheck))

LINES = [b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256)]
WORDS = [
    b"%s %d" % (base64.b64encode(word), 256 + n) for n, word in enumerate([b"th", b"the", b" t", b"\xe4\xb8", b"aa"])
]


def usable(tokenizer: Tokenizer) -> None:
    """What was read encodes any text, gives it back, and keeps text and control ids apart."""
    text = "the <|open|> aa 中🙂\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(token) for token in ids)
    assert len(tokenizer.control) == 256
    assert sorted(tokenizer.control.values()) == list(range(tokenizer.vocab_size - 256, tokenizer.vocab_size))


def check_rank_file(path: Path, data: st.DataObject) -> None:
    lines = [*LINES, *WORDS]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "twice", "swap", "splice", "rank", "noise"])):
            case "drop":
                del lines[at]
            case "twice":
                lines.insert(data.draw(st.integers(0, len(lines))), lines[at])
            case "swap":
                lines[at], lines[-1] = lines[-1], lines[at]
            case "splice":
                lines[at] += data.draw(st.binary(max_size=3))
            case "rank":
                rank = data.draw(st.sampled_from([0, 261, 10**6, 2**63, 10**30, 10**5000 - 1, -1]))
                lines[at] = b"%s %s" % (base64.b64encode(b"%d" % at), _digits(rank))
            case "noise":
                lines[at] = data.draw(st.binary(max_size=20))
    (path / "tiktoken.model").write_bytes(data.draw(st.sampled_from([b"\n", b"\r\n"])).join(lines))
    try:
        tokenizer = Tokenizer.load(path)
    except DataError as error:
        message = str(error)
        if "tiktoken.model" in message and len(message) < 1_000:
            return
        raise
    usable(tokenizer)


def _digits(number: int) -> bytes:
    return b"9" * 5000 if number >= 10**4999 else b"%d" % number


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 600) | st.sampled_from([10**30, 1e308]) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
ENTRIES = st.dictionaries(
    st.one_of(st.integers(255, 530).map(str), st.text(max_size=3)),
    st.fixed_dictionaries({"content": st.one_of(st.sampled_from(["<|open|>", "[BOS]", "", "a"]), anything)}) | anything,
    max_size=4,
)


def check_control_table(path: Path, table: Any, cut: int) -> None:
    (path / "tiktoken.model").write_bytes(b"\n".join(LINES))
    text = json.dumps({"added_tokens_decoder": table}).encode()
    (path / "tokenizer_config.json").write_bytes(text[: len(text) - cut])
    try:
        tokenizer = Tokenizer.load(path)
    except DataError:
        return
    usable(tokenizer)


@QUICK
@given(st.data())
def test_any_rank_file_is_usable_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    check_rank_file(tmp_path, data)


@QUICK
@given(ENTRIES | anything, st.sampled_from([0, 0, 0, 1, 5]))
def test_any_control_table_is_usable_or_refused(tmp_path: Path, table: Any, cut: int) -> None:
    check_control_table(tmp_path, table, cut)


@pytest.mark.slow
@LONG
@given(st.data())
def test_any_rank_file_for_long(tmp_path: Path, data: st.DataObject) -> None:
    check_rank_file(tmp_path, data)


@pytest.mark.slow
@LONG
@given(ENTRIES | anything, st.sampled_from([0, 0, 0, 1, 5]))
def test_any_control_table_for_long(tmp_path: Path, table: Any, cut: int) -> None:
    check_control_table(tmp_path, table, cut)


@pytest.mark.parametrize(
    "text",
    [
        b'{"added_tokens_decoder": {"256": {"content": "\xff"}}}',
        b'{"added_tokens_decoder": {"256": {"content": "a"}, "256": {"content": "b"}}}',
        b'{"added_tokens_decoder": {"256": {"content": "a"}, "257": {"content": "a"}}}',
        b'{"added_tokens_decoder": {"512": {"content": "a"}}}',
        b'{"added_tokens_decoder": {"256": {"content": NaN}}}',
        b'{"added_tokens_decoder": {"256": {"content": ["a"]}}}',
        b'{"added_tokens_decoder": {"256": {"content": ""}}}',
        b'{"added_tokens_decoder": {"256": {"content": "\\ud800"}}}',
        b'{"added_tokens_decoder": ' * 50_000,
        b"[" * 200_000,
    ],
)
def test_control_tables_that_lie(tmp_path: Path, text: bytes) -> None:
    """Bad UTF-8, an id or a spelling twice, an id outside the reserved ones, no text, nesting without end."""
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(LINES))
    (tmp_path / "tokenizer_config.json").write_bytes(text)
    with pytest.raises(DataError):
        Tokenizer.load(tmp_path)
