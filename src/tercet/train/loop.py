"""The training loop: one page, read top to bottom.

A step is: learning rate → data → what `Stepper` does (forward, loss, backward, update) → log. Everything that makes two
runs differ is in `RunConfig`; everything needed to go on is in a checkpoint; the position in the data is
one counter. So a run that was killed and resumed gives the same losses as one that was not.

Several processes run the same loop, each on its micro-batches of every step; `Ranks` sums what must be summed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tercet.checkpoint.state import checkpoint_path, checkpoints, tidy
from tercet.config import RunConfig
from tercet.data import Corpus, Loader
from tercet.data.batch import Batch
from tercet.errors import ConfigError
from tercet.eval.compression import bits_per_byte
from tercet.parallel import Ranks
from tercet.train.checkpoint import (
    check_same_run,
    copy_tokenizer,
    load_checkpoint,
    lock_run,
    state_tensors,
    write_config,
)
from tercet.train.interrupt import polite_interrupt
from tercet.train.metrics import MetricsLog, NoLog, Sink
from tercet.train.probe import probe
from tercet.train.progress import Progress, SteadyConsole
from tercet.train.rows import balance_row, norms_row
from tercet.train.samples import Samples
from tercet.train.saving import Saver
from tercet.train.schedule import learning_rate
from tercet.train.step import Stepper, new_model
from tercet.util.memory import keep_freed_memory


@dataclass(frozen=True)
class Outcome:
    """How a call of `Trainer.run` ended."""

    step: int
    """Completed optimiser steps."""
    finished: bool
    """False after Ctrl-C or SIGTERM; the state is saved either way."""
    training_seconds: float
    """Seconds in optimiser steps, over all sessions of the run."""
    tokens: int
    bits_per_byte: float | None
    """Held-out bits per byte at the last evaluation."""


class Trainer:
    """Trains one run in one directory; an existing run of the same configuration is continued."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        directory: str | Path,
        *,
        sinks: Sequence[Sink] = (),
        ranks: Ranks | None = None,
    ):
        """Build the model, or load the newest checkpoint.

        Args:
            config: the run.
            corpus: where its tokens come from.
            directory: where everything is written.
            sinks: trackers that also receive every metrics row.
            ranks: the processes of the run, each with the same arguments; by default this one alone.

        Raises:
            ConfigError: vocabulary and corpus disagree, the directory belongs to another configuration or is in use
                by another process, more steps are done than the run shall have, or a step has fewer micro-batches
                than there are ranks.
            CheckpointError: the newest checkpoint is damaged.
            PeerError: another rank died.
        """
        if corpus.vocab_size != config.model.vocab_size:
            raise ConfigError(
                f"the corpus has {corpus.vocab_size} ids, model.vocab_size is {config.model.vocab_size}; "
                "set it to the corpus's, or prepare the corpus with another --vocab-size"
            )
        keep_freed_memory()
        self.config, self.corpus, self.directory = config, corpus, Path(directory)
        self.ranks = ranks or Ranks()
        self.ranks.check_same("configuration or corpus", (config, corpus.fingerprint))
        data, settings = config.data, config.train
        self.device = self.ranks.device(settings.device)
        self.loader = Loader(
            corpus,
            sequence_length=data.sequence_length,
            batch_sequences=data.batch_sequences,
            micro_batch_sequences=settings.micro_batch_sequences,
            seed=data.seed,
            rank=self.ranks.rank,
            world=self.ranks.world,
        )
        self.model = new_model(config, self.device)
        self.stepper = Stepper(self.model, config, self.ranks)
        self.optimizer, self.balancer = self.stepper.optimizer, self.stepper.balancer
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.validation: float | None = None
        self.samples = Samples(corpus)
        self._earlier_steps = settings.steps
        newest = self.ranks.on_first(self._take_directory)
        self.saver = Saver(
            self.directory, self.ranks, keep=settings.keep_checkpoints, asynchronous=settings.async_checkpoint
        )
        self._imported = False
        if newest is not None:
            self._resume(newest)
        self.log: MetricsLog = NoLog()
        self.ranks.on_first(lambda: self._open_log(sinks))

    def run(self) -> Outcome:
        """Train until the last step, or until Ctrl-C or SIGTERM; the state is saved at the end either way."""
        settings, saved, stop = self.config.train, self.step, False
        console = SteadyConsole(highlight=False, quiet=not self.ranks.first)
        with (
            polite_interrupt() as interrupted,
            self.saver,
            Progress(settings.steps, saved, console=console) as progress,
        ):
            for text in self._opening():
                progress.note(text)
            while self.step < settings.steps and not stop:
                row = self.train_step()
                self.log.append(row)
                progress.update(row)
                if self.step % settings.eval_every == 0 or self.step == settings.steps:
                    for extra in self.evaluate():
                        self.log.append(extra)
                        progress.update(extra)
                if self.step % settings.checkpoint_every == 0:
                    saved = self._save_later(progress)
                stop, published = self.saver.poll(bool(interrupted))
                self._tell(progress, published)
            if saved != self.step:
                self._save_later(progress)
            self._tell(progress, self.saver.wait())
            if self.step < settings.steps:
                progress.note(f"stopped at step {self.step}; everything is saved, run the same command to go on")
        finished = self.step >= settings.steps
        return Outcome(self.step, finished, self.seconds, self.tokens, self.validation)

    def _save_later(self, progress: Progress) -> int:
        """Start saving after the save under way has been published; returns the step."""
        self._tell(progress, self.saver.wait())
        self.save(wait=False)
        return self.step

    @staticmethod
    def _tell(progress: Progress, published: int | None) -> None:
        if published is not None:
            progress.note(f"saved step {published}")

    def _opening(self) -> Iterator[str]:
        """Say what is unusual about this start."""
        steps = self.config.train.steps
        if self._imported:
            yield "starts from imported weights, with a fresh optimizer"
        if self.ranks.world > 1:
            count = self.loader.micro_batches_per_step
            yield f"{self.ranks.world} processes share the {count} micro-batches of a step"
        if self.step == steps:
            yield f"all {steps} steps are done; nothing to train"
        elif self.step:
            yield f"resumed at step {self.step}"
        if self._earlier_steps != steps and not self._imported:
            yield f"train.steps was {self._earlier_steps}: from here the learning rate follows a run of {steps} steps"
        if not self.samples.held_out:
            yield "the corpus holds no text out: no bits per byte, no figures from inside the model"

    def train_step(self) -> dict[str, Any]:
        """Do one optimiser step and return its metrics row."""
        started = time.perf_counter()
        config, steps = self.config, self.config.train.steps
        lr = learning_rate(self.step, steps, config.optim, config.schedule)
        batches = [_to(batch, self.device) for batch in self.loader.micro_batches()]
        did = self.stepper.step(batches, lr, self.step / steps)
        self.step += 1
        tokens = self.config.data.batch_sequences * self.config.data.sequence_length
        self.tokens += tokens
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return {
            "kind": "train",
            "step": self.step,
            "loss": None,
            "mtp_loss": None,
            **did.losses,
            "lr": lr,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(tokens / seconds, 1),
            **norms_row(did.update),
            "qk_logit_max": did.clip.largest if did.clip else None,
            "qk_clipped_heads": did.clip.clipped if did.clip else 0,
            "balance": {str(layer): balance_row(b) for layer, b in did.balance.items()},
        }

    @torch.no_grad()
    def evaluate(self) -> Iterator[dict[str, Any]]:
        """Yield a validation row, a probe row and a sample row; changes nothing about training.

        A corpus without held-out text gives the sample alone. All ranks score, the first alone probes and samples.
        """
        self.model.eval()
        if self.samples.held_out:
            yield from self._held_out()
        if self.ranks.first:
            yield self.samples.row(self.model, self.step, seed=self.config.train.seed)
        self.model.train()

    def _held_out(self) -> Iterator[dict[str, Any]]:
        data = self.config.data
        score = bits_per_byte(
            self.model,
            self.corpus,
            sequence_length=data.sequence_length,
            limit=self._evaluation_limit(),
            ranks=self.ranks,
        )
        self.validation = score.bits_per_byte
        yield {
            "kind": "validation",
            "step": self.step,
            "loss": score.nats_per_token,
            "bits_per_byte": score.bits_per_byte,
            "bytes": score.bytes,
        }
        if self.ranks.first:
            batch = next(iter(self.corpus.evaluation("validation", data.sequence_length, 2, limit=2))).batch
            batch = _to(batch, self.device)
            yield probe(self.model, batch.tokens, batch.cu_seqlens, self.step)

    def _evaluation_limit(self) -> int | None:
        """Validation windows to score now: a spread during training, all of them at the end."""
        return None if self.step >= self.config.train.steps else self.config.train.eval_sequences

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the current step; returns where it is, or with ``wait=False`` where it will be.

        Raises:
            StorageError: the disk refused it, or the one before; older ones are untouched.
            PeerError: another rank died.
        """
        balance = self.balancer.state_dict()
        averages = balance.pop("averages", {})
        optimizer, owners, rank = self.optimizer.state_dict(), self.optimizer.owners, self.ranks.rank
        trainer = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bits_per_byte": self.validation,
            "loader": self.loader.state_dict(),
            "balance": balance,
            "skipped_in_a_row": optimizer["skipped_in_a_row"],
        }
        tensors = state_tensors(
            self.model, optimizer, averages if self.ranks.first else {}, lambda name: owners.get(name, 0) == rank
        )
        self.saver.save(self.step, tensors, trainer)
        if wait:
            self.saver.wait()
        return checkpoint_path(self.directory, self.step)

    def _take_directory(self) -> Path | None:
        """Lock the run, check that it is this one, tidy it; returns its newest checkpoint, if any."""
        self._lock = lock_run(self.directory)
        if (self.directory / "config.json").exists():
            self._earlier_steps = check_same_run(self.directory, self.config).train.steps
        copy_tokenizer(self.corpus.tokenizer, self.directory)
        tidy(self.directory)
        found = checkpoints(self.directory)
        return found[-1] if found else None

    def _open_log(self, sinks: Sequence[Sink]) -> None:
        write_config(self.directory, self.config)
        self.log = MetricsLog(self.directory, sinks)
        self.log.truncate_after(self.step)

    def _resume(self, checkpoint: Path) -> None:
        owners, rank = self.optimizer.owners, self.ranks.rank
        saved = load_checkpoint(
            checkpoint, self.model, ranks=self.ranks, owns=lambda name: owners.get(name, rank) == rank
        )
        if saved.step > self.config.train.steps:
            raise ConfigError(
                f"{self.directory} has done {saved.step} steps, train.steps is {self.config.train.steps}; "
                "set it to at least that, or choose another --out"
            )
        self.optimizer.load_state_dict(saved.optimizer)
        state = saved.trainer
        self._imported = "loader" not in state
        if self._imported:
            return
        self.loader.load_state_dict(state["loader"])
        averages = {"averages": state["tensors"]} if state["tensors"] else {}
        self.balancer.load_state_dict(state["balance"] | averages)
        self.step, self.tokens, self.seconds = saved.step, state["tokens"], state["seconds"]
        self.validation = state["bits_per_byte"]


def fit_to_time(
    config: RunConfig, corpus: Corpus, directory: str | Path, seconds: float, trial_steps: int = 8
) -> RunConfig:
    """Return *config* with as many steps as fit into *seconds* on this machine, measured on a throw-away model.

    Args:
        config: the run; only ``train.steps`` changes.
        corpus: the run's corpus.
        directory: a scratch directory.
        seconds: time to spend in optimiser steps; evaluations come on top.
        trial_steps: steps to time, after two to warm up; the median counts.
    """
    trial = Trainer(config, corpus, directory)
    times = []
    for _ in range(2 + trial_steps):
        started = time.perf_counter()
        trial.train_step()
        times.append(time.perf_counter() - started)
    steps = max(20, math.floor(seconds / statistics.median(times[2:])))
    return replace(config, train=replace(config.train, steps=steps))


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # The bounds stay on the host: every operator reads them there, and reading them from the GPU would wait for it.
    moved = {name: getattr(batch, name).to(device) for name in ("tokens", "targets", "loss_weight")}
    return replace(batch, **moved)
