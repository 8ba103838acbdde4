"""Processes, a corpus and a model for tests with several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tercet.config import BalanceConfig, DataConfig, OptimConfig, RunConfig, TrainConfig
from tercet.data import Corpus
from tests.parallel.gang import Gang
from tests.train.conftest import corpus as _corpus
from tests.train.conftest import micro_model

corpus = _corpus


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture
def config(corpus: Corpus) -> RunConfig:
    """Five micro-batches a step, so that two and three ranks get uneven shares; clipping of both kinds is active."""
    model = micro_model(corpus.vocab_size, num_layers=2, full_attention_layers=(1,), num_nextn_predict_layers=1)
    return RunConfig(
        preset="tiny",
        model=replace(model, first_dense_layers=1),
        data=DataConfig(path=str(corpus.root), sequence_length=24, batch_sequences=5),
        optim=OptimConfig(lr=4e-3, grad_clip=0.5, qk_clip=0.01),
        balance=BalanceConfig(ema=0.5),
        train=TrainConfig(
            steps=4, micro_batch_sequences=1, eval_every=4, eval_sequences=2, checkpoint_every=100, device="cpu"
        ),
    )
