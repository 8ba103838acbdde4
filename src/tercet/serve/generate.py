"""Token by token from a cached state: the same tokens as without a cache.

`Sampler` is the seam that RL and chat use; `Generator` is the model in this process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.errors import ConfigError, NumericsError, ShapeError
from tercet.model import CausalLM, Context, LayerState, new_states


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}; it must fit into 64 bits")


class Sampler(Protocol):
    """Whatever continues token sequences: this process's model, an engine, a server over HTTP."""

    def stream(
        self, ids: Sequence[int], sampling: Sampling, *, max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield new ids one by one; a stop id ends the stream and is yielded last."""
        ...


def draw(logits: Float[Tensor, "vocab"], sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token; computed in fp64 on the CPU so that a seed gives the same text on every device.

    Raises:
        NumericsError: a logit is not finite.
    """
    wide = logits.double().cpu()
    if not bool(wide.isfinite().all()):
        raise NumericsError("the model's logits are not finite; its training diverged, take an earlier checkpoint")
    if sampling.temperature == 0:
        return int(wide.argmax())
    p = ((wide - wide.max()) / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        ranked, index = p.sort(descending=True, stable=True)
        before = ranked.cumsum(0) - ranked
        p = torch.zeros_like(p).scatter(0, index, torch.where(before < sampling.top_p, ranked, 0.0))
    return int(torch.multinomial(p / p.sum(), 1, generator=generator))


class Generator:
    """Continues one sequence at a time with the model in this process.

    The state after the last call is kept: a prompt that extends everything seen so far is not read again, which makes
    a multi-turn chat linear in its length.
    """

    def __init__(self, model: CausalLM):
        self.model = model
        self._seen: list[int] = []
        self._states: list[LayerState] = []
        self._logits: Tensor | None = None

    @torch.no_grad()
    def stream(
        self, ids: Sequence[int], sampling: Sampling, *, max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Iterator[int]:
        """See `Sampler.stream`.

        Raises:
            ShapeError: an empty prompt, or an id outside the vocabulary.
            NumericsError: see `draw`.
        """
        vocab = self.model.config.vocab_size
        if not ids:
            raise ShapeError("the prompt is empty; give at least one token")
        if not all(0 <= i < vocab for i in ids):
            raise ShapeError(f"prompt ids must lie in [0, {vocab}), got {min(ids)} … {max(ids)}")
        generator = torch.Generator().manual_seed(sampling.seed)
        logits = self._advance_to(list(ids))
        for _ in range(max_new_tokens):
            token = draw(logits, sampling, generator)
            yield token
            if token in stop_ids:
                return
            logits = self._advance_to([*self._seen, token])

    def _advance_to(self, ids: list[int]) -> Tensor:
        """Read whatever of *ids* is new and return the logits after the last one."""
        known = len(self._seen)
        if self._logits is not None and ids == self._seen:
            return self._logits
        if known == 0 or ids[:known] != self._seen:
            weight = self.model.lm_head.weight
            self._states = new_states(self.model.config, 1, dtype=weight.dtype, device=weight.device)
            known = 0
        new = torch.tensor([ids[known:]], device=self.model.lm_head.weight.device)
        self._seen, self._logits = [], None  # an interrupted pass leaves states that stand for no sequence
        hidden = self.model.features(new, Context(states=self._states)).hidden
        self._seen, self._logits = ids, self.model.logits(hidden[0, -1])
        return self._logits
