"""The two ways in which a score may look at a model: likelihoods, and generation.

A scorer written against these runs on the model in this process, on an engine, or on a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tercet.model import CausalLM, Context


class Scorer(Protocol):
    """Gives next-token logits of packed sequences."""

    def logits(
        self, tokens: Int[Tensor, "tokens"], cu_seqlens: Int[Tensor, "bounds"], positions: Int[Tensor, "positions"]
    ) -> Float[Tensor, "positions vocab"]:
        """Return the logits of the token after each of *positions* of the packed *tokens*."""


class Completer(Protocol):
    """Continues a sequence greedily."""

    def complete(self, prompt: Sequence[int], count: int) -> Sequence[int]:
        """Return the *count* tokens, or fewer if the model stops, that it finds most likely one after the other."""


class ModelScorer:
    """The model in this process as a `Scorer`."""

    def __init__(self, model: CausalLM):
        self.model = model

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "tokens"], cu_seqlens: Int[Tensor, "bounds"], positions: Int[Tensor, "positions"]
    ) -> Float[Tensor, "positions vocab"]:
        """See `Scorer.logits`; only the rows asked for meet the head."""
        device = self.model.lm_head.weight.device
        context = Context(cu_seqlens=cu_seqlens)
        hidden_TH = self.model.features(tokens[None].to(device), context).hidden[0]
        return self.model.logits(hidden_TH[positions.to(device)])
