"""Batches: exact coverage, targets at cuts, one counter, independence of micro-batches and ranks."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.data import Batch, Corpus, Loader, Tokenizer, prepare
from tercet.data.corpus import make_batch
from tercet.errors import CheckpointError, ConfigError, DataError
from tercet.ops import IGNORE

PLAIN = Tokenizer({bytes([value]): value for value in range(256)})
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 40, 41, 7, 1, 64, 62, 63)
SIZES = {"sequence_length": 16, "batch_sequences": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of many lengths, in shards that cut documents."""
    root = tmp_path_factory.mktemp("in")
    rng = np.random.default_rng(0)
    for number, length in enumerate(LENGTHS):
        text = "".join(rng.choice(list("abcdefgh"), size=length - 1)) + chr(0x41 + number)
        (root / f"{number:02d}").write_text(text)
    out = tmp_path_factory.mktemp("out") / "corpus"
    return prepare([root], out, tokenizer=PLAIN, validation=0.3, shard_tokens=50)


def document_tokens(corpus: Corpus, split: str) -> list[list[int]]:
    """The documents as they should stand on the line, from their bytes."""
    return [[PLAIN.bos_id, *PLAIN.encode(data.decode()), PLAIN.eos_id] for _, data in corpus.documents(split)]


def expected_line(corpus: Corpus, split: str) -> tuple[list[int], list[int], list[bool]]:
    """Token, target and is-first of every position, spelled out document by document."""
    tokens: list[int] = []
    targets: list[int] = []
    firsts: list[bool] = []
    for document in document_tokens(corpus, split):
        tokens += document
        targets += [*document[1:], IGNORE]
        firsts += [True] + [False] * (len(document) - 1)
    return tokens, targets, firsts


def rows(batches: list[Batch]) -> list[tuple[list[int], list[int], list[int]]]:
    """Every packed sequence of the batches: its tokens, targets and weights."""
    out = []
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(batch.tokens)
        for a, b in itertools.pairwise(bounds):
            assert a < b
            out.append((batch.tokens[a:b].tolist(), batch.targets[a:b].tolist(), batch.loss_weight[a:b].tolist()))
    return out


def loader(corpus: Corpus, **changes: int) -> Loader:
    return Loader(corpus, "train", **(SIZES | changes))  # type: ignore[arg-type]


# one window


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_windows_equal_the_line_spelled_out(corpus: Corpus, data: st.DataObject) -> None:
    line = corpus.split("train")
    tokens, targets, firsts = expected_line(corpus, "train")
    start = data.draw(st.integers(0, line.tokens - 1))
    length = data.draw(st.integers(1, line.tokens))
    window = line.window(start, length)
    ring = [(start + offset) % line.tokens for offset in range(length)]
    assert window.tokens.tolist() == [tokens[p] for p in ring]
    assert window.targets.tolist() == [targets[p] for p in ring]
    assert window.starts.tolist() == [offset for offset, p in enumerate(ring) if firsts[p]]


def test_targets_cross_cuts_but_not_documents(corpus: Corpus) -> None:
    line = corpus.split("train")
    for cut in range(1, line.tokens - 1):
        left, right = line.window(0, cut), line.window(cut, line.tokens - cut)
        assert left.targets[-1] == (IGNORE if cut in line.starts else right.tokens[0])
    everything = line.window(0, line.tokens)
    assert (everything.targets[line.starts[1:] - 1] == IGNORE).all()
    assert (everything.targets == IGNORE).sum() == len(line.documents)


def test_batch_layout(corpus: Corpus) -> None:
    batch = loader(corpus).micro_batches()[0]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.loss_weight.dtype == torch.float32
    assert batch.cu_seqlens.dtype == torch.int32
    assert torch.equal(batch.loss_weight, (batch.targets != IGNORE).float())
    assert set(range(0, 65, 16)) <= set(batch.cu_seqlens.tolist())
    for tokens, _, _ in rows([batch]):  # every [BOS] opens a sequence
        assert PLAIN.bos_id not in tokens[1:]


# a run


def test_an_epoch_covers_every_token_at_most_once_and_nearly_all(corpus: Corpus) -> None:
    total = corpus.split("train").tokens
    for length in (7, 16, total // 2, total):
        deal = loader(corpus, sequence_length=length, seed=length)
        places = []
        for epoch in range(3):
            covered = np.zeros(total, dtype=int)
            span = range(epoch * deal.sequences_per_epoch, (epoch + 1) * deal.sequences_per_epoch)
            starts = [deal.sequence_start(index) for index in span]
            for start in starts:
                covered[(start + np.arange(length)) % total] += 1
            assert covered.max() == 1
            assert (covered == 0).sum() == total % length < length
            places.append(starts)
        if deal.sequences_per_epoch > 5:
            assert places[0] != places[1] != places[2]
            assert places[0] != sorted(places[0])
    assert loader(corpus).sequence_start(5) == loader(corpus).sequence_start(5)
    orders = {tuple(loader(corpus, seed=s).sequence_start(i) for i in range(8)) for s in range(4)}
    assert len(orders) == 4


def test_order_is_pinned() -> None:
    """The order must not change between versions of numpy or of this code: runs would not resume."""

    class Line:
        tokens = 1000

    class Fake:
        fingerprint = "x"

        def split(self, name: str) -> Line:
            return Line()

    deal = Loader(Fake(), "train", sequence_length=100, batch_sequences=1, seed=3)  # type: ignore[arg-type]
    raw = [int(word) for word in np.random.PCG64([3, 0]).random_raw(11)]
    order = sorted(range(10), key=lambda i: raw[1 + i])
    assert [deal.sequence_start(i) for i in range(10)] == [(raw[0] % 1000 + 100 * i) % 1000 for i in order]


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_micro_batches_and_ranks_only_cut_the_same_sequence(corpus: Corpus, micro: int, world: int) -> None:
    whole = loader(corpus)
    if 4 // micro < world:
        with pytest.raises(ConfigError, match=f"{4 // micro} micro-batches for {world} ranks"):
            loader(corpus, micro_batch_sequences=micro, world=world)
        return
    ranks = [loader(corpus, micro_batch_sequences=micro, world=world, rank=rank) for rank in range(world)]
    for _ in range(2 * whole.sequences_per_epoch // 4 + 2):  # across two changes of epoch
        parts = [deal.micro_batches() for deal in ranks]
        shares = sorted(len(part) for part in parts)
        assert sum(shares) == ranks[0].micro_batches_per_step == 4 // micro
        assert shares[-1] - shares[0] <= 1
        assert rows([batch for part in parts for batch in part]) == rows(whole.micro_batches())
        assert {deal.position for deal in ranks} == {whole.position}


def test_step_and_counter_agree(corpus: Corpus) -> None:
    counted, stepped = loader(corpus), loader(corpus)
    steps = [rows(counted.micro_batches()) for _ in range(12)]
    for step in (5, 0, 11, 3):
        assert rows(stepped.micro_batches(step)) == steps[step]
        assert stepped.position == (step + 1) * 4
    assert counted.epochs == pytest.approx(48 / counted.sequences_per_epoch)


@settings(max_examples=25, deadline=None)
@given(done=st.integers(0, 60), micro=st.sampled_from([1, 2, 4]), world=st.sampled_from([1, 2]))
def test_resumed_equals_uninterrupted(corpus: Corpus, done: int, micro: int, world: int) -> None:
    """At any moment, also on other ranks and micro-batches, and with another batch size from there."""
    through = loader(corpus)
    for _ in range(done):
        through.micro_batches()
    state = through.state_dict()
    share = 4 // world
    resumed = [loader(corpus, world=world, rank=r, micro_batch_sequences=min(micro, share)) for r in range(world)]
    for deal in resumed:
        deal.load_state_dict(state)
    for _ in range(3):
        parts = [batch for deal in resumed for batch in deal.micro_batches()]
        assert rows(parts) == rows(through.micro_batches())
    larger = loader(corpus, batch_sequences=12)
    larger.load_state_dict(state)
    again = loader(corpus)
    again.load_state_dict(state)
    assert rows(larger.micro_batches()) == rows([batch for _ in range(3) for batch in again.micro_batches()])


def test_positions_of_another_run_are_refused(corpus: Corpus) -> None:
    state = loader(corpus).state_dict()
    for change in ({"seed": 1}, {"sequence_length": 8}):
        with pytest.raises(CheckpointError, match=f"belongs to {next(iter(change))} = "):
            loader(corpus, **change).load_state_dict(state)
    for wrong in (
        {"corpus": "0" * 64},
        {"split": "validation"},
        {"position": -1},
        {"position": 1.5},
        {"position": None},
    ):
        deal = loader(corpus)
        with pytest.raises(CheckpointError):
            deal.load_state_dict(state | wrong)
        assert deal.position == 0
    with pytest.raises(CheckpointError):
        loader(corpus).load_state_dict({})


def test_bad_sizes_and_small_corpora(corpus: Corpus, tmp_path: Path) -> None:
    total = corpus.split("train").tokens
    with pytest.raises(DataError, match=rf"has {total} tokens, less than one sequence of {total + 1}"):
        loader(corpus, sequence_length=total + 1)
    for change in ({"sequence_length": 0}, {"batch_sequences": 0}, {"rank": 1}, {"rank": -1}, {"world": 0}):
        with pytest.raises(DataError, match="must be positive"):
            loader(corpus, **change)
    with pytest.raises(DataError, match="multiple of the 3 ranks"):
        loader(corpus, world=3)
    with pytest.raises(DataError, match="must divide"):
        loader(corpus, micro_batch_sequences=3)
    with pytest.raises(DataError, match="no split 'test'"):
        Loader(corpus, "test", sequence_length=4, batch_sequences=1)
    (tmp_path / "x").write_text("x")
    empty = prepare([tmp_path / "x"], tmp_path / "out", tokenizer=PLAIN, validation=0)
    with pytest.raises(DataError, match="has 0 tokens"):
        Loader(empty, "validation", sequence_length=4, batch_sequences=1)


# evaluation


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("length", "windows"), [(1, 3), (7, 2), (16, 8), (10_000, 1)])
def test_evaluation_scores_every_target_and_byte_once(corpus: Corpus, split: str, length: int, windows: int) -> None:
    tokens, targets, _ = expected_line(corpus, split)
    scored = list(corpus.evaluation(split, length, windows))
    assert torch.cat([s.batch.tokens for s in scored]).tolist() == tokens
    assert torch.cat([s.batch.targets for s in scored]).tolist() == targets
    text = b"".join(data for _, data in corpus.documents(split))
    assert sum(s.bytes for s in scored) == len(text)
    for s in scored:  # the bytes of a batch are those of its own targets
        kept = s.batch.targets[s.batch.targets != IGNORE].tolist()
        assert s.bytes == len(PLAIN.decode_bytes(kept, skip_control=True))
        assert max(len(tokens) for tokens, _, _ in rows([s.batch])) <= length


def test_bits_per_byte_of_a_known_code_is_exact(corpus: Corpus) -> None:
    """A uniform code over 512 ids spends 9 bits a target: text tokens plus one [EOS] a document."""
    text = corpus.validation_bytes()
    bits = sum(9.0 * float(s.batch.loss_weight.sum()) for s in corpus.evaluation("validation", 16))
    documents = len(corpus.split("validation").documents)
    assert bits == 9.0 * (len(text) + documents)  # PLAIN has one token a byte


def test_evaluation_limit_spreads_over_the_split(corpus: Corpus) -> None:
    windows = -(-corpus.split("train").tokens // 16)
    whole = [s.batch.tokens.tolist() for s in corpus.evaluation("train", 16, 1)]
    some = [s.batch.tokens.tolist() for s in corpus.evaluation("train", 16, 1, limit=4)]
    assert some == [whole[index * windows // 4] for index in range(4)]
    assert [s.batch.tokens.tolist() for s in corpus.evaluation("train", 16, 1, limit=10_000)] == whole
    for bad in (
        {"sequence_length": 0},
        {"sequence_length": 4, "batch_sequences": 0},
        {"sequence_length": 4, "limit": 0},
    ):
        with pytest.raises(DataError, match="at least 1"):
            next(corpus.evaluation("train", **bad))


def test_empty_validation_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x" * 50)
    corpus = prepare([tmp_path / "x"], tmp_path / "out", tokenizer=PLAIN, validation=0)
    with pytest.raises(DataError, match=r"validation split .* is empty"):
        next(corpus.evaluation("validation", 8))
    assert corpus.validation_bytes() == b""


def test_make_batch_joins_windows(corpus: Corpus) -> None:
    line = corpus.split("train")
    batch = make_batch([line.window(0, 5), line.window(3, 4)])
    assert batch.tokens.tolist() == [*line.read(0, 5).tolist(), *line.read(3, 7).tolist()]
    assert {0, 5, 9} <= set(batch.cu_seqlens.tolist())
