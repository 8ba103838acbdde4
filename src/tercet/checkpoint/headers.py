"""safetensors headers, read as if an enemy had written them.

A file is eight bytes of little-endian header length, a JSON header, and the data. Everything a header says is checked
against the size of the file before a byte of data is touched: known dtypes, shapes that multiply out to the given
range, ranges that tile the data exactly — no gap, no overlap, nothing beyond the end, nothing after it.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.checkpoint.layouts import DTYPE_BYTES
from tercet.errors import CheckpointError

MAX_HEADER_BYTES = 16 * 1024**2
"""Largest header accepted; a K3 shard of 5404 tensors needs 0.8 MB. JSON grows some forty times when parsed, so the
limit also bounds the memory that a hostile header can take."""

MAX_INDEX_BYTES = 128 * 1024**2
"""Largest index or configuration accepted; K3's index has 60 MB."""

METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A shard's table of contents."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    file_bytes: int


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys, no NaN, no runaway nesting or numbers.

    Raises:
        CheckpointError: with *what* named and the reason.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{what} names {twice!r} twice")
        return table

    def constant(name: str) -> Any:
        raise CheckpointError(f"{what} contains {name}, which is not JSON")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply to be what it claims") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error


def _file_size(path: Path) -> int:
    """Return the size of a plain file: opening a pipe would wait for ever, a device has no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"cannot read {path}: it is not a plain file")
    return status.st_size


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint, bounded in size.

    Raises:
        CheckpointError: missing, too large or not JSON.
    """
    try:
        size = _file_size(path)
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes; more than {MAX_INDEX_BYTES:,} is not believed")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def read_header(path: str | Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is malformed or lies.
    """
    path = Path(path)
    try:
        size = _file_size(path)
        with open(path, "rb") as handle:
            prefix = handle.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} has {len(prefix)} bytes; a safetensors file has at least 8")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} claims a header of {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
            if length > size - 8:
                raise CheckpointError(f"{path} claims a header of {length:,} bytes but has {size - 8:,}: truncated?")
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return _check(path, text, size)


def _check(path: Path, text: bytes, size: int) -> Header:
    table = parse_json(text, f"the header of {path}")
    if not isinstance(table, dict) or text[:1] != b"{":
        raise CheckpointError(f"the header of {path} is not an object")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{METADATA} in {path} must map names to strings")
    data_start = 8 + len(text)
    entries = {name: _entry(path, name, value, data_start, size) for name, value in table.items()}
    expected, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != expected:
            problem = "overlaps" if entry.start < expected else "leaves a gap after"
            raise CheckpointError(f"{path}: {name!r} at byte {entry.start:,} {problem} {previous} (ends {expected:,})")
        expected, previous = entry.start + entry.nbytes, repr(name)
    if expected != size:
        raise CheckpointError(f"{path} has {size:,} bytes but its tensors end at {expected:,}")
    return Header(path, entries, metadata, size)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> Entry:
    """Check one tensor's claims on their own and against the file's size."""
    where = f"{path}: {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has the unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(_count, shape)):
        raise CheckpointError(f"{where} has the shape {_short(shape)}; a shape is up to 16 numbers from 0 to 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        raise CheckpointError(
            f"{where} has the data_offsets {_short(offsets)}; they are two numbers from 0 to 2^63 - 1"
        )
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where} ends at {end:,} before it begins at {begin:,}")
    if data_start + end > size:
        raise CheckpointError(f"{where} ends at byte {data_start + end:,} of {size:,}: truncated file or lying header")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != end - begin:
        raise CheckpointError(f"{where} is {dtype} {shape} = {nbytes:,} bytes, but its offsets span {end - begin:,}")
    return Entry(dtype, tuple(shape), data_start + begin, nbytes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
