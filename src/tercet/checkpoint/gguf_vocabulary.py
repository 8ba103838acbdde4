"""A rank file as llama.cpp wants it: spelled tokens, kinds, and the merges that ranks imply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.data import Tokenizer
from tercet.errors import CheckpointError

NORMAL, CONTROL, UNUSED = 1, 3, 5


@dataclass(frozen=True)
class Vocabulary:
    """Three lists of a GGUF file."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]


def byte_letters() -> list[str]:
    """Return GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + extra))
            extra += 1
    return letters


_LETTERS = byte_letters()


def spell(token: bytes) -> str:
    """Write a token in stand-in letters."""
    return "".join(_LETTERS[byte] for byte in token)


def split(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the last pair that merges into *token*; None for a single byte or a token no merge reaches."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [(ranks.get(a + b, len(ranks)), n) for n, (a, b) in enumerate(pairwise(parts))]
        rank, n = min(found)
        if rank >= ranks[token]:
            return None
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def vocabulary(directory: CheckpointDirectory) -> Vocabulary | None:
    """Return the vocabulary that lies beside the weights; None if there is none.

    Raises:
        CheckpointError: it has ids that the model does not have.
    """
    for folder in (directory.path, directory.path / "tokenizer", directory.path.parent.parent / "tokenizer"):
        if (folder / "tiktoken.model").is_file():
            return from_tokenizer(Tokenizer.load(folder), directory.model.vocab_size, folder)
    return None


def from_tokenizer(tokenizer: Tokenizer, vocab_size: int, where: Path) -> Vocabulary:
    """Spell out *tokenizer*, filling up to *vocab_size* with unused entries.

    Raises:
        CheckpointError: more ids than *vocab_size*.
    """
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(f"{where} has {tokenizer.vocab_size:,} ids, but the model embeds {vocab_size:,}")
    tokens = [f"[unused{n}]" for n in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, rank in tokenizer.ranks.items():
        tokens[rank], kinds[rank] = spell(token), NORMAL
    for spelling, identity in tokenizer.control.items():
        tokens[identity], kinds[identity] = spelling, CONTROL
    by_rank = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    pairs = (split(token, tokenizer.ranks) for token in by_rank)
    return Vocabulary(tokens, kinds, [f"{spell(pair[0])} {spell(pair[1])}" for pair in pairs if pair])
