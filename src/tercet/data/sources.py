"""Where documents come from: text files, source trees, jsonl, parquet.

`Sources` turns paths into a fixed order of files and yields one document after another; it can be read several times
(once to look, once to learn a vocabulary, once to write tokens) and always gives the same documents in the same order.
Files that are not text are passed over and counted; nothing is skipped in silence.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tercet.data.tokenizer import well_formed
from tercet.errors import DataError, missing

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
"""Folders of a source tree that hold no source of its own; hidden folders are skipped as well."""

_GENERATED = frozenset({"test", "tests", "idle_test", "encodings", "pydoc_data"})


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    data: bytes
    """Its text in UTF-8, exactly as it stood."""
    source: int
    """Index of its file in `Sources.files`."""
    row: int
    """Line of a jsonl file or row of a parquet file, from 0; running part of a text file that was cut."""


class Sources:
    """An ordered, re-readable set of documents."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        text_field: str = "text",
        suffixes: Sequence[str] = (),
        max_document_bytes: int = 1 << 20,
        exclude: str | Path | None = None,
    ) -> None:
        """Find the files below *paths*.

        Args:
            paths: files in this order; a folder stands for its files, sorted by relative path.
            text_field: the field of jsonl and parquet rows that holds the text.
            suffixes: if given, only files of a folder with one of these endings are taken.
            max_document_bytes: longer text files are cut at line ends into documents of about this size.
            exclude: a folder to leave out of the folders given: the corpus that is being replaced.

        Raises:
            DataError: no path given, a path does not exist, or nothing was found.
        """
        if not paths:
            raise DataError("no input given; name text files, folders, .jsonl or .parquet files")
        if max_document_bytes < 1024:
            raise DataError(f"max_document_bytes is {max_document_bytes}; it must be at least 1024")
        self.text_field = text_field
        self.max_document_bytes = max_document_bytes
        self.skipped: Counter[str] = Counter()
        """Files and rows that gave no document in the last pass, by reason."""
        self.repeated = 0
        """Files that were named more than once, counted once."""
        wanted = tuple(suffix if suffix.startswith(".") else f".{suffix}" for suffix in suffixes)
        hidden = os.path.join(os.path.realpath(exclude), "") if exclude is not None else ""
        found: dict[str, Path] = {}
        for path in map(Path, paths):
            for file in _expand(path, wanted):
                key = os.path.realpath(file)
                if hidden and key.startswith(hidden):
                    continue
                self.repeated += key in found
                found.setdefault(key, file)
        if not found:
            raise DataError(f"no files in {', '.join(map(str, paths))}" + (f" end in {wanted}" if wanted else ""))
        self.files = list(found.values())
        folders = {os.path.abspath(path if os.path.isdir(path) else Path(path).parent) for path in paths}
        base = os.path.commonpath(folders)
        self.names = [Path(os.path.relpath(file, base)).as_posix() for file in self.files]
        """What the index calls the files: relative to the folder that holds everything that was given."""

    def total_bytes(self) -> int:
        """Bytes of all files, for progress."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents; `skipped` counts from zero again.

        Raises:
            DataError: a jsonl line that is not an object with a string in the text field, a parquet file without it.
            MissingDependencyError: parquet input without pyarrow.
        """
        self.skipped.clear()
        for index, file in enumerate(self.files):
            if file.suffix in JSONL_SUFFIXES:
                rows = self._jsonl(file)
            elif file.suffix in PARQUET_SUFFIXES:
                rows = self._parquet(file)
            else:
                rows = self._text(file)
            for row, data in rows:
                if data:
                    yield Document(data, index, row)
                else:
                    self.skipped["empty"] += 1

    def _text(self, file: Path) -> Iterator[tuple[int, bytes]]:
        try:
            with open(file, "rb") as handle:
                fault = _fault(handle)
                if fault:
                    self.skipped[fault] += 1
                    return
                handle.seek(0)
                yield from enumerate(_cut_at_lines(handle, self.max_document_bytes))
        except OSError:
            self.skipped["unreadable"] += 1

    def _jsonl(self, file: Path) -> Iterator[tuple[int, bytes]]:
        try:
            with open(file, "rb") as handle:
                for row, line in enumerate(handle):
                    if line.strip():
                        yield row, self._jsonl_text(f"{file}:{row + 1}", line)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error

    def _jsonl_text(self, where: str, line: bytes) -> bytes:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not a line of JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get(self.text_field), str):
            seen = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{where}: no string in the field {self.text_field!r} (found {seen}); name the field with --text-field"
            )
        return well_formed(record[self.text_field]).encode()

    def _parquet(self, file: Path) -> Iterator[tuple[int, bytes]]:
        parquet = _pyarrow_parquet()
        try:
            with parquet.ParquetFile(file) as table:
                if self.text_field not in table.schema_arrow.names:
                    raise DataError(
                        f"{file}: no column {self.text_field!r} (found {table.schema_arrow.names}); "
                        "name the column with --text-field"
                    )
                row = 0
                for batch in table.iter_batches(batch_size=256, columns=[self.text_field]):
                    for value in batch.column(0).to_pylist():
                        if value is not None and not isinstance(value, str):
                            raise DataError(
                                f"{file}: column {self.text_field!r} holds {type(value).__name__}, not text"
                            )
                        yield row, (value or "").encode()
                        row += 1
        except (OSError, _pyarrow_error()) as error:
            raise DataError(f"{file}: not a readable parquet file ({error})") from error


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing("pyarrow", "data", "reading parquet") from error
    return pyarrow.parquet


def _pyarrow_error() -> type[Exception]:
    import pyarrow

    return pyarrow.ArrowException


def _fault(handle: IO[bytes]) -> str | None:
    """Return why a file is no text, reading it block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := handle.read(1 << 20):
            if b"\0" in block:
                return "binary"
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _cut_at_lines(handle: IO[bytes], limit: int) -> Iterator[bytes]:
    """Cut UTF-8 after the last line end within *limit* or, in a longer line, before the character that crosses it."""
    rest = handle.read(limit + 1)
    while len(rest) > limit:
        stop = rest.rfind(b"\n", 0, limit) + 1
        if not stop:
            stop = limit
            while rest[stop] & 0xC0 == 0x80:  # a continuation byte belongs to the character before it
                stop -= 1
        yield rest[:stop]
        rest = rest[stop:]
        rest += handle.read(limit + 1 - len(rest))
    yield rest


def _expand(path: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that *path* stands for."""
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise DataError(f"no such file or folder: {path}")
    for relative in sorted(_walk(path), key=lambda p: p.parts):
        if not suffixes or relative.name.endswith(suffixes):
            yield path / relative


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        here = Path(folder)
        for file in files:
            if not file.startswith(".") and (here / file).is_file():
                yield (here / file).relative_to(root)


def python_library_corpus() -> list[Path]:
    """Return the Python standard library's own source on this machine: about 10 MB of real text, nothing to download.

    Left out are test suites, tables that a program wrote (`encodings`, `pydoc_data`, the platform's build settings) and
    installed packages. The order depends on the relative paths alone.

    Raises:
        DataError: this Python was installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        relative
        for relative in _walk(root)
        if relative.suffix == ".py"
        and not _GENERATED & set(relative.parts)
        and not relative.parts[0].startswith(("config-", "_sysconfigdata"))
    ]
    if len(found) < 100:
        raise DataError(
            f"only {len(found)} source files of the Python library under {root}; this Python came without its source. "
            "Give your own text to `tercet data prepare`"
        )
    return [root / relative for relative in sorted(found, key=lambda p: p.parts)]
