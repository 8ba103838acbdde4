"""Which implementation of an operator runs, and why another did not.

Each operator has up to three tiers of the same function: ``reference`` (the formula, in any floating dtype), ``torch``
(vectorised, any device) and ``triton`` (fast, a GPU). On a CUDA tensor the registry takes triton when it accepts the
inputs, else torch — and says so once, with the reason; on any other device it takes torch. Nothing falls back in
silence, and a tier that was asked for by name either runs or raises.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from tercet.errors import ConfigError, TercetWarning, UnsupportedError, nearest
from tercet.ops.choice import Choice
from tercet.ops.compiling import traced

AMD = torch.version.hip is not None
"""PyTorch's ``cuda`` devices are AMD GPUs."""
Tier = Literal["reference", "torch", "triton"]
TIERS: tuple[Tier, ...] = get_args(Tier)

_forced: Choice[Tier | None] = Choice(None)
OPERATORS: dict[str, Operator] = {}


@contextlib.contextmanager
def use_tier(tier: Tier | None) -> Iterator[None]:
    """Run the block with every operator on *tier* (None restores the automatic choice), in every thread.

    Without a torch tier ``torch`` means the reference, which then is vectorised already; without a triton tier the
    choice stays automatic. An operator that has the tier and declines raises.
    """
    if tier is not None and tier not in TIERS:
        raise ConfigError(f"unknown tier {tier!r}{nearest(str(tier), TIERS)}")
    with _forced.held(tier):
        yield


@torch.compiler.assume_constant_result
def import_error(name: str) -> str | None:
    """Import the kernels of the operator *name* unless they are; returns what went wrong. Not traced by a compiler."""
    operator = OPERATORS[name]
    assert operator.triton_module is not None
    try:
        operator.kernels = operator.kernels or importlib.import_module(operator.triton_module)
    except ImportError as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result
def _say_once(name: str, reason: str, general: str) -> None:
    """Warn that the operator *name* does not run its kernels, at the first time for this *reason*."""
    refusals = OPERATORS[name].refusals
    if reason not in refusals:
        refusals[reason] = general
        message = f"{name} runs on the {general} tier: triton declines: {reason}"
        warnings.warn(message, TercetWarning, stacklevel=5)


def _gpu(args: tuple) -> torch.device | None:
    """Return the CUDA device of the first tensor, None if it is elsewhere."""
    for a in args:
        if isinstance(a, torch.Tensor):
            return a.device if a.device.type == "cuda" else None
    return None


@torch.compiler.assume_constant_result
def obstacle(device: torch.device) -> str | None:
    """Return why kernels do not run on the GPU *device* unless asked for by name, or None."""
    return _obstacle(device)


@lru_cache(maxsize=8)
def _obstacle(device: torch.device) -> str | None:
    if AMD:
        return "the kernels compile for AMD GPUs but have not been run on one; use_tier('triton') runs them"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton supports GPUs of compute capability 8.0 and newer, this one has {major}.{minor}"
    return None


def checks_values(x: torch.Tensor) -> bool:
    """Return whether values beside *x* may be looked at: not on a GPU, which would have to wait, nor while tracing."""
    return x.device.type == "cpu" and not traced()


@dataclass
class Operator:
    """One operator with its tiers.

    Attributes:
        name: how the operator is called in messages.
        reference: the formula.
        torch_tier: vectorised implementation, or None where the reference already is vectorised.
        triton_module: dotted module defining ``call`` and ``declines``, imported at first use on a GPU.
        kernels: that module, once imported.
    """

    name: str
    reference: Callable[..., Any]
    torch_tier: Callable[..., Any] | None = None
    triton_module: str | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    kernels: Any = None

    def __post_init__(self) -> None:
        OPERATORS[self.name] = self

    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers this operator has."""
        present = {
            "reference": True,
            "torch": self.torch_tier is not None,
            "triton": self.triton_module is not None,
        }
        return tuple(tier for tier in TIERS if present[tier])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on the tier chosen for these inputs."""
        forced = _forced.value
        if forced is None:
            return self._implementation(self._automatic(args, kwargs))(*args, **kwargs)
        if forced == "torch":
            return self._implementation(self._general)(*args, **kwargs)
        if forced in self.tiers():
            if forced == "triton" and (reason := self._triton_refusal(args, kwargs)):
                raise UnsupportedError(f"{self.name}: the triton tier declines: {reason}")
            return self._implementation(forced)(*args, **kwargs)
        return self._implementation(self._automatic(args, kwargs))(*args, **kwargs)

    @property
    def _general(self) -> Tier:
        """The vectorised tier that runs on any device."""
        return "torch" if self.torch_tier is not None else "reference"

    def _automatic(self, args: tuple, kwargs: dict) -> Tier:
        general = self._general
        if self.triton_module is None or (device := _gpu(args)) is None:
            return general
        reason = obstacle(device) or self._triton_refusal(args, kwargs)
        if reason is None:
            return "triton"
        _say_once(self.name, reason, general)
        return general

    def _triton_refusal(self, args: tuple, kwargs: dict) -> str | None:
        if error := import_error(self.name):
            return f"triton cannot be imported ({error})"
        if _gpu(args) is None and os.environ.get("TRITON_INTERPRET") != "1":
            return "the tensors are on the CPU and TRITON_INTERPRET is not 1"
        return self.kernels.declines(*args, **kwargs)

    def _implementation(self, tier: Tier) -> Callable[..., Any]:
        if tier == "triton":
            return self.kernels.call
        if tier == "torch":
            assert self.torch_tier is not None
            return self.torch_tier
        return self.reference
