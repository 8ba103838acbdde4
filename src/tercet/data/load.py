"""Batches for training, in an order that is a function of the corpus, a seed and one counter.

The line of tokens of a split is cut into ``n = tokens // sequence_length`` windows, anew in every epoch: the first cut
falls on a random token of the ring, and the windows are shuffled. So one epoch repeats nothing and leaves out fewer
than `sequence_length` tokens, another stretch each time; neighbouring files do not meet in the same batch; and the
k-th sequence of a run is known from k alone.

That one integer, *sequences consumed*, is the whole position. It does not depend on how a batch is split into
micro-batches or over ranks, so both may change between a checkpoint and its resumption.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tercet.data.batch import Batch
from tercet.data.corpus import Corpus, make_batch
from tercet.errors import CheckpointError, ConfigError, DataError


class Loader:
    """Deals the sequences of one split, batch by batch."""

    def __init__(
        self,
        corpus: Corpus,
        split: str = "train",
        *,
        sequence_length: int,
        batch_sequences: int,
        micro_batch_sequences: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Plan the order.

        Args:
            corpus: an open corpus.
            split: which of its splits.
            sequence_length: tokens in every sequence.
            batch_sequences: sequences in one optimiser step, over all ranks and micro-batches.
            micro_batch_sequences: sequences in one `Batch`; default an equal share for every rank.
            seed: of the shuffle.
            rank: this process; takes the rank-th contiguous run of every batch's micro-batches.
            world: processes that share every batch; one may get a micro-batch more than another.

        Raises:
            DataError: sizes that do not divide, or a split smaller than one sequence.
            ConfigError: fewer micro-batches than ranks.
        """
        if min(sequence_length, batch_sequences, world) < 1 or not 0 <= rank < world:
            raise DataError(
                f"sequence_length {sequence_length}, batch_sequences {batch_sequences} and world {world} must be "
                f"positive and rank {rank} lie below world"
            )
        if micro_batch_sequences is None and batch_sequences % world:
            raise DataError(
                f"batch_sequences ({batch_sequences}) must be a multiple of the {world} ranks that share it"
            )
        micro = batch_sequences // world if micro_batch_sequences is None else micro_batch_sequences
        if micro < 1 or batch_sequences % micro:
            raise DataError(
                f"micro_batch_sequences is {micro}; it must divide the {batch_sequences} sequences of a step"
            )
        self.micro_batches_per_step = batch_sequences // micro
        """Over all ranks."""
        if self.micro_batches_per_step < world:
            raise ConfigError(
                f"a step has {self.micro_batches_per_step} micro-batches for {world} ranks; use fewer ranks, or lower "
                f"train.micro_batch_sequences ({micro}) to at most {batch_sequences // world}"
            )
        self.line = corpus.split(split)
        self.sequences_per_epoch = self.line.tokens // sequence_length
        if not self.sequences_per_epoch:
            raise DataError(
                f"the {split} split has {self.line.tokens} tokens, less than one sequence of {sequence_length}; "
                "add text or lower data.sequence_length"
            )
        self.corpus, self.split, self.seed = corpus, split, seed
        self.sequence_length, self.batch_sequences = sequence_length, batch_sequences
        mine = (self.micro_batches_per_step * r // world for r in (rank, rank + 1))
        self._first, self._last = (micro * number for number in mine)
        self._micro = micro
        self.position = 0
        """Sequences consumed by all ranks together since the start of the run."""
        self._epoch: tuple[int, int, np.ndarray] | None = None

    @property
    def epochs(self) -> float:
        """How often the split has been seen."""
        return self.position / self.sequences_per_epoch

    def sequence_start(self, index: int) -> int:
        """Return the position on the token line at which the *index*-th sequence of the run starts."""
        epoch, place = divmod(index, self.sequences_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            # Raw words of the generator are the same in every numpy version; its `permutation` need not be.
            words = np.random.PCG64([self.seed, epoch]).random_raw(self.sequences_per_epoch + 1)
            order = np.argsort(words[1:], kind="stable")
            self._epoch = (epoch, int(words[0] % np.uint64(self.line.tokens)), order)
        _, phase, order = self._epoch
        return (phase + int(order[place]) * self.sequence_length) % self.line.tokens

    def micro_batches(self, step: int | None = None) -> list[Batch]:
        """Return this rank's micro-batches of one optimiser step and advance the counter past it.

        Args:
            step: optimiser step from 0, at a constant batch size; None continues from the counter.
        """
        start = self.position if step is None else step * self.batch_sequences
        self.position = start + self.batch_sequences
        mine = range(start + self._first, start + self._last)
        windows = [self.line.window(self.sequence_start(index), self.sequence_length) for index in mine]
        return [make_batch(windows[i : i + self._micro]) for i in range(0, len(windows), self._micro)]

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus.fingerprint,
            "split": self.split,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counter and what it counts."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where *state* was taken; ranks, batch and micro-batch sizes may differ.

        Raises:
            CheckpointError: the state is of another corpus, split, sequence length or seed, or is malformed.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"the saved data position belongs to {key} = {state.get(key)!r}, this run has {value!r}; "
                    "sequences would repeat or be missed. Resume with the settings of the run"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise CheckpointError(f"the saved data position is {position!r}; it must be a whole number of sequences")
        self.position = position
