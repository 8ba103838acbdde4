"""Tokenizers of the chat tests: one of bytes, one with merges, and the published one where it is at hand."""

import os
from pathlib import Path

import pytest

from tercet.data.tokenizer import Tokenizer

VERIFIER = Path(os.environ.get("TERCET_DATA", Path(__file__).parents[4] / "shared" / "data")) / "vendor_verifier"


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer({bytes([value]): value for value in range(256)})


@pytest.fixture(scope="session")
def merged_tokenizer() -> Tokenizer:
    """A vocabulary whose tokens cross the places where XTML cuts, e.g. ``="`` and ``message``."""
    lines = ['message role="assistant" key="_a" type="string" index="1" think response tools call argument\n'] * 20
    return Tokenizer.train([*lines, "北京天气怎么样？ 🙂🙂 The weather in Oslo.\n" * 20], 1024)


@pytest.fixture(scope="session")
def published_tokenizer() -> Tokenizer:
    if not (VERIFIER / "tiktoken.model").is_file():
        pytest.skip(f"the published rank file is not at {VERIFIER}")
    return Tokenizer.load(VERIFIER / "tiktoken.model")


@pytest.fixture(scope="session")
def verifier_folder() -> Path:
    return VERIFIER


@pytest.fixture(scope="session")
def vendor_cases() -> Path:
    path = VERIFIER / "prompt_token_cases.jsonl"
    if not path.is_file():
        pytest.skip(f"the verifier's cases are not at {path}")
    return path
