"""Published tensor names: a walk without renaming, except that stacked experts are listed one by one.

``…experts.w1`` of shape ``[E, I, L]`` is published as ``…experts.0.w1.weight`` … each ``[I, L]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

_STACKED = re.compile(r"^(.*\.experts)\.(w[123])$")
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])\.weight$")


def published_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of *model* under its published name; experts are views into the stacked tensors."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_stacked(name):
            for expert in range(tensor.shape[0]):
                yield published_name(name, expert), tensor[expert]
        else:
            yield name, tensor


def published_name(name: str, expert: int) -> str:
    """Return the published name of expert *expert* of the stacked parameter *name*."""
    match = _STACKED.match(name)
    assert match, f"{name} is not a stacked expert tensor"
    return f"{match[1]}.{expert}.{match[2]}.weight"


def locate(name: str) -> tuple[str, int | None]:
    """Return the parameter that holds the published tensor *name*, and its expert index if it is one."""
    match = _SINGLE.match(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, None)


def is_stacked(name: str) -> bool:
    """Whether parameter *name* stacks all experts of a layer."""
    return _STACKED.match(name) is not None
