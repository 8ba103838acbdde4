"""Every error tercet raises on purpose.

One base, so a caller can catch all of them; each subclass also inherits the closest standard type, so code that
knows nothing of tercet still behaves. A message says what was wrong, the value seen, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TercetError(Exception):
    """Base of all errors that tercet raises on purpose."""


class ConfigError(TercetError, ValueError):
    """A setting is unknown, missing, of the wrong type or contradicts another."""


class ShapeError(TercetError, ValueError):
    """A tensor argument has a shape, dtype or layout that the operation does not accept."""


class UnsupportedError(TercetError, NotImplementedError):
    """An explicitly requested implementation declines these inputs; the message is its reason."""


class DataError(TercetError, ValueError):
    """Input text, shards or batches are unusable."""


class CheckpointError(TercetError, ValueError):
    """A checkpoint is missing, truncated, corrupted or belongs to another configuration."""


class NumericsError(TercetError, ArithmeticError):
    """Training produced values that no further step can repair."""


class StorageError(TercetError, OSError):
    """The disk refused a write (full, read-only, vanished)."""

    def __str__(self) -> str:
        """Return the message alone; the error number stays in ``errno``."""
        return self.strerror or super().__str__()


class PeerError(TercetError, RuntimeError):
    """Another process of the same run died or stopped answering."""


class MissingDependencyError(TercetError, ImportError):
    """An optional package is needed for what was asked."""


class TercetWarning(UserWarning):
    """Something works, but not as well as it could; tests turn these into errors."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint `` (did you mean 'x'?)`` for a misspelt *word*, or the list of what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f" — did you mean {close[0]!r}?"
    return f" — known: {', '.join(options)}" if options else ""


def missing(package: str, extra: str, purpose: str) -> MissingDependencyError:
    """Build the error for an absent optional *package*, naming the extra that brings it."""
    return MissingDependencyError(
        f"{purpose} needs the package {package!r}; install it with: pip install 'tercet[{extra}]'"
    )
