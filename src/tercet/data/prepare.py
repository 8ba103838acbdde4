"""Turn text into a corpus: learn or take a tokenizer, split by document, write token shards, publish at once.

Three passes over the sources, each streaming: look (hash and count every document), learn a vocabulary from a sample of
the training documents, write tokens. A document goes to validation when the hash of its text falls below the wanted
share, so the split depends on nothing but the text: adding files moves none of the old ones, and two copies of a text
never lie on both sides.

Everything is written into a hidden folder beside the target and renamed when complete. Ctrl-C, an error or a full disk
leave nothing behind; a run that was killed outright is swept up by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tercet.data.corpus import DOCUMENT, FORMAT, INDEX, Corpus
from tercet.data.sources import Document, Sources
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError, StorageError
from tercet.util.files import storage_error, write_json

SPLITS = ("train", "validation")
_HASH_RANGE = 1 << 64
_ENCODE_BYTES = 4 << 20
_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Scan:
    """What the first pass saw."""

    documents: int
    bytes: int
    lowest: int
    highest: int
    """Smallest and largest hash of all documents."""


@dataclass
class _Writer:
    """Shards and document records of one split as they grow."""

    folder: Path
    name: str
    dtype: np.dtype
    shard_tokens: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    records: array[int] = field(default_factory=lambda: array("q"))
    """Four numbers a document, the fields of `DOCUMENT`; flat, for corpora of many millions."""
    digest: Any = field(default_factory=hashlib.sha256)
    _handle: IO[bytes] | None = None

    def add(self, tokens: np.ndarray, document: Document) -> None:
        """Append one document; it may cross into the next shard."""
        data = tokens.astype(self.dtype)
        self.digest.update(data.tobytes())
        self.records.extend((len(data), len(document.data), document.source, document.row))
        while len(data):
            if self._handle is None or self.shards[-1]["tokens"] == self.shard_tokens:
                self._next_shard()
            assert self._handle is not None
            part = data[: self.shard_tokens - self.shards[-1]["tokens"]]
            self._handle.write(part.tobytes())
            self.shards[-1]["tokens"] += len(part)
            data = data[len(part) :]

    def _next_shard(self) -> None:
        self.close()
        file = f"{self.name}-{len(self.shards):05d}.bin"
        self._handle = open(self.folder / file, "wb")  # noqa: SIM115 (lives until the next shard)
        self.shards.append({"file": file, "tokens": 0})

    def close(self) -> None:
        """Flush the open shard to the disk."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with handle:
                handle.flush()
                os.fsync(handle.fileno())

    def finish(self) -> dict[str, Any]:
        """Write the document records and return the index entry."""
        self.close()
        columns = np.array(self.records, dtype="<i8").reshape(-1, 4)
        records = np.empty(len(columns), dtype=DOCUMENT)
        for column, name in enumerate(DOCUMENT.names or ()):
            records[name] = columns[:, column]
        np.save(self.folder / f"{self.name}-documents.npy", records)
        self.digest.update(columns[:, :2].tobytes())
        return {
            "documents": len(records),
            "tokens": int(records["tokens"].sum()),
            "bytes": int(records["bytes"].sum()),
            "shards": self.shards,
        }


def prepare(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    vocab_size: int = 4096,
    validation: float = 0.02,
    text_field: str = "text",
    suffixes: Sequence[str] = (),
    max_document_bytes: int = 1 << 20,
    sample_bytes: int = 32 << 20,
    shard_tokens: int = 1 << 27,
    overwrite: bool = False,
    progress: bool = False,
) -> Corpus:
    """Write a corpus of *paths* into the folder *out* and open it.

    Args:
        paths: text files, folders, ``.jsonl`` and ``.parquet`` files (see `Sources`).
        out: a folder that does not exist yet, is empty, or holds a corpus to be replaced (`overwrite`).
        tokenizer: an existing one, or its rank file or folder; None learns one.
        vocab_size: ids to learn, the 256 control ids included; a small text yields fewer.
        validation: share of documents held out, in [0, 1); at least one is held out unless 0.
        text_field: field of jsonl and parquet rows.
        suffixes: endings to take from folders; empty takes all text.
        max_document_bytes: longer text files are cut at line ends.
        sample_bytes: about how much text the vocabulary is learnt from.
        shard_tokens: tokens in a shard file.
        overwrite: replace an existing corpus.
        progress: draw a progress bar on stderr.

    Raises:
        DataError: unusable input or settings, or nothing left after skipping.
        StorageError: the disk refused a write; nothing is left behind.
    """
    target = Path(out)
    if not 0 <= validation < 1:
        raise DataError(f"validation is {validation}; it is a share of the documents in [0, 1)")
    if shard_tokens < 1 or sample_bytes < 1:
        raise DataError(f"shard_tokens ({shard_tokens}) and sample_bytes ({sample_bytes}) must be at least 1")
    _check_target(target, overwrite)
    sources = Sources(
        paths, text_field=text_field, suffixes=suffixes, max_document_bytes=max_document_bytes, exclude=target
    )
    given = Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    with _bar(progress, sources.total_bytes()) as advance:
        scan = _look(advance("reading", sources))
        if not scan.documents:
            raise DataError(f"no text in {len(sources.files)} files; skipped: {dict(sources.skipped) or 'nothing'}")
        limit = _threshold(validation, scan)
        with _staging(target) as folder:
            if given is None:
                texts = _sample(advance("learning", sources), limit, sample_bytes / scan.bytes)
                given = Tokenizer.train(texts, vocab_size)
            given.save(folder / "tokenizer")
            writers = _write(advance("writing", sources), given, folder, limit, shard_tokens)
            _write_index(folder, writers, given, sources, validation)
            Corpus.open(folder)
            _publish(folder, target)
    return Corpus.open(target)


def _hash(document: Document) -> tuple[int, int]:
    """Return two independent 64-bit hashes of a document's text: one decides its split, one the sample."""
    digest = hashlib.blake2b(document.data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def _look(documents: Iterable[Document]) -> _Scan:
    count, size, lowest, highest = 0, 0, _HASH_RANGE, 0
    for document in documents:
        count += 1
        size += len(document.data)
        value, _ = _hash(document)
        lowest, highest = min(lowest, value), max(highest, value)
    return _Scan(count, size, lowest, highest)


def _threshold(validation: float, scan: _Scan) -> int:
    """Return the hash below which a document is held out; the lowest one always is.

    Raises:
        DataError: nothing would be left to train on.
    """
    if not validation:
        return 0
    limit = max(int(validation * _HASH_RANGE), scan.lowest + 1)
    if scan.highest < limit:
        raise DataError(
            f"all {scan.documents} documents would be held out; add text, lower --validation ({validation}), "
            "or cut long files into more documents with --max-document-bytes"
        )
    return limit


def _sample(documents: Iterable[Document], limit: int, share: float) -> Iterator[str]:
    """Yield about *share* of the training texts; validation texts never shape the vocabulary."""
    for document in documents:
        split_hash, sample_hash = _hash(document)
        if split_hash >= limit and sample_hash < share * _HASH_RANGE:
            yield document.data.decode()


def _write(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, limit: int, shard_tokens: int
) -> dict[str, _Writer]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writers = {name: _Writer(folder, name, dtype, shard_tokens) for name in SPLITS}
    try:
        with ThreadPoolExecutor(_WORKERS) as pool:
            for group in _grouped(documents):
                encoded = pool.map(lambda document: tokenizer.encode_array(document.data.decode()), group)
                for document, ids in zip(group, encoded, strict=True):
                    tokens = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])
                    name = "validation" if _hash(document)[0] < limit else "train"
                    writers[name].add(tokens, document)
    finally:
        for writer in writers.values():
            writer.close()
    return writers


def _grouped(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Gather documents until there is enough work for all threads."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.data)
        if size >= _ENCODE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_index(
    folder: Path, writers: dict[str, _Writer], tokenizer: Tokenizer, sources: Sources, validation: float
) -> None:
    splits = {name: writer.finish() for name, writer in writers.items()}
    digests = [tokenizer.fingerprint, *(writers[name].digest.hexdigest() for name in SPLITS)]
    index = {
        "format": FORMAT,
        "fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": writers["train"].dtype.str,
        "validation": validation,
        "splits": splits,
        "skipped": dict(sources.skipped),
        "repeated": sources.repeated,
        "sources": sources.names,
    }
    write_json(folder / INDEX, index)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise DataError(f"{target} is a file; --out takes a folder")
    if not any(target.iterdir()):
        return
    if not (target / INDEX).is_file():
        raise DataError(f"{target} holds other files and no corpus; choose a new or empty folder")
    if not overwrite:
        raise DataError(f"{target} already holds a corpus; choose another --out, or --overwrite to replace it")


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside *target*; it is gone afterwards unless it was published.

    Raises:
        StorageError: the disk refused a write.
    """
    folder = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder, ".part")
        folder.mkdir()
        yield folder
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(target.absolute(), error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(folder: Path, ending: str) -> None:
    """Remove what runs for the same target left under *ending* when they were killed."""
    stem = folder.name.removesuffix(f"{os.getpid()}.part")
    for stale in folder.parent.iterdir():
        owner = stale.name.removeprefix(stem).removesuffix(ending)
        if stale.name == f"{stem}{owner}{ending}" and owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _publish(folder: Path, target: Path) -> None:
    """Rename the complete folder to its place; an older corpus steps aside first and is removed last."""
    old = folder.with_suffix(".old")
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(folder, target.absolute())
    except BaseException:  # Ctrl-C as well
        if old.exists() and not target.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sweep(folder, ".old")


@contextlib.contextmanager
def _bar(visible: bool, total: int) -> Iterator[Any]:
    """Draw progress over passes; gives a wrapper that names a pass and counts its documents' bytes."""
    columns = (TextColumn("{task.description:<9}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not visible) as display:
        task = display.add_task("", total=total)

        def advance(name: str, documents: Iterable[Document]) -> Iterator[Document]:
            display.reset(task, description=name, total=total)
            for document in documents:
                yield document
                display.advance(task, len(document.data))

        yield advance
