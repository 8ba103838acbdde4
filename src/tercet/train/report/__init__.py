"""One self-contained page about a run: how it learned, in figures that need no network and no plotting library.

`write_report` works on any run directory, finished or not; `write_picture` draws the main figures as one SVG file.
"""

from __future__ import annotations

from pathlib import Path

from tercet.train.report import page
from tercet.train.report.run import load
from tercet.util.files import atomic_open

REPORT, PICTURE = "report.html", "report.svg"


def write_report(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run and return where it is.

    Args:
        run_directory: what ``tercet train`` wrote, at any stage.
        path: where to write; default ``report.html`` in the run directory.

    Raises:
        DataError: no such directory, or ``metrics.jsonl`` is broken in the middle.
        StorageError: the disk refused the write; an older report stays.
    """
    return _write(path or Path(run_directory) / REPORT, page.html(load(run_directory)))


def write_picture(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the main figures of a run as one SVG file and return where it is.

    Args:
        run_directory: as for `write_report`.
        path: where to write; default ``report.svg`` in the run directory.

    Raises:
        DataError: as for `write_report`.
        StorageError: the disk refused the write.
    """
    return _write(path or Path(run_directory) / PICTURE, page.picture(load(run_directory)))


def _write(path: str | Path, content: str) -> Path:
    target = Path(path)
    with atomic_open(target, "w") as handle:
        handle.write(content)
    return target
