"""Files that are either complete or not there.

A reader never sees a half-written file: contents go to a temporary neighbour, are flushed to the disk, and are renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tercet.errors import StorageError


def storage_error(path: Path, error: OSError) -> StorageError:
    """Explain a failed write in a person's words."""
    free = ""
    with contextlib.suppress(OSError):
        free = f"; {shutil.disk_usage(path.parent).free / 1e6:,.0f} MB are free there"
    return StorageError(error.errno or 0, f"cannot write {path}: {error.strerror or error}{free}")


@contextlib.contextmanager
def atomic_open(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open *path* for writing so that it appears, complete, only when the block ends without an error.

    Raises:
        StorageError: the disk refused the write; nothing is left behind.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    encoding = None if "b" in mode else "utf-8"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        with contextlib.suppress(OSError):  # absent after success, or its directory never came to be
            temporary.unlink()


def write_json(path: str | Path, data: Any) -> None:
    """Write *data* as indented JSON, atomically."""
    with atomic_open(path, "w") as handle:
        json.dump(data, handle, indent=2, ensure_ascii=False)
        handle.write("\n")


def append_line(path: str | Path, data: Any) -> None:
    """Append one JSON line and flush it, so that a crash loses at most the line being written.

    Raises:
        StorageError: the disk refused the write.
    """
    target = Path(path)
    try:
        with open(target, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(data, ensure_ascii=False) + "\n")
    except OSError as error:
        raise storage_error(target, error) from error
