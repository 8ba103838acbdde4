"""Bytes to batches: tokenizer, corpus preparation, packing, loading."""

from tercet.data.batch import Batch
from tercet.data.corpus import Corpus, Scored
from tercet.data.load import Loader
from tercet.data.prepare import prepare
from tercet.data.sources import Sources, python_library_corpus
from tercet.data.tokenizer import TextStream, Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Loader",
    "Scored",
    "Sources",
    "TextStream",
    "Tokenizer",
    "prepare",
    "python_library_corpus",
]
