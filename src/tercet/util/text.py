"""Numbers as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """Format a count: 950, 12.3k, 4.56M, 2.78T."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def size(value: float) -> str:
    """Format a number of bytes in binary units."""
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.2f} {suffix}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds: 4.2 s, 3:05, 2:10:00."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
