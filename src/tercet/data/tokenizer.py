"""Text to token ids and back.

`Tokenizer` wraps one rank file, trained here or published, behind the same few methods. Two guarantees matter to the
rest of the house: text never becomes a control id unless the caller asks for it, and every id that goes in or out lies
in ``[0, vocab_size)``. Formats and training are in `tercet.data.vocabulary`.

    tokenizer = Tokenizer.load("runs/demo/tokenizer")
    ids = tokenizer.encode("def f(x):")
    tokenizer.decode(ids)                    # the same text
    tokenizer.control["<|open|>"]            # vocab_size - 256 + 3
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tiktoken
from jaxtyping import UInt

from tercet.data.vocabulary import (
    PATTERN,
    RESERVED,
    control_table,
    pieces,
    published_table,
    read_ranks,
    serialize_ranks,
    train_ranks,
    write_ranks,
)
from tercet.errors import DataError, nearest
from tercet.util.files import write_json

RANK_FILE = "tiktoken.model"
INFO_FILE = "tercet_tokenizer.json"


class Tokenizer:
    """A byte-level BPE vocabulary with 256 control ids at its end (chat.md §1)."""

    def __init__(self, ranks: Mapping[bytes, int], control: Mapping[str, int] | None = None) -> None:
        """Build from ranks ``0 … n-1``; *control* replaces the published spellings (absolute ids).

        Raises:
            DataError: a control id outside the reserved range.
        """
        self.ranks = dict(ranks)
        self.control = control_table(len(self.ranks), control)
        """All 256 control spellings and their ids."""
        self._engine = tiktoken.Encoding(
            "tercet",
            pat_str=PATTERN,
            mergeable_ranks=self.ranks,
            special_tokens=self.control,
            explicit_n_vocab=len(self.ranks) + RESERVED,
        )
        self.token_bytes: list[bytes] = [b""] * self.vocab_size
        """What every id stands for; control ids stand for no bytes of text."""
        for token, rank in self.ranks.items():
            self.token_bytes[rank] = token
        self._spelling = {token: spelling.encode() for spelling, token in self.control.items()}
        longest_first = sorted(self.control, key=len, reverse=True)
        self._spellings = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        table = json.dumps(self.control, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(serialize_ranks(self.ranks) + table).hexdigest()
        """SHA-256 of ranks and control table; equal fingerprints encode equally."""

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a rank file, or a directory that holds ``tiktoken.model``.

        A ``tokenizer_config.json`` beside it (published checkpoints) names the control tokens; without one the
        published names at the published offsets are used.

        Raises:
            DataError: missing, malformed or truncated files, or a file that differs from what was saved.
        """
        file = Path(path)
        if file.is_dir():
            file = file / RANK_FILE
        if not file.is_file():
            raise DataError(f"no tokenizer at {path}: give a tiktoken rank file or a directory with {RANK_FILE}")
        tokenizer = cls(read_ranks(file), published_table(file.with_name("tokenizer_config.json")))
        info = file.with_name(INFO_FILE)
        if info.exists() and file.name == RANK_FILE:
            tokenizer._check_info(info)
        return tokenizer

    def _check_info(self, info: Path) -> None:
        try:
            expected = json.loads(info.read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{info} is not a tokenizer description ({error!r}); remove it or prepare again") from error
        if expected != self.fingerprint:
            raise DataError(
                f"{info.with_name(RANK_FILE)} differs from the tokenizer that was saved (fingerprint "
                f"{self.fingerprint[:12]}, recorded {str(expected)[:12]}): truncated or replaced. Restore the file"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn a vocabulary of at most *vocab_size* ids, the 256 control ids included, from *texts*.

        Raises:
            DataError: `vocab_size` below 512, or no text.
        """
        return cls(train_ranks(texts, vocab_size))

    def save(self, directory: str | Path) -> None:
        """Write ``tiktoken.model`` and a small JSON description into *directory*.

        Raises:
            StorageError: the disk refused the write.
        """
        folder = Path(directory)
        write_ranks(folder / RANK_FILE, self.ranks)
        info = {"vocab_size": self.vocab_size, "ranks": len(self.ranks), "fingerprint": self.fingerprint}
        write_json(folder / INFO_FILE, info | {"control": self.control})

    @property
    def vocab_size(self) -> int:
        """Ids in all: ranks plus 256."""
        return len(self.ranks) + RESERVED

    def control_id(self, spelling: str) -> int:
        """Return the id of a control token.

        Raises:
            DataError: no such control token in this vocabulary.
        """
        if spelling not in self.control:
            raise DataError(f"no control token {spelling!r} in this vocabulary{nearest(spelling, self.control)}")
        return self.control[spelling]

    @property
    def bos_id(self) -> int:
        """``[BOS]``: stands before every document, so that its first token is predicted too."""
        return self.control_id("[BOS]")

    @property
    def eos_id(self) -> int:
        """``[EOS]``: ends every document of a corpus."""
        return self.control_id("[EOS]")

    @property
    def end_of_msg_id(self) -> int:
        """``<|end_of_msg|>``: ends every chat message."""
        return self.control_id("<|end_of_msg|>")

    @property
    def pad_id(self) -> int:
        """``[PAD]``."""
        return self.control_id("[PAD]")

    @property
    def stop_ids(self) -> tuple[int, int]:
        """Ids after which generation stops: end of message, end of document (chat.md §7)."""
        return self.end_of_msg_id, self.eos_id

    def is_control(self, token: int) -> bool:
        """Whether *token* is one of the 256 reserved ids."""
        return len(self.ranks) <= token < self.vocab_size

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Return the ids of *text*.

        Args:
            text: any string; lone surrogates, which no byte sequence can hold, become U+FFFD.
            allow_special: read control spellings such as ``<|open|>`` as control tokens. Never set it for text that
                a user or a tool wrote.
        """
        return self.encode_array(text, allow_special).tolist()

    def encode_array(self, text: str, allow_special: bool = False) -> UInt[np.ndarray, tokens]:
        """Like `encode`, as a uint32 array; releases the interpreter lock while it works."""
        if not isinstance(text, str):
            raise DataError(f"a tokenizer encodes str, got {type(text).__name__}; decode bytes first")
        text = well_formed(text)
        if not allow_special:
            return self._ordinary(text)
        # Spellings come out before the text is cut: an image's pads are one run without a space, longer than a cut.
        parts = [
            np.array([self.control[part]], dtype=np.uint32) if number % 2 else self._ordinary(part)
            for number, part in enumerate(self._spellings.split(text))
        ]
        return np.concatenate(parts)

    def _ordinary(self, text: str) -> UInt[np.ndarray, tokens]:
        parts = [
            self._engine.encode_to_numpy(piece, allowed_special=set(), disallowed_special=()) for piece in pieces(text)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def decode_bytes(self, ids: Iterable[int], skip_control: bool = False) -> bytes:
        """Return the exact bytes of *ids*; control ids give their spelling, or nothing with `skip_control`.

        Raises:
            DataError: an id outside the vocabulary.
        """
        return b"".join(self._piece(int(token), skip_control) for token in ids)

    def _piece(self, token: int, skip_control: bool) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise DataError(f"token id {token} is outside the vocabulary [0, {self.vocab_size}); wrong tokenizer?")
        if token < len(self.ranks):
            return self.token_bytes[token]
        return b"" if skip_control else self._spelling[token]

    def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
        """Return the text of *ids*; bytes that are no UTF-8 become U+FFFD.

        Raises:
            DataError: an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_control).decode("utf-8", "replace")

    def stream(self, skip_control: bool = False) -> TextStream:
        """Return a decoder that takes ids one by one."""
        return TextStream(self, skip_control)


def well_formed(text: str) -> str:
    """Return *text* with lone surrogates, which JSON can spell but no byte sequence can hold, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TextStream:
    """Decode ids as they arrive; never emits half a character.

    The concatenation of all results equals ``tokenizer.decode`` of all ids, however they were grouped.
    """

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        """Add *ids* and return the text that became complete; bytes of an unfinished character wait.

        Raises:
            DataError: an id outside the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.decode_bytes(ids, self._skip_control))

    def finish(self) -> str:
        """End the stream; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
