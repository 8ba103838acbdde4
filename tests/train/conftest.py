"""A corpus and a model small enough to train many times in a test."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tercet.config import DataConfig, MLAConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, TrainConfig
from tercet.data import Corpus, prepare
from tercet.presets import tiny_model

TEXT = "the model reads a token and writes the next one while state decays slowly over every head"
WORDS = TEXT.split(" ")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Forty small documents of a toy language."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for n in range(40):
        text = "\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(rng.randint(3, 30)))
        (root / f"{n:02d}.txt").write_text(text)
    return prepare([root], root / "out", vocab_size=600, validation=0.1)


def micro_model(vocab_size: int, **changes: object) -> ModelConfig:
    """Every mechanism of K3 at the least size that has them all."""
    from dataclasses import replace

    base = tiny_model()
    small = replace(
        base,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        kda=replace(base.kda, num_heads=2, head_dim=16),
        mla=MLAConfig(
            num_heads=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
            intermediate_size=32,
            latent_size=16,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
    )
    return replace(small, **changes)  # type: ignore[arg-type]


@pytest.fixture
def config(corpus: Corpus) -> RunConfig:
    """A run of twelve short steps."""
    return RunConfig(
        preset="tiny",
        model=micro_model(corpus.vocab_size, num_nextn_predict_layers=1),
        data=DataConfig(path=str(corpus.root), sequence_length=48, batch_sequences=8),
        optim=OptimConfig(lr=4e-3),
        train=TrainConfig(
            steps=12, micro_batch_sequences=4, eval_every=6, eval_sequences=4, checkpoint_every=5, device="cpu"
        ),
    )


def losses(run: Path) -> list[float]:
    """Training losses of a run, step by step."""
    from tercet.train.metrics import read_metrics

    return [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]
