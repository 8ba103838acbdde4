"""Bits per byte, by hand, and against what the compressors' own commands write."""

import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from tercet.data import Corpus, Tokenizer, prepare
from tercet.errors import DataError
from tercet.eval.compression import (
    bits_per_byte,
    bits_per_byte_of_texts,
    gzip_bits_per_byte,
    score,
    xz_bits_per_byte,
)
from tercet.model import CausalLM, build
from tercet.presets import tiny_model


def _text(number: int, lines: int) -> str:
    random = np.random.default_rng(number)
    words = ["def", "return", "self", "value", "für", "índex", "0x3f", "None"]
    return "".join(" ".join(random.choice(words, 7)) + "\n" for _ in range(lines))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    root = tmp_path_factory.mktemp("text")
    for n in range(12):
        (root / f"{n:02d}.txt").write_text(_text(n, 4 + 2 * n), encoding="utf-8")
    return prepare([root], root / "corpus", vocab_size=560, validation=0.3)


def _model(corpus: Corpus) -> CausalLM:
    tiny = tiny_model()
    config = replace(
        tiny,
        vocab_size=corpus.vocab_size,
        hidden_size=32,
        num_layers=2,
        full_attention_layers=(1,),
        intermediate_size=32,
        kda=replace(tiny.kda, num_heads=2, head_dim=16),
        mla=replace(tiny.mla, num_heads=2, kv_lora_rank=16, q_lora_rank=16),
        moe=replace(tiny.moe, num_experts=4, latent_size=16, intermediate_size=16),
    )
    return build(config, seed=1)


@pytest.fixture(scope="module")
def model(corpus) -> CausalLM:
    return _model(corpus)


@pytest.fixture(scope="module")
def uniform(corpus) -> CausalLM:
    model = _model(corpus)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


@pytest.mark.parametrize("length", [7, 64, 4096])
def test_a_uniform_model_needs_log2_of_the_vocabulary_a_token(corpus, uniform, length):
    line = corpus.split("validation")
    result = bits_per_byte(uniform, corpus, sequence_length=length)
    # Every token but the first of each document is predicted: its text and its [EOS].
    assert result.tokens == line.tokens - len(line.documents)
    assert result.bytes == line.bytes == len(corpus.validation_bytes())
    assert result.bits_per_byte == pytest.approx(math.log2(corpus.vocab_size) * result.tokens / line.bytes, rel=1e-6)
    assert result.nats_per_token == pytest.approx(math.log(corpus.vocab_size), rel=1e-6)


def test_matches_a_plain_softmax_document_by_document(corpus, model):
    line, total = corpus.split("validation"), 0.0
    for start, stop in zip(line.starts[:-1], line.starts[1:]):
        ids = torch.from_numpy(line.read(int(start), int(stop)))
        with torch.no_grad():
            log_p = model(ids[None, :-1])[0].double().log_softmax(-1)
        total -= float(log_p.gather(1, ids[1:, None]).sum())
    result = bits_per_byte(model, corpus, sequence_length=line.tokens)
    assert result.nats == pytest.approx(total, rel=1e-6)
    texts = [data for _, data in corpus.documents("validation")]
    apart = bits_per_byte_of_texts(model, corpus.tokenizer, texts, sequence_length=line.tokens)
    assert (apart.tokens, apart.bytes) == (result.tokens, result.bytes)
    assert apart.nats == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("batch", [3, 100])
def test_batching_changes_nothing_but_rounding(corpus, model, batch):
    once = bits_per_byte(model, corpus, sequence_length=48)
    again = bits_per_byte(model, corpus, sequence_length=48, batch_sequences=batch)
    assert (again.tokens, again.bytes) == (once.tokens, once.bytes)
    assert again.nats == pytest.approx(once.nats, rel=1e-6)
    texts = [data for _, data in corpus.documents("validation")]
    one = bits_per_byte_of_texts(model, corpus.tokenizer, texts, sequence_length=48)
    two = bits_per_byte_of_texts(model, corpus.tokenizer, texts, sequence_length=48, batch_sequences=batch)
    assert (two.tokens, two.bytes) == (one.tokens, one.bytes)
    assert two.nats == pytest.approx(one.nats, rel=1e-6)


def test_limited_scores_count_their_own_bytes(corpus, uniform):
    whole = bits_per_byte(uniform, corpus, sequence_length=8)
    part = bits_per_byte(uniform, corpus, sequence_length=8, limit=5)
    assert part.tokens <= 40 < whole.tokens and 0 < part.bytes < whole.bytes


@pytest.mark.parametrize("length", range(1, 9))
def test_every_token_of_a_text_is_predicted_once(corpus, uniform, length):
    text = "def value"
    ids = corpus.tokenizer.encode(text)
    result = bits_per_byte_of_texts(uniform, corpus.tokenizer, [text.encode()], sequence_length=length)
    assert result.tokens == len(ids) + 1
    assert result.bytes == len(text)


def test_longer_context_helps_only_a_model_that_reads(corpus, model, uniform):
    long, short = (bits_per_byte(uniform, corpus, sequence_length=n).nats for n in (256, 8))
    assert long == pytest.approx(short, rel=1e-9)
    assert (
        bits_per_byte(model, corpus, sequence_length=512).nats != bits_per_byte(model, corpus, sequence_length=8).nats
    )


@pytest.mark.parametrize(("command", "ours"), [("gzip", gzip_bits_per_byte), ("xz", xz_bits_per_byte)])
def test_compressors_are_the_command_line_ones(command, ours):
    if shutil.which(command) is None:
        pytest.skip(f"no {command} on this machine")
    data = "".join(_text(n, 200) for n in range(5)).encode()
    packed = subprocess.run([command, "-9", "-c"], input=data, capture_output=True, check=True).stdout
    # Two implementations of deflate may split blocks differently.
    assert ours(data) == pytest.approx(8 * len(packed) / len(data), rel=0.01)


@pytest.mark.parametrize("ours", [gzip_bits_per_byte, xz_bits_per_byte])
def test_noise_does_not_compress(ours):
    noise = np.random.default_rng(0).bytes(20_000)
    assert 8.0 < ours(noise) < 8.1
    assert ours(noise) == ours(noise)


@pytest.mark.parametrize("compressor", [gzip_bits_per_byte, xz_bits_per_byte])
def test_nothing_to_compress(compressor):
    with pytest.raises(DataError, match="nothing to compress"):
        compressor(b"")


def test_bad_texts(corpus, uniform):
    with pytest.raises(DataError, match="no text to score"):
        bits_per_byte_of_texts(uniform, corpus.tokenizer, [], sequence_length=8)
    with pytest.raises(DataError, match="no text to score"):
        bits_per_byte_of_texts(uniform, corpus.tokenizer, [b""], sequence_length=8)
    with pytest.raises(DataError, match="text 2 is not UTF-8"):
        bits_per_byte_of_texts(uniform, corpus.tokenizer, [b"good", b"\xff\xfe"], sequence_length=8)
    with pytest.raises(DataError, match="no text to score"):
        score(uniform, [])


def test_a_corpus_of_another_vocabulary_is_refused(corpus, tmp_path):
    tokenizer = Tokenizer.train([_text(1, 50)], 560)
    assert tokenizer.vocab_size <= corpus.vocab_size
    config = replace(_model(corpus).config, vocab_size=corpus.vocab_size - 1)
    with pytest.raises(DataError, match="tokenizer"):
        bits_per_byte(build(config), corpus, sequence_length=8)
