"""Time the data room on the Python library's own source: vocabulary, encoding, one batch.

    python bench/data.py

Prints one line a figure; the compressors see the same held-out bytes that ``tercet eval`` scores.
"""

from __future__ import annotations

import gzip
import lzma
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tercet.data import Loader, Sources, Tokenizer, prepare, python_library_corpus


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the median time of *call*."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Run every measurement once."""
    texts = [document.data.decode() for document in Sources(python_library_corpus())]
    size = sum(len(text.encode()) for text in texts)
    print(f"corpus: {len(texts)} documents, {size / 1e6:.2f} MB")
    print(f"train a vocabulary of 4096: {seconds(lambda: Tokenizer.train(texts, 4096)):.2f} s")
    tokenizer = Tokenizer.train(texts, 4096)
    spent = seconds(lambda: [tokenizer.encode_array(text) for text in texts])
    print(f"encode, one thread: {size / spent / 1e6:.2f} MB/s")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "corpus"
        print(f"prepare in all: {seconds(lambda: prepare(python_library_corpus(), out, validation=0.05)):.2f} s")
        corpus = prepare(python_library_corpus(), out, validation=0.05, overwrite=True)
        loader = Loader(corpus, sequence_length=512, batch_sequences=8)
        print(f"a batch of 8 x 512 tokens: {1e3 * seconds(loader.micro_batches, 500):.2f} ms (median of 500)")
        text = corpus.validation_bytes()
        gzip_bits, xz_bits = 8 * len(gzip.compress(text, 9)), 8 * len(lzma.compress(text, preset=9))
        print(f"held out: {len(text):,} bytes in {len(corpus.split('validation').documents)} documents")
        print(f"gzip -9: {gzip_bits / len(text):.3f} bits/byte, xz -9: {xz_bits / len(text):.3f} bits/byte")


if __name__ == "__main__":
    main()
