"""What the processes of a `Gang` do; found by name in every process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tercet.checkpoint import distributed
from tercet.config import RunConfig
from tercet.data import Corpus
from tercet.parallel import Ranks, processes
from tercet.train.loop import Trainer


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Every collective once, on numbers whose results are easily written down."""
    own = ranks.rank + 1.0
    found: dict[str, Any] = {
        "sum": ranks.sum(torch.tensor([own, 1.0])),
        "integers": ranks.sum(torch.tensor([2**40 + ranks.rank])),
        "max": ranks.max(torch.tensor([own, -own])),
        "any": ranks.any([ranks.rank == 1, False, True]),
        "first": ranks.on_first(lambda: f"rank {ranks.rank}"),
        "all": ranks.on_all(lambda: ranks.rank),
    }
    shapes, owners = [(3,), (2, 2), (), (20,), (0,), (5,)], [0, 1, 0, 1, 1, 0]
    tensors = [torch.full(shape, own * 10**n) for n, shape in enumerate(shapes)]
    tensors[5] = tensors[5].double()
    with mock.patch.object(processes, "BUCKET_BYTES", 40):  # several buckets, one a tensor larger than the limit
        ranks.sum_to_owners(tensors, owners)
        found["owned"] = [tensor.clone() for tensor, owner in zip(tensors, owners) if owner == ranks.rank]
        ranks.spread_from_owners(tensors, owners)
    found["spread"] = tensors
    ranks.check_same("hat", "black")
    return found


def disagree(ranks: Ranks, how: str) -> None:
    """Fail on one rank only."""
    if how == "value":
        ranks.check_same("hat", ranks.rank)
    elif how == "first":
        ranks.on_first(lambda: int("one") if ranks.first else 0)
    else:
        ranks.on_all(lambda: int("one") if ranks.rank == 1 else 0)


def leave(ranks: Ranks) -> None:
    """Rank 1 closes its connections without a word; the others wait for it."""
    if ranks.rank != 1:
        with mock.patch.object(processes, "ROLL_CALL_SECONDS", 0.3):
            ranks.sum(torch.ones(1))


def hang(ranks: Ranks) -> None:
    """Rank 1 is busy with something else for longer than anybody waits."""
    with mock.patch.object(processes, "ROLL_CALL_SECONDS", 0.3):
        if ranks.rank == 1:
            time.sleep(6.0)
        ranks.any([True])


def run(ranks: Ranks, config: RunConfig, directory: Path, steps: int | None = None) -> dict[str, Any]:
    """Train *steps* steps, or to the end, and save; returns rows and weights."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    rows = [trainer.train_step() for _ in range(trainer.step, config.train.steps if steps is None else steps)]
    trainer.save()
    return {"rows": rows, "weights": weights(trainer), "owned": sum(map(int, _owned(trainer)))}


def score(ranks: Ranks, config: RunConfig, directory: Path, windows: int) -> list[dict[str, Any]]:
    """Evaluate the untrained model on so many windows."""
    shorter = replace(config, train=replace(config.train, eval_sequences=windows))
    trainer = Trainer(shorter, Corpus.open(config.data.path), directory, ranks=ranks)
    return list(trainer.evaluate())


def whole_run(ranks: Ranks, config: RunConfig, directory: Path) -> Any:
    """Run the loop as the command does."""
    return Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks).run()


def poisoned(ranks: Ranks, config: RunConfig, directory: Path) -> tuple[dict[str, Any], bool]:
    """Rank 1 finds one gradient that is not a number; returns the row and whether anything moved."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    trainer.train_step()
    before = weights(trainer)
    if ranks.rank == 1:
        accumulate = trainer.optimizer.accumulate

        def poison() -> None:
            trainer.model.lm_head.weight.grad[0, 0] = float("nan")  # type: ignore[index]
            accumulate()

        trainer.optimizer.accumulate = poison  # type: ignore[method-assign]
    row = trainer.train_step()
    after = weights(trainer)
    return row, all(torch.equal(before[name], after[name]) for name in before)


def one_sided_gradient(ranks: Ranks, config: RunConfig, directory: Path) -> dict[str, Tensor]:
    """Only rank 1 has a gradient for the head, and nobody one for the last norm."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    for name, parameter in trainer.model.named_parameters():
        if name != "model.norm.weight" and (name != "lm_head.weight" or ranks.rank == 1):
            parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step(1e-2)
    return {name: weights(trainer)[name] for name in ("model.norm.weight", "lm_head.weight")}


def stopped(ranks: Ranks, config: RunConfig, directory: Path) -> tuple[int, bool]:
    """SIGTERM reaches rank 1 alone in the third step."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    step = trainer.train_step

    def interrupted() -> dict[str, Any]:
        if ranks.rank == 1 and trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    trainer.train_step = interrupted  # type: ignore[method-assign]
    outcome = trainer.run()
    return outcome.step, outcome.finished


def full_disk(ranks: Ranks, config: RunConfig, directory: Path) -> int:
    """Rank 1's disk is full from the second checkpoint on."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    write = distributed.write_shard

    def full(path: Path, *args: Any) -> None:
        if ranks.rank == 1 and "step-00000002" in str(path):
            raise OSError(28, "No space left on device")
        write(path, *args)

    with mock.patch.object(distributed, "write_shard", full):
        return trainer.run().step


def killed(ranks: Ranks, config: RunConfig, directory: Path, victim: int) -> int:
    """Rank *victim* is killed by SIGKILL while it writes its part of the second checkpoint."""
    trainer = Trainer(config, Corpus.open(config.data.path), directory, ranks=ranks)
    write = distributed.write_shard

    def dying(path: Path, *args: Any) -> None:
        if ranks.rank == victim and "step-00000004" in str(path):
            path.write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *args)

    with mock.patch.object(distributed, "write_shard", dying):
        return trainer.run().step


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def _owned(trainer: Trainer) -> list[bool]:
    return [rank == trainer.ranks.rank for rank in trainer.optimizer.owners.values()]
