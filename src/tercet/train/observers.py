"""Several observers of one forward pass, which may run in several threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from tercet.model.context import Attended, Observer, Place
from tercet.ops import Routing


class Observers(Observer):
    """Passes every call on to each of its observers, in order, one call at a time under *lock*."""

    def __init__(self, *observers: Observer, lock: threading.Lock | None = None):
        self.observers = observers
        self._lock = lock or threading.Lock()

    def routing(self, layer: int, routing: Routing) -> None:
        """See `Observer.routing`."""
        with self._lock:
            for observer in self.observers:
                observer.routing(layer, routing)

    def attention(self, layer: int, attended: Attended) -> None:
        """See `Observer.attention`."""
        with self._lock:
            for observer in self.observers:
                observer.attention(layer, attended)

    def mixing(self, layer: int, place: Place, sources: Sequence[Tensor], norm_weight: Tensor, query: Tensor) -> None:
        """See `Observer.mixing`."""
        with self._lock:
            for observer in self.observers:
                observer.mixing(layer, place, sources, norm_weight, query)

    def decay(self, layer: int, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> None:
        """See `Observer.decay`."""
        with self._lock:
            for observer in self.observers:
                observer.decay(layer, z, A_log, dt_bias, lower_bound)
