"""Tokenizer: exact round trips, K3's pattern and cuts, rank files, control ids, streaming."""

import base64
import itertools
import json
import os
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from tercet.data import Tokenizer
from tercet.data.vocabulary import CONTROL_OFFSETS, PATTERN, RESERVED, pieces
from tercet.errors import DataError, StorageError

PROSE = "The café's naïve coöperation — it's 12345 bytes,\n\n\tdef f(x): return x**2  # 漢字 and かな 🙂\r\n"
BYTES = {bytes([value]): value for value in range(256)}


def vendor_file(name: str) -> Path:
    root = Path(os.environ.get("TERCET_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = root / "vendor_verifier" / name
    if not path.exists():
        pytest.skip(f"{name} of the vendor verifier is not at hand (set TERCET_DATA)")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    source = Path(json.__file__).parent
    return Tokenizer.train([p.read_text(encoding="utf-8") for p in sorted(source.glob("*.py"))] + [PROSE] * 3, 1024)


def write_ranks(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def lines_of(ranks: dict[bytes, int]) -> list[bytes]:
    return [base64.b64encode(token) + f" {rank}".encode() for token, rank in ranks.items()]


# the pattern


ALPHABET = [
    *"aAbZzé'sStTmMdD0123 \t\n\r\u00a0\u3000漢字かナ한Ǆǅʰˆ\u0301\u0308.,;(){}_-#\"ⅷ٣²\u2028\u200b🙂İſK々〇〆ー・",
    *("'re", "'LL", "'Ve", " 's", "\r\n", "  ", "\n\n"),
]


def samples(count: int) -> list[str]:
    """Random text over awkward characters; code points newer than some engine's Unicode tables are left out."""
    rng = random.Random(7)
    out = []
    for number in range(count):
        if number % 3:
            out.append("".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 12))))
        else:
            drawn = (chr(rng.randrange(0x20, 0x3000)) for _ in range(8))
            out.append("".join(c for c in drawn if unicodedata.category(c) != "Cn"))
    return out


def test_training_and_encoding_engines_cut_like_an_independent_one() -> None:
    """Oniguruma (training) and tiktoken (encoding) against the `regex` package in set-operation mode."""
    independent = regex.compile(PATTERN, regex.V1)
    oniguruma = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    texts = samples(600)
    # With every substring a token, BPE merges each pre-token to one id, so the ids are the pre-tokens.
    parts = {data[a:b] for data in map(str.encode, texts) for a, b in itertools.combinations(range(len(data) + 1), 2)}
    ordered = sorted(parts | set(BYTES), key=lambda part: (len(part), part))
    ranks = {part: rank for rank, part in enumerate(ordered)}
    engine = tiktoken.Encoding("all", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in texts:
        expected = [match.group() for match in independent.finditer(text)]
        assert "".join(expected) == text
        assert [part for part, _ in oniguruma.pre_tokenize_str(text)] == expected, ascii(text)
        tokens = [engine.decode_single_token_bytes(t).decode() for t in engine.encode_ordinary(text)]
        assert tokens == expected, ascii(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("don't DON'T", ["don't", " DON'T"]),
        ("漢字かな", ["漢字", "かな"]),
        ("ab漢字か漢 漢A漢a", ["ab", "漢字", "か", "漢", " ", "漢", "A", "漢", "a"]),
        ("HTMLParser", ["HTMLParser"]),
        ("x=12345", ["x", "=", "123", "45"]),
        ("a  b", ["a", " ", " b"]),
        ("end \n\n  x", ["end", " \n\n", " ", " x"]),
        ("});\n\n", ["});\n\n"]),
    ],
)
def test_pattern_by_hand(text: str, expected: list[str]) -> None:
    assert [match.group() for match in regex.compile(PATTERN, regex.V1).finditer(text)] == expected


def reference_pieces(text: str) -> list[str]:
    """The cuts spelled out character by character."""
    out = []
    for start in range(0, len(text), 400_000):
        part, begin, run, space = text[start : start + 400_000], 0, 0, None
        for position, character in enumerate(part):
            if character.isspace() != space:
                run, space = 1, character.isspace()
            elif run == 25_000:
                out.append(part[begin:position])
                begin, run = position, 1
            else:
                run += 1
        out.append(part[begin:])
    return out


def test_cuts_of_long_runs_and_long_texts() -> None:
    texts = ["", "x", "a" * 25_000, "a" * 25_001, " " * 50_001 + "b" * 24_999 + " ", "ab " * 140_000, "z" * 800_001]
    texts += ["a b" * 9000 + "\u3000" * 60_000 + "q" * 25_001, "y" * 399_999 + "  " + "y" * 30_000]
    for text in texts:
        assert list(pieces(text)) == reference_pieces(text)


@pytest.mark.parametrize(
    "unit", ["a", "A", " ", "\n", "漢", "か", "é", "\u0301", "!", "1", "\u3000", "aA", "🙂", "'s", " \n"]
)
def test_long_runs_do_not_overrun_the_pattern_engine(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (60_000 // len(unit))
    assert tokenizer.decode(tokenizer.encode(text)) == text


# round trips and control ids


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_any_text_survives_and_gives_only_ordinary_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= token < len(tokenizer.ranks) for token in ids)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*CONTROL_OFFSETS, "<|", "|>", "<|reserved_token_776|>"]), st.text(max_size=5)))
)
def test_control_spellings_in_text_stay_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_control(token) for token in ids)
    assert tokenizer.decode(ids) == text


def test_every_control_spelling_is_text_unless_asked(tokenizer: Tokenizer) -> None:
    for spelling, token in tokenizer.control.items():
        assert not any(tokenizer.is_control(t) for t in tokenizer.encode(f"a{spelling}b"))
        assert tokenizer.encode(spelling, allow_special=True) == [token]
        assert tokenizer.decode([token]) == spelling
        assert tokenizer.decode([token], skip_control=True) == ""


def test_control_ids_sit_at_the_published_offsets_from_the_end(tokenizer: Tokenizer) -> None:
    first = tokenizer.vocab_size - RESERVED
    assert len(tokenizer.control) == RESERVED
    assert sorted(tokenizer.control.values()) == list(range(first, tokenizer.vocab_size))
    published = {"[BOS]": 163_584, "[EOS]": 163_585, "<|end_of_msg|>": 163_586, "<|open|>": 163_587}
    published |= {"<|close|>": 163_588, "<|sep|>": 163_589, "[EOT]": 163_593, "<|media_pad|>": 163_605}
    published |= {"<osagent_mode>": 163_649, "[UNK]": 163_838, "[PAD]": 163_839}
    for spelling, token in published.items():
        assert tokenizer.vocab_size - tokenizer.control[spelling] == 163_840 - token
    assert tokenizer.stop_ids == (first + 2, first + 1)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (first, first + 1, first + 255)


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"  # a pair that JSON left in two halves


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(DataError, match="outside the vocabulary"):
            tokenizer.decode([0, token])
        with pytest.raises(DataError, match="outside the vocabulary"):
            tokenizer.stream().push(token)
    with pytest.raises(DataError, match="encodes str"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="did you mean"):
        tokenizer.control_id("<|opn|>")


# streaming


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1023), max_size=12), st.data())
def test_stream_equals_whole_under_every_grouping(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    """Random ids, so the bytes are mostly invalid UTF-8."""
    for skip in (False, True):
        stream, cuts = tokenizer.stream(skip), sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
        text = "".join(stream.push(*ids[a:b]) for a, b in itertools.pairwise(cuts)) + stream.finish()
        assert text == tokenizer.decode(ids, skip)


def test_stream_never_emits_half_a_character() -> None:
    tokenizer = Tokenizer(BYTES)
    text = "é漢🙂a\u0301"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    for grouping in itertools.product([False, True], repeat=len(ids) - 1):
        groups, stream = [[ids[0]]], tokenizer.stream()
        for token, cut in zip(ids[1:], grouping, strict=True):
            groups.append([token]) if cut else groups[-1].append(token)
        out = [stream.push(*group) for group in groups]
        assert "\ufffd" not in "".join(out)
        assert "".join(out) == text
        assert stream.finish() == ""
    stream = tokenizer.stream()
    assert stream.push(*ids[:1]) == ""
    assert stream.finish() == "\ufffd"


# training


def test_training_learns_merges_in_rank_order_and_is_deterministic(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 1024
    assert [tokenizer.token_bytes[value] for value in range(256)] == list(BYTES)
    text = "abab abab abab abab"
    first = Tokenizer.train([text] * 4, 600)
    assert first.ranks[b"ab"] == 256  # the most frequent pair
    assert first.fingerprint == Tokenizer.train([text] * 4, 600).fingerprint
    assert first.vocab_size < 600  # the text has too few pairs; no rank is invented
    assert len(first.encode("abab")) == 1


def test_training_refuses_impossible_requests() -> None:
    with pytest.raises(DataError, match="at least 512"):
        Tokenizer.train(["text"], 511)
    with pytest.raises(DataError, match="no text"):
        Tokenizer.train(["", ""], 1024)
    assert Tokenizer.train(["text"], 512).vocab_size == 512


# files


def test_save_and_load_agree_with_an_independent_reader(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new" / "tokenizer")
    for path in (tmp_path / "new" / "tokenizer", tmp_path / "new" / "tokenizer" / "tiktoken.model"):
        assert Tokenizer.load(path).fingerprint == tokenizer.fingerprint
    raw = (tmp_path / "new" / "tokenizer" / "tiktoken.model").read_text().split("\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in raw if line}
    engine = tiktoken.Encoding("file", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert engine.encode_ordinary(PROSE) == tokenizer.encode(PROSE)
    assert np.array_equal(tokenizer.encode_array(PROSE), tokenizer.encode(PROSE))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:300], *lines[301:]], "rank 300 is missing"),
        (lambda lines: [*lines, lines[5]], "already has rank"),
        (lambda lines: [*lines, base64.b64encode(b"fresh") + b" 7"], "rank 7 was already given"),
        (lambda lines: [*lines, b"!!!! 400"], ":401: not a line"),
        (lambda lines: [*lines, b"YWJj"], ":401: not a line"),
        (lambda lines: [*lines, b"YWJj -4"], ":401: not a line"),
        (lambda lines: [*lines, b"YWJj 4 4"], ":401: not a line"),
        (lambda lines: [*lines, b"YWJ 400"], ":401: not a line"),
        (lambda lines: [*lines, "YWJj ٤".encode()], ":401: not a line"),
        (lambda lines: [*lines, b"YWJj 99999999999999999999"], "rank 400 is missing"),
        (lambda lines: lines[:200], "56 of the 256 single bytes"),
        (lambda lines: [b"\x00\xff\x80" * 20], ":1: not a line"),
        (lambda lines: [], "256 of the 256 single bytes"),
    ],
)
def test_damaged_rank_files_name_file_line_and_fault(tmp_path: Path, damage, message: str) -> None:
    pairs = [bytes([97 + n // 26, 97 + n % 26]) for n in range(144)]
    lines = lines_of(BYTES | {pair: 256 + n for n, pair in enumerate(pairs)})
    assert len(Tokenizer.load(write_ranks(tmp_path / "good", lines)).ranks) == 400
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.load(write_ranks(tmp_path / "bad", damage(lines)))
    assert str(tmp_path / "bad") in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_as_a_rank_file_give_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.tiktoken"
    path.write_bytes(data)
    with pytest.raises(DataError):
        Tokenizer.load(path)


def test_missing_truncated_and_foreign_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer at"):
        Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    file = tmp_path / "tiktoken.model"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-10]))  # cut at a line end: a valid, shorter file
    with pytest.raises(DataError, match="truncated or replaced"):
        Tokenizer.load(tmp_path)
    file.write_bytes(b"".join(lines))
    (tmp_path / "tercet_tokenizer.json").write_text("[1]")
    with pytest.raises(DataError, match="not a tokenizer description"):
        Tokenizer.load(tmp_path)


def test_saving_where_nothing_can_be_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        tokenizer.save(tmp_path / "file" / "below")


def test_control_names_come_from_the_checkpoints_own_table(tmp_path: Path) -> None:
    """M28: names beside the rank file win, none may lie outside the embedding; M29: all 256 slots keep their ids."""
    write_ranks(tmp_path / "tiktoken.model", lines_of(BYTES))
    table = tmp_path / "tokenizer_config.json"

    def write_table(entries: dict[str, str]) -> None:
        table.write_text(
            json.dumps({"added_tokens_decoder": {key: {"content": value} for key, value in entries.items()}})
        )

    write_table({"256": "[BOS]", "300": "<|odd|>", "511": "[PAD]"})
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.control[name] for name in ("[BOS]", "<|odd|>", "[PAD]")] == [256, 300, 511]
    assert sorted(tokenizer.control.values()) == list(range(256, 512))
    assert tokenizer.control["<|reserved_token_257|>"] == 257
    for bad in ("512", "255"):
        write_table({bad: "[BOS]"})
        with pytest.raises(DataError, match=r"outside the reserved ids 256…511"):
            Tokenizer.load(tmp_path)
    table.write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(DataError, match="added_tokens_decoder"):
        Tokenizer.load(tmp_path)


# the published vocabulary


def test_published_vocabulary() -> None:
    """Ids that the specification lists for K3 (chat.md §1, §2, §6)."""
    tokenizer = Tokenizer.load(vendor_file("tiktoken.model"))
    assert tokenizer.vocab_size == 163_840
    assert len(tokenizer.ranks) == 163_584
    assert (tokenizer.control["<|open|>"], tokenizer.control["[PAD]"]) == (163_587, 163_839)
    words = {"message": 2778, "think": 39964, "response": 12092, "tools": 25385, "call": 10257, "argument": 47185}
    assert {word: tokenizer.encode(word) for word in words} == {word: [token] for word, token in words.items()}
    assert tokenizer.encode("You are terse.") == [3900, 554, 93330, 13]
    split = [token for part in (" tool", '="', "_x", '"') for token in tokenizer.encode(part)]
    assert split == [4453, 878, 7213, 1]
    assert tokenizer.encode(' tool="_x"') == [4453, 14151, 87, 1]
    assert len(tokenizer.encode("<|kimi_image_placeholder|>")) == 8
    assert tokenizer.encode("<|kimi_image_placeholder|>")[-2:] == [91, 29]
    assert tokenizer.encode("<|kimi_image_placeholder|>\n")[-2:] == [91, 719]
