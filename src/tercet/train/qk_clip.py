"""QK-Clip: keeps the attention logits of the MLA layers bounded by shrinking projections (K2 §2.1; training.md §1.5).

    S_h = largest causal logit of head h in the forward passes of this step, scale included
    S_h > τ:  γ = τ / S_h;  rows of q_nope and k_nope of head h × √γ,  rows of q_pe × γ;  shared key and V untouched

Every logit of that head then shrinks by exactly γ. KDA needs none: its queries and keys have unit length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.config import MLAConfig, ModelConfig
from tercet.model.context import Attended, Observer
from tercet.ops import attention_logit_max
from tercet.train.optimizer import Optimizer


@dataclass(frozen=True)
class ClipReport:
    """Attention logits of one step."""

    largest: float
    """Largest S_h; an upper bound where it is at most τ."""
    percentile_99: float
    """99th percentile of S_h over all heads of all MLA layers, same caveat."""
    clipped: int
    """Heads whose projections were scaled."""


class QKClip(Observer):
    """Watches the forward passes between `begin_step` and `end_step`, then scales what grew too large.

    A maximum does not change when the same forward is recomputed; evaluation outside the pair is not seen.
    """

    def __init__(
        self,
        config: ModelConfig,
        threshold: float,
        *,
        reduce_max: Callable[[Tensor], Tensor] = lambda maxima: maxima,
    ):
        """Watch the MLA layers of *config* for logits above *threshold* (τ).

        Args:
            config: the model's configuration.
            threshold: τ.
            reduce_max: takes ``[layers, heads]`` maxima of this process to those over all data ranks.
        """
        self.mla: MLAConfig = config.mla
        self.threshold = threshold
        self._reduce_max = reduce_max
        self._armed = False
        self._maxima: dict[int, Float[Tensor, "heads"]] = {}

    def begin_step(self) -> None:
        """Forget the last step and start watching."""
        self._maxima = {}
        self._armed = True

    def attention(self, layer: int, attended: Attended) -> None:
        """Fold in the maxima of one forward pass of one layer; with ``row_max`` nothing is read from the device."""
        if not self._armed:
            return
        q, k_nope, k_pe, scale, cu_seqlens, row_max = attended
        if row_max is not None and row_max.numel():
            found = row_max.amax(1)
        else:
            found = attention_logit_max(q, k_nope, k_pe, scale=scale, threshold=self.threshold, cu_seqlens=cu_seqlens)
        known = self._maxima.get(layer)
        self._maxima[layer] = found if known is None else torch.maximum(known, found)

    def end_step(self, optimizer: Optimizer, *, accepted: bool) -> ClipReport | None:
        """Stop watching; after an accepted step scale the heads that exceeded τ.

        Args:
            optimizer: has just stepped; holds both copies of the weights.
            accepted: False for a skipped step, which changes nothing.

        Returns:
            What was seen, or None when no MLA layer ran.
        """
        self._armed = False
        layers = sorted(self._maxima)
        if not layers or not accepted:
            return None
        maxima_LH = self._reduce_max(torch.stack([self._maxima[layer] for layer in layers]))
        seen_LH = maxima_LH.cpu()  # the only place that waits for the device
        for layer, maxima_H, seen_H in zip(layers, maxima_LH, seen_LH):
            if bool((seen_H > self.threshold).any()):
                self._scale(optimizer, layer, maxima_H)
        return ClipReport(
            float(seen_LH.max()),
            float(seen_LH.flatten().quantile(0.99)),
            int((seen_LH > self.threshold).sum()),
        )

    def _scale(self, optimizer: Optimizer, layer: int, maxima_H: Tensor) -> None:
        """Scale the rows of the heads of one layer."""
        mla = self.mla
        gamma_H1 = (self.threshold / maxima_H).clamp(max=1.0)[:, None]
        root_H1, one_H1 = gamma_H1.sqrt(), torch.ones_like(gamma_H1)
        query = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
        q_rows = [root_H1.expand(-1, mla.qk_nope_head_dim), gamma_H1.expand(-1, mla.qk_rope_head_dim)]
        kv_rows = [root_H1.expand(-1, mla.qk_nope_head_dim), one_H1.expand(-1, mla.v_head_dim)]
        prefix = f"model.layers.{layer}.self_attn"
        optimizer.scale_rows(f"{prefix}.{query}.weight", torch.cat(q_rows, dim=1).flatten())
        optimizer.scale_rows(f"{prefix}.kv_b_proj.weight", torch.cat(kv_rows, dim=1).flatten())

    @property
    def maxima(self) -> Mapping[int, Float[Tensor, "heads"]]:
        """S_h by layer of the last step, before clipping."""
        return self._maxima
