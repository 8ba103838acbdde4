"""Bits per byte: the measure that does not depend on the tokenizer, beside what gzip and xz need for the same bytes.

A model's bits for a text are the sum over all its tokens of −log₂ p(token); divided by the bytes of the text they are
comparable between vocabularies and with any lossless compressor. Every token of a document is predicted exactly once,
the first one from [BOS]; the end of a document is predicted too and counts bits but no bytes.
"""

from __future__ import annotations

import gzip
import itertools
import lzma
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tercet.data.batch import Batch
from tercet.data.corpus import Corpus, Scored, Window, make_batch
from tercet.data.tokenizer import Tokenizer
from tercet.errors import DataError
from tercet.model import CausalLM, Context
from tercet.ops import IGNORE, linear_cross_entropy
from tercet.parallel import Ranks


@dataclass(frozen=True)
class Compression:
    """How many bits a model needs for some text."""

    nats: float
    """Summed negative log-likelihood of all targets."""
    tokens: int
    """Targets scored."""
    bytes: int
    """Bytes of text they stand for."""

    @property
    def nats_per_token(self) -> float:
        """Mean loss; comparable only under the same tokenizer."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text."""
        return self.nats / math.log(2.0) / self.bytes


def bits_per_byte(
    model: CausalLM,
    corpus: Corpus,
    *,
    sequence_length: int,
    split: str = "validation",
    batch_sequences: int = 8,
    limit: int | None = None,
    ranks: Ranks | None = None,
) -> Compression:
    """Score *model* on a split of a prepared corpus, every token once.

    Args:
        model: its parameters tell the device.
        corpus: prepared with the tokenizer the model was trained on.
        sequence_length: tokens a window sees.
        split: ``"validation"`` or ``"train"``.
        batch_sequences: windows in a forward pass; changes nothing but memory and rounding.
        limit: score only so many windows, evenly spread over the split; None scores all.
        ranks: processes with the same model that share the forward passes; all get the same result.

    Raises:
        DataError: the split is empty, or the corpus has ids that the model has not.
        PeerError: another rank died.
    """
    if corpus.vocab_size > model.config.vocab_size:
        raise DataError(
            f"the corpus has {corpus.vocab_size} ids, the model {model.config.vocab_size}; "
            "score it on a corpus prepared with its own tokenizer (tercet data prepare --tokenizer)"
        )
    ranks = ranks or Ranks()
    batches = corpus.evaluation(split, sequence_length, batch_sequences, limit)
    own = _sum(model, itertools.islice(batches, ranks.rank, None, ranks.world))
    nats, tokens, size = ranks.sum(torch.tensor([own.nats, own.tokens, own.bytes], dtype=torch.float64)).tolist()
    return _not_empty(Compression(nats, int(tokens), int(size)))


def bits_per_byte_of_texts(
    model: CausalLM,
    tokenizer: Tokenizer,
    texts: Iterable[bytes],
    *,
    sequence_length: int,
    batch_sequences: int = 8,
) -> Compression:
    """Score *model* on texts that are in no corpus, each as one document.

    A text longer than *sequence_length* tokens is continued in the next window, without state.

    Args:
        model: its parameters tell the device.
        tokenizer: the one it was trained with.
        texts: bytes of every document.
        sequence_length: tokens a window sees.
        batch_sequences: windows in a forward pass.

    Raises:
        DataError: no text at all, or a text is not UTF-8.
    """
    return score(model, _windows(tokenizer, texts, sequence_length, batch_sequences))


def score(model: CausalLM, batches: Iterable[Scored]) -> Compression:
    """Sum the loss of *model* over *batches* in fp64.

    Raises:
        DataError: they hold no text.
    """
    return _not_empty(_sum(model, batches))


@torch.no_grad()
def _sum(model: CausalLM, batches: Iterable[Scored]) -> Compression:
    nats, tokens, size = 0.0, 0, 0
    for scored in batches:
        losses_T = token_losses(model, scored.batch)
        nats += float(losses_T.double().sum())
        tokens += int((scored.batch.targets != IGNORE).sum())
        size += scored.bytes
    return Compression(nats, tokens, size)


def _not_empty(found: Compression) -> Compression:
    if not found.bytes:
        raise DataError("there is no text to score: the files are empty")
    return found


def token_losses(model: CausalLM, batch: Batch) -> Float[Tensor, "tokens"]:
    """Return −ln p of every target of *batch* ``[tokens]``, 0 where there is none."""
    device = model.lm_head.weight.device
    context = Context(cu_seqlens=batch.cu_seqlens)
    hidden_TH = model.features(batch.tokens[None].to(device), context).hidden[0]
    weight_T = torch.ones(len(hidden_TH), device=device)
    return linear_cross_entropy(hidden_TH, model.lm_head.weight, batch.targets.to(device), weight_T)[1]


def gzip_bits_per_byte(data: bytes) -> float:
    """Return the bits per byte of ``gzip -9`` on *data*, file header included.

    Raises:
        DataError: no data.
    """
    return _compressed(data, gzip.compress(data, compresslevel=9, mtime=0))


def xz_bits_per_byte(data: bytes) -> float:
    """Return the bits per byte of ``xz -9`` on *data*, container included.

    Raises:
        DataError: no data.
    """
    return _compressed(data, lzma.compress(data, preset=9))


def _compressed(data: bytes, packed: bytes) -> float:
    if not data:
        raise DataError("there is nothing to compress: the files are empty")
    return 8.0 * len(packed) / len(data)


def _windows(
    tokenizer: Tokenizer, texts: Iterable[bytes], sequence_length: int, batch_sequences: int
) -> Iterator[Scored]:
    """Cut every text into windows of its own and batch them in order."""
    windows: list[Window] = []
    size = 0
    for number, text in enumerate(texts):
        try:
            ids = [tokenizer.bos_id, *tokenizer.encode(text.decode("utf-8")), tokenizer.eos_id]
        except UnicodeDecodeError as error:
            raise DataError(f"text {number + 1} is not UTF-8 ({error}); convert it first") from error
        size += len(text)
        windows += _cut(np.array(ids, dtype=np.int64), sequence_length)
        while len(windows) >= batch_sequences:
            yield _scored(windows[:batch_sequences], size)
            windows, size = windows[batch_sequences:], 0
    if windows:
        yield _scored(windows, size)


def _cut(ids: np.ndarray, length: int) -> list[Window]:
    """Cut one document; its last token is only ever a target."""
    none = np.empty(0, dtype=np.int64)
    starts = range(0, len(ids) - 1, length)
    return [Window(ids[at : min(at + length, len(ids) - 1)], ids[at + 1 : at + 1 + length], none) for at in starts]


def _scored(windows: Sequence[Window], size: int) -> Scored:
    """Bytes are attributed to the batch in which a text's first window falls; only their sum has a meaning."""
    return Scored(make_batch(windows), size)
