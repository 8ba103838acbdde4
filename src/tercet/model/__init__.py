"""The architecture, one concept a file. Parallelism and caching policy live elsewhere."""

from tercet.model.context import Context, Observer
from tercet.model.device import choose_device
from tercet.model.init import build, initialize, to_compute_dtype
from tercet.model.state import KDAState, LayerState, MLAState, new_states
from tercet.model.transformer import CausalLM, Features

__all__ = [
    "CausalLM",
    "Context",
    "Features",
    "KDAState",
    "LayerState",
    "MLAState",
    "Observer",
    "build",
    "choose_device",
    "initialize",
    "new_states",
    "to_compute_dtype",
]
