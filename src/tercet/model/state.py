"""What a layer remembers between calls: a convolution tail and a matrix (KDA), or latents (MLA).

The trainer, the sampler, the prefix cache and context parallelism all hold the same objects. A state covers N
sequences; `slice` picks some of them, `snapshot` copies, `restore` writes a snapshot back, `nbytes` is what it costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tercet.config import ModelConfig
from tercet.errors import ShapeError


class LayerState(ABC):
    """State of one decoder layer for N sequences."""

    @abstractmethod
    def slice(self, sequences: Sequence[int]) -> LayerState:
        """Return a copy holding only *sequences* (indices into the N), in that order."""

    @abstractmethod
    def snapshot(self) -> LayerState:
        """Return an independent copy."""

    @abstractmethod
    def restore(self, saved: LayerState) -> None:
        """Take over the contents of *saved*, which stays valid and independent.

        Raises:
            ShapeError: *saved* belongs to another kind of layer or another number of sequences.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in use."""


@dataclass
class KDAState(LayerState):
    """State of a KDA layer; its size does not depend on the length."""

    conv: Float[Tensor, "sequences taps-1 channels"]
    """Newest rows of q, k, v (concatenated) before the convolution, oldest first."""
    recurrent: Float[Tensor, "sequences heads value key"]
    """fp32 matrix, value axis first."""

    def slice(self, sequences: Sequence[int]) -> KDAState:
        """See `LayerState.slice`."""
        index = torch.as_tensor(sequences, dtype=torch.long, device=self.conv.device)
        return KDAState(self.conv[index], self.recurrent[index])

    def snapshot(self) -> KDAState:
        """See `LayerState.snapshot`."""
        return KDAState(self.conv.clone(), self.recurrent.clone())

    def restore(self, saved: LayerState) -> None:
        """See `LayerState.restore`."""
        if not isinstance(saved, KDAState) or saved.recurrent.shape != self.recurrent.shape:
            raise ShapeError("a KDA layer's state can only be restored from one of the same shape")
        self.conv, self.recurrent = saved.conv.clone(), saved.recurrent.clone()

    @property
    def nbytes(self) -> int:
        """See `LayerState.nbytes`."""
        return self.conv.nbytes + self.recurrent.nbytes


class MLAState(LayerState):
    """Latent cache of an MLA layer: per token the normalised latent and the shared key, ``[latent | key]``."""

    def __init__(self, sequences: int, width: int, dtype: torch.dtype, device: torch.device | str):
        self.buffer = torch.empty(sequences, 0, width, dtype=dtype, device=device)
        self.lengths = [0] * sequences

    def append(self, sequence: int, rows: Float[Tensor, "tokens width"]) -> Float[Tensor, "all width"]:
        """Add *rows* to one sequence and return everything it holds."""
        start = self.lengths[sequence]
        end = start + rows.shape[0]
        if end > self.buffer.shape[1]:
            grown = self.buffer.new_empty(
                self.buffer.shape[0], max(2 * self.buffer.shape[1], end, 64), self.buffer.shape[2]
            )
            grown[:, : self.buffer.shape[1]] = self.buffer
            self.buffer = grown
        self.buffer[sequence, start:end] = rows
        self.lengths[sequence] = end
        return self.buffer[sequence, :end]

    def slice(self, sequences: Sequence[int]) -> MLAState:
        """See `LayerState.slice`."""
        picked = MLAState(len(sequences), self.buffer.shape[2], self.buffer.dtype, self.buffer.device)
        picked.buffer = self.buffer[list(sequences)]
        picked.lengths = [self.lengths[n] for n in sequences]
        return picked

    def snapshot(self) -> MLAState:
        """See `LayerState.snapshot`."""
        copy = self.slice(range(len(self.lengths)))
        copy.buffer = copy.buffer[:, : max(self.lengths, default=0)].clone()
        return copy

    def restore(self, saved: LayerState) -> None:
        """See `LayerState.restore`."""
        if not isinstance(saved, MLAState) or len(saved.lengths) != len(self.lengths):
            raise ShapeError("an MLA layer's state can only be restored from one for as many sequences")
        self.buffer, self.lengths = saved.buffer.clone(), list(saved.lengths)

    @property
    def nbytes(self) -> int:
        """See `LayerState.nbytes`."""
        return sum(self.lengths) * self.buffer.shape[2] * self.buffer.element_size()


def new_states(
    config: ModelConfig,
    sequences: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[LayerState]:
    """Return empty states of all decoder layers for *sequences* sequences.

    Args:
        config: the architecture.
        sequences: how many sequences run side by side.
        dtype: dtype of convolution rows and latents; the recurrent matrix is at least fp32.
        device: where they live.
    """
    states: list[LayerState] = []
    kda = config.kda
    for layer in range(config.num_layers):
        if config.is_mla(layer):
            states.append(MLAState(sequences, config.mla.cache_width, dtype, device))
        else:
            conv = torch.zeros(sequences, kda.short_conv_kernel_size - 1, 3 * kda.width, dtype=dtype, device=device)
            matrix = torch.zeros(
                sequences,
                kda.num_heads,
                kda.head_dim,
                kda.head_dim,
                dtype=torch.promote_types(dtype, torch.float32),
                device=device,
            )
            states.append(KDAState(conv, matrix))
    return states
