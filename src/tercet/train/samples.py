"""What the model writes now: a short completion of a held-out beginning, logged at every evaluation."""

from __future__ import annotations

from typing import Any

from tercet.data import Corpus
from tercet.model import CausalLM
from tercet.serve.generate import Generator, Sampling

PROMPT_TOKENS = 24
NEW_TOKENS = 64


class Samples:
    """Completes the beginning of the first sufficiently long validation document."""

    def __init__(self, corpus: Corpus):
        """Choose the prompt; a corpus without a validation split is sampled from its control token alone."""
        self.tokenizer = corpus.tokenizer
        line = corpus.split("validation")
        self.held_out = line.tokens > 0
        """Whether the corpus has text that the model does not learn from."""
        lengths = line.documents["tokens"]
        long_enough = [n for n, tokens in enumerate(lengths.tolist()) if tokens > PROMPT_TOKENS]
        start = int(line.starts[long_enough[0]]) if long_enough else 0
        prompt = line.read(start, min(start + PROMPT_TOKENS, line.tokens)).tolist()
        self.prompt: list[int] = prompt or [self.tokenizer.bos_id]

    def row(self, model: CausalLM, step: int, *, seed: int) -> dict[str, Any]:
        """Return the metrics row of one completion at temperature 0.8."""
        stream = Generator(model).stream(
            self.prompt,
            Sampling(temperature=0.8, top_p=0.95, seed=seed),
            max_new_tokens=NEW_TOKENS,
            stop_ids=self.tokenizer.stop_ids,
        )
        text = self.tokenizer.decode(list(stream), skip_control=True)
        prompt = self.tokenizer.decode(self.prompt, skip_control=True)
        return {"kind": "sample", "step": step, "prompt": prompt, "text": text}
