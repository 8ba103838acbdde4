"""Training throughput at the tiny preset, beside transformers' Kimi-Linear of the same sizes on the same batches.

Two comparisons, all arms in turn within one run:

* ``tercet tiny`` — the preset as the demo trains it: every mechanism of K3, Muon, balancing.
* ``tercet kimi-linear`` — the same code configured as Kimi-Linear: what transformers' model computes, no more.
* ``transformers`` — its ``kimi_linear`` model at the same sizes with ``torch.optim.AdamW`` in a plain loop.

    python bench/train_peer.py [--rounds 5] [--threads 2] [--sequences 8] [--length 512]

Prints tokens per second (median over rounds) and the ratio to transformers, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tercet.config import ModelConfig, RunConfig
from tercet.data import Corpus, Loader, prepare, python_library_corpus
from tercet.presets import preset
from tercet.train.loop import Trainer
from tercet.util.settings import override


def as_kimi_linear(config: ModelConfig) -> ModelConfig:
    """Return the same sizes as a Kimi-Linear: softplus gate, low-rank gates, plain residuals, full-width experts."""
    return replace(
        config,
        activation="silu",
        attn_res_block_size=None,
        num_nextn_predict_layers=0,
        kda=replace(config.kda, gate_lower_bound=None, full_rank_gate=False),
        mla=replace(config.mla, q_lora_rank=None, output_gate=False),
        moe=replace(config.moe, latent_size=None, latent_norm=False),
    )


def peer_model(config: ModelConfig) -> torch.nn.Module:
    """Build transformers' model with random weights."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    kda, mla, moe = config.kda, config.mla, config.moe
    layers = range(config.num_layers)
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            moe_intermediate_size=moe.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=mla.num_heads,
            num_key_value_heads=mla.num_heads,
            n_shared_experts=moe.num_shared_experts,
            kv_lora_rank=mla.kv_lora_rank,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            v_head_dim=mla.v_head_dim,
            num_experts_per_tok=moe.num_experts_per_token,
            num_local_experts=moe.num_experts,
            pad_token_id=None,
            linear_head_dim=kda.head_dim,
            linear_num_heads=kda.num_heads,
            linear_conv_kernel_dim=kda.short_conv_kernel_size,
            layer_types=["full_attention" if config.is_mla(n) else "linear_attention" for n in layers],
            mlp_layer_types=["sparse" if config.is_moe(n) else "dense" for n in layers],
            use_cache=False,
        )
    ).float()


def peer_step(config: RunConfig, corpus: Corpus) -> Callable[[], int]:
    """Return a function that trains transformers' model on the next batch and returns its tokens."""
    model = peer_model(as_kimi_linear(config.model)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    data = config.data
    loader = Loader(corpus, sequence_length=data.sequence_length, batch_sequences=data.batch_sequences, seed=data.seed)

    def step() -> int:
        (batch,) = loader.micro_batches()
        tokens = batch.tokens.view(-1, data.sequence_length)
        targets = batch.targets.view_as(tokens)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens.numel()

    return step


def our_step(config: RunConfig, corpus: Corpus, scratch: Path) -> Callable[[], int]:
    """Return a function that does one step of tercet's own loop and returns its tokens."""
    trainer = Trainer(config, corpus, scratch)

    def step() -> int:
        before = trainer.tokens
        trainer.train_step()
        return trainer.tokens - before

    return step


def main() -> None:
    """Time all arms in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a batch, half in each micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tiny = override(
            preset("tiny"),
            {
                "data.batch_sequences": args.sequences,
                "data.sequence_length": args.length,
                "train.micro_batch_sequences": args.sequences // 2,
            },
        )
        corpus = prepare(python_library_corpus(), root / "corpus", vocab_size=tiny.model.vocab_size)
        tiny = override(tiny, {"model.vocab_size": corpus.vocab_size})
        linear = replace(tiny, model=as_kimi_linear(tiny.model))
        arms = {
            "tercet tiny": our_step(tiny, corpus, root / "tiny"),
            "tercet kimi-linear": our_step(linear, corpus, root / "linear"),
            "transformers": peer_step(tiny, corpus),
        }
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for step in arms.values():
            step()
            step()
        for _ in range(args.rounds):
            for name, step in arms.items():
                started = time.perf_counter()
                tokens = step()
                speeds[name].append(tokens / (time.perf_counter() - started))
    print(f"{args.threads} threads, batches of {tiny.data.batch_sequences} × {tiny.data.sequence_length} tokens")
    for name, values in speeds.items():
        ratios = [ours / peer for ours, peer in zip(values, speeds["transformers"])]
        print(
            f"{name:20} {statistics.median(values):8.0f} tokens/s   "
            f"{statistics.median(ratios):6.2f} × transformers (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
