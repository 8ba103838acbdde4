"""A prepared corpus on disk: token shards, documents, tokenizer, index.

Every split is one long line of tokens, cut into shard files that are memory-mapped. A document on that line is
``[BOS] t1 … tn [EOS]``: the first real token has a predecessor to be predicted from, so the bits of a split are the
sum over all its targets, and its bytes are known exactly.

    DIR/index.json                 counts, sources, fingerprints; written last
    DIR/tokenizer/                 rank file and description
    DIR/train-00000.bin …          little-endian uint16 (vocabularies to 65,536) or uint32
    DIR/train-documents.npy        one record a document: tokens, bytes, source file, row
    DIR/validation-00000.bin …, DIR/validation-documents.npy
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from tercet.data.batch import Batch
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError, nearest
from tercet.ops import IGNORE

FORMAT = 1
INDEX = "index.json"
DOCUMENT = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("source", "<i4"), ("row", "<i8")])
"""One document: its tokens with [BOS] and [EOS], the bytes of its text, index of its file, row in that file."""


@dataclass(frozen=True)
class Scored:
    """One evaluation batch and what it is worth."""

    batch: Batch
    bytes: int
    """Bytes of text that the targets of `batch` stand for; the sum over a split is the split's size."""


class Window(NamedTuple):
    """A stretch of a split's line."""

    tokens: Int[np.ndarray, length]
    targets: Int[np.ndarray, length]
    """Next token of the same document, also across the end of the window; `IGNORE` at a document's last token."""
    starts: Int[np.ndarray, documents]
    """Offsets in the window at which documents start."""


class Split:
    """The tokens of one split as a line of `tokens` positions."""

    def __init__(self, name: str, root: Path, entry: dict[str, Any], dtype: np.dtype, vocab_size: int) -> None:
        self.name = name
        self._root, self._vocab_size = root, vocab_size
        self.tokens: int = entry["tokens"]
        self.bytes: int = entry["bytes"]
        self.documents = _load_documents(root / f"{name}-documents.npy", entry)
        self._shards = [_map_shard(root, shard["file"], shard["tokens"], dtype) for shard in entry["shards"]]
        self._shard_ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        ends = np.cumsum(self.documents["tokens"], dtype=np.int64)
        self.starts = np.concatenate([np.zeros(1, np.int64), ends])
        """First position of every document, and the end."""
        if not int(self.starts[-1]) == sum(map(len, self._shards)) == self.tokens:
            raise DataError(
                f"{root}: the {name} shards, documents and index disagree on the number of tokens; prepare again"
            )

    def read(self, start: int, stop: int) -> Int[np.ndarray, tokens]:
        """Return tokens ``start … stop`` of the line as int64.

        Raises:
            DataError: an id outside the vocabulary; the shard was damaged after it was written.
        """
        out = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._shard_ends, start, side="right"))
        filled = 0
        while filled < len(out):
            offset = start + filled - (int(self._shard_ends[shard - 1]) if shard else 0)
            part = self._shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        if len(out) and int(out.max()) >= self._vocab_size:
            raise DataError(
                f"{self._root}: token id {int(out.max())} in the {self.name} shards is outside the vocabulary "
                f"[0, {self._vocab_size}); the shard is damaged, prepare the corpus again"
            )
        return out

    def window(self, start: int, length: int) -> Window:
        """Cut *length* tokens from position *start*; the line is a ring, so a window may run over its end.

        Args:
            start: position of its first token, in ``[0, tokens)``.
            length: tokens in the window, at most those of the split.
        """
        head = min(length, self.tokens - start)
        window = self._cut(start, head)
        if head == length:
            return window
        more = self._cut(0, length - head)
        return Window(
            tokens=np.concatenate([window.tokens, more.tokens]),
            targets=np.concatenate([window.targets, more.targets]),
            starts=np.concatenate([window.starts, more.starts + head]),
        )

    def _cut(self, start: int, length: int) -> Window:
        stop = start + length
        after = min(stop + 1, self.tokens)
        line = self.read(start, after)
        tokens = line[:length]
        targets = np.full(length, IGNORE, dtype=np.int64)
        targets[: after - start - 1] = line[1:]
        first, last = np.searchsorted(self.starts, [start, stop], side="left")
        starts = self.starts[first:last] - start
        ends = self.starts[
            np.searchsorted(self.starts, start, side="right") : np.searchsorted(self.starts, stop, "right")
        ]
        targets[ends - start - 1] = IGNORE
        return Window(tokens, targets, starts)


def _load_documents(path: Path, entry: dict[str, Any]) -> np.ndarray:
    try:
        documents = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path} ({error}); prepare the corpus again") from error
    if documents.dtype != DOCUMENT or documents.ndim != 1 or len(documents) != entry["documents"]:
        raise DataError(
            f"{path} holds {documents.shape} {documents.dtype}, the index says {entry['documents']} documents"
        )
    return documents


def _map_shard(root: Path, file: str, tokens: int, dtype: np.dtype) -> np.ndarray:
    path = root / file
    if path.parent != root:
        raise DataError(f"the index of {root} names a shard elsewhere ({file!r}); shards lie beside the index")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror}; prepare the corpus again") from error
    if size != tokens * dtype.itemsize:
        raise DataError(f"{path} has {size} bytes, the index says {tokens * dtype.itemsize}: truncated or replaced")
    return np.memmap(path, dtype=dtype, mode="r", shape=(tokens,)) if tokens else np.empty(0, dtype)


def make_batch(windows: Sequence[Window]) -> Batch:
    """Pack windows into one `Batch`; every window and every document within it is a sequence of its own."""
    bounds = [np.zeros(1, np.int64)]
    base = 0
    for window in windows:
        inside = window.starts[window.starts > 0] + base
        base += len(window.tokens)
        bounds += [inside, np.array([base], np.int64)]
    targets = torch.from_numpy(np.concatenate([window.targets for window in windows]))
    return Batch(
        tokens=torch.from_numpy(np.concatenate([window.tokens for window in windows])),
        targets=targets,
        loss_weight=(targets != IGNORE).float(),
        cu_seqlens=torch.from_numpy(np.concatenate(bounds).astype(np.int32)),
    )


class Corpus:
    """A directory written by ``tercet data prepare``."""

    def __init__(self, root: Path, index: dict[str, Any]) -> None:
        self.root = root
        self.index = index
        self.fingerprint: str = index["fingerprint"]
        """SHA-256 over tokenizer, tokens and documents of both splits; independent of paths and machine."""
        dtype = np.dtype(index["dtype"])
        self.splits = {
            name: Split(name, root, entry, dtype, index["vocab_size"]) for name, entry in index["splits"].items()
        }
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Corpus:
        """Open a prepared corpus; shards are mapped, not read.

        Raises:
            DataError: not a corpus, another format version, or missing and truncated files.
        """
        root = Path(directory)
        path = root / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(
                f"no prepared corpus at {root} ({error.strerror}); "
                f"write one with: tercet data prepare PATH --out {root}"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); prepare the corpus again") from error
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise DataError(f"{path} is not a corpus index of format {FORMAT}; prepare the corpus again")
        try:
            return cls(root, index)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} lacks or misstates {error}; prepare the corpus again") from error

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the shards were written with.

        Raises:
            DataError: it is missing or another one now.
        """
        if self._tokenizer is None:
            tokenizer = Tokenizer.load(self.root / "tokenizer")
            if tokenizer.fingerprint != self.index["tokenizer"]:
                raise DataError(f"{self.root}/tokenizer is not the one that wrote the shards; prepare the corpus again")
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.index["vocab_size"]

    def split(self, name: str) -> Split:
        """Return the split called *name*.

        Raises:
            DataError: no such split.
        """
        if name not in self.splits:
            raise DataError(f"no split {name!r} in {self.root}{nearest(name, self.splits)}")
        return self.splits[name]

    def documents(self, split: str) -> Iterator[tuple[str, bytes]]:
        """Yield the source name and the exact bytes of every document of *split*, in order."""
        line, names = self.split(split), self.index["sources"]
        for start, stop, source in zip(line.starts[:-1], line.starts[1:], line.documents["source"]):
            yield names[int(source)], self.tokenizer.decode_bytes(line.read(int(start) + 1, int(stop) - 1).tolist())

    def validation_bytes(self) -> bytes:
        """Return the bytes of all validation documents, joined: what a compressor is to be compared on."""
        return b"".join(data for _, data in self.documents("validation"))

    def evaluation(
        self, split: str, sequence_length: int, batch_sequences: int = 8, limit: int | None = None
    ) -> Iterator[Scored]:
        """Yield *split* in order, every target exactly once; the last window may be short.

        Args:
            split: ``"validation"`` or ``"train"``.
            sequence_length: tokens a window sees; a longer document continues in the next window without state.
            batch_sequences: windows in a batch.
            limit: take only so many windows, evenly spread over the split.

        Raises:
            DataError: the split is empty or a size is not positive.
        """
        line = self.split(split)
        if min(sequence_length, batch_sequences, 1 if limit is None else limit) < 1:
            raise DataError("sequence_length, batch_sequences and limit must be at least 1")
        if not line.tokens:
            raise DataError(f"the {split} split of {self.root} is empty; prepare it with a larger --validation")
        windows = -(-line.tokens // sequence_length)
        count = windows if limit is None else min(limit, windows)
        chosen = [index * windows // count for index in range(count)]
        sizes = np.array([len(token) for token in self.tokenizer.token_bytes], dtype=np.int64)
        for first in range(0, count, batch_sequences):
            starts = [index * sequence_length for index in chosen[first : first + batch_sequences]]
            cuts = [line.window(start, min(sequence_length, line.tokens - start)) for start in starts]
            targets = np.concatenate([cut.targets for cut in cuts])
            yield Scored(make_batch(cuts), int(sizes[targets[targets != IGNORE]].sum()))
