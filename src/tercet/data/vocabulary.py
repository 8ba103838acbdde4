"""Byte-level BPE vocabularies: the pre-token pattern of K3, rank files, control tokens, and training.

A *rank file* has one line a token, ``base64(bytes) rank``; the rank is both the id and the merge priority. K3's file
has 163,584 ranks and 256 reserved *control* ids after them. A vocabulary trained here keeps that shape at any size:
``vocab_size`` ids are ``vocab_size - 256`` ranks, then the same 256 control ids at the same offsets, so code that knows
the offsets serves both. Text is merged by rank alone; control ids are outside the ranks, so no text can produce one.

Sources: chat.md §1; the cuts at 400,000 and 25,000 characters are those of the published tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tercet.errors import DataError
from tercet.util.files import atomic_open

RESERVED = 256
"""Control ids at the end of every vocabulary."""

CONTROL_OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Named control tokens by their distance from the first reserved id (chat.md §1)."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""K3's pre-token pattern; ``&&`` is class intersection, which tiktoken's engine and Oniguruma both have."""

PIECE_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{RUN_CHARACTERS + 1},}}|(?<!\S)\S{{{RUN_CHARACTERS + 1},}}")


def pieces(text: str) -> Iterator[str]:
    """Cut *text* as the published tokenizer does before it looks for pre-tokens.

    First every 400,000 characters, then wherever a run of white space, or of anything else, has lasted 25,000
    characters. The pieces concatenate to *text*; each is encoded on its own. Without the second cut a megabyte of one
    letter would overrun the pattern engine.
    """
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        done = 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield piece[done:cut]
                done = cut
        yield piece[done:]


def control_table(ranks: int, named: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return all 256 control spellings with their ids for a vocabulary of *ranks* ordinary tokens.

    Args:
        ranks: number of ordinary tokens; control ids are ``ranks … ranks + 255``.
        named: spellings and absolute ids that replace the published names, as read from a checkpoint's own table.

    Raises:
        DataError: an id outside the reserved range, or two spellings for one id.
    """
    named = named if named is not None else {name: ranks + offset for name, offset in CONTROL_OFFSETS.items()}
    by_id: dict[int, str] = {}
    for spelling, token in named.items():
        if not ranks <= token < ranks + RESERVED:
            raise DataError(
                f"control token {spelling!r} has id {token}, outside the reserved ids {ranks}…{ranks + RESERVED - 1}; "
                "the embedding has no such row. Correct the table beside the rank file"
            )
        if token in by_id:
            raise DataError(f"id {token} is given to both {by_id[token]!r} and {spelling!r}; keep one")
        by_id[token] = spelling
    return {by_id.get(t, f"<|reserved_token_{t}|>"): t for t in range(ranks, ranks + RESERVED)}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file.

    Raises:
        DataError: the file is missing, a line is malformed, a token or rank occurs twice, ranks have a gap, or one of
            the 256 single bytes is absent (some text could then not be encoded).
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read the rank file {path}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        token, rank = _parse_line(path, number, line)
        if token in ranks:
            raise DataError(f"{path}:{number}: token {token!r} already has rank {ranks[token]}; remove one line")
        if rank in seen:
            raise DataError(f"{path}:{number}: rank {rank} was already given on line {seen[rank]}; ranks are unique")
        ranks[token] = rank
        seen[rank] = number
    _check_complete(path, ranks, seen)
    return ranks


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    try:
        if len(fields) != 2 or not fields[1].isdigit():
            raise ValueError("expected 'base64 rank'")
        token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
        if not token:
            raise ValueError("empty token")
        return token, rank
    except (binascii.Error, ValueError) as error:
        shown = line[:60].decode("utf-8", "replace")
        raise DataError(
            f"{path}:{number}: not a line of a tiktoken rank file ({error}): {shown!r}; is it truncated?"
        ) from error


def _check_complete(path: Path, ranks: Mapping[bytes, int], seen: Mapping[int, int]) -> None:
    gap = next((rank for rank in range(len(seen)) if rank not in seen), None)
    if gap is not None:
        raise DataError(
            f"{path}: rank {gap} is missing although ranks go up to {max(seen)}; control ids follow the last rank, "
            "so a gap would shift them. Use the complete file"
        )
    absent = [value for value in range(256) if bytes([value]) not in ranks]
    if absent:
        raise DataError(
            f"{path}: {len(absent)} of the 256 single bytes have no rank (first: 0x{absent[0]:02x}), so not every "
            f"text could be encoded; the file has {len(ranks)} ranks. Use the complete file"
        )


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write a rank file, complete or not at all.

    Raises:
        StorageError: the disk refused the write.
    """
    with atomic_open(path) as handle:
        handle.write(serialize_ranks(ranks))


def serialize_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Return the canonical bytes of a rank file, in order of rank."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def _byte_letters() -> dict[str, int]:
    """Map the printable letters by which byte-level BPE writes bytes back to the bytes.

    Bytes that are printable in Latin-1 stand for themselves; the others take the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(v): v for v in printable} | {chr(256 + n): v for n, v in enumerate(others)}


def train_ranks(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Learn byte-pair merges on K3's pre-tokens and return them as ranks.

    The 256 bytes take ranks 0…255 in order of value; merges follow in the order in which they were learnt.

    Args:
        texts: training documents; read once.
        vocab_size: ids in all, so at most ``vocab_size - 256`` ranks. A small corpus yields fewer.

    Raises:
        DataError: `vocab_size` leaves no room for the bytes and the control ids, or the texts are empty.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < 256 + RESERVED:
        raise DataError(
            f"vocab_size is {vocab_size}; 256 bytes and {RESERVED} control ids need at least {256 + RESERVED}"
        )
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - RESERVED,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    size = 0

    def counted() -> Iterator[str]:
        nonlocal size
        for text in texts:
            size += len(text)
            yield from pieces(text)

    engine.train_from_iterator(counted(), trainer=trainer)
    if not size:
        raise DataError("there is no text to train a tokenizer on; give non-empty UTF-8 documents")
    letters = _byte_letters()
    vocabulary: dict[str, int] = json.loads(engine.to_str())["model"]["vocab"]
    learnt = (bytes(letters[c] for c in word) for word, _ in sorted(vocabulary.items(), key=lambda item: item[1]))
    ordered = [bytes([value]) for value in range(256)] + [token for token in learnt if len(token) > 1]
    return {token: rank for rank, token in enumerate(ordered)}


def published_table(path: Path) -> dict[str, int] | None:
    """Read the control spellings in the ``added_tokens_decoder`` of a published ``tokenizer_config.json``, if any.

    Raises:
        DataError: the file is not JSON, or the table is malformed or names an id or a spelling twice.
    """
    if not path.exists():
        return None
    try:
        table: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique).get("added_tokens_decoder")
        named = {int(token): entry["content"] for token, entry in table.items()} if table else None
        json.dumps(table, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair, UTF-8 cannot
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: added_tokens_decoder is not a table of id → content ({error!r})") from error
    if named is None:
        return None
    spellings = list(named.values())
    if not all(isinstance(spelling, str) and spelling for spelling in spellings):
        raise DataError(f"{path}: a control token's content is empty or no text; every control token needs a spelling")
    if len(named) != len(table) or len(set(spellings)) != len(spellings):
        raise DataError(f"{path}: added_tokens_decoder gives an id or a spelling twice; each names one control token")
    return {spelling: token for token, spelling in named.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is given twice")
    return table
