"""What every GPU kernel's wrapper needs: aligned inputs, the size of the device, and registration as one operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from tercet.errors import UnsupportedError
from tercet.ops.compiling import traced
from tercet.ops.registry import AMD

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU, slowly, in Triton's interpreter."""
PTX = not (INTERPRETED or AMD)
"""Kernels may hold instructions of NVIDIA GPUs."""
GLUON_VERSIONS = ("3.6",)
"""Releases of Triton whose Gluon, an experimental part of it, the kernels written in it were run with."""
HOPPER = 9
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels read and write."""


def dense(x: Tensor) -> Tensor:
    """Return *x* contiguous and at a 16-byte boundary, copied only when it is not (kernels.md §15)."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def blocks(count: int, size: int) -> int:
    """Return how many blocks of *size* cover *count*; Triton's own `cdiv` costs the CPU many times as much."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least *count*."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Chip:
    """What launches of kernels depend on."""

    multiprocessors: int
    """Programs of full size that run at once."""
    shared_memory: int
    """Bytes of it that one program can have."""
    generation: int
    """Major compute capability of an NVIDIA GPU, else 0."""

    @property
    def roomy(self) -> bool:
        """Whether it is a GPU for data centres, Hopper or later: what tiles measured on an H200 need."""
        return self.generation >= HOPPER and self.shared_memory >= 220 << 10


@lru_cache(maxsize=8)
def chip(device: torch.device) -> Chip:
    """Return what is known of *device*; something small without limits where kernels are interpreted."""
    if device.type != "cuda":
        return Chip(multiprocessors=4, shared_memory=1 << 40, generation=0)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    return Chip(properties.multi_processor_count, shared, 0 if AMD else properties.major)


@lru_cache(maxsize=8)
def takes_gluon(device: torch.device) -> bool:
    """Return whether *device* is a Hopper GPU and Triton a release known to compile the Gluon kernels for it."""
    known = ".".join(triton.__version__.split(".")[:2]) in GLUON_VERSIONS
    return known and chip(device).roomy and chip(device).generation == HOPPER


def capped(registers: int) -> dict[str, int]:
    """Return the launch option that holds a thread to *registers*, which only NVIDIA GPUs know."""
    return {} if AMD else {"maxnreg": registers}


def float_refusal(*tensors: Tensor) -> str | None:
    """Return a reason when a tensor is of a type that no kernel takes, else None."""
    for x in tensors:
        if x.dtype not in FLOATS:
            return f"kernels take fp32, bf16 and fp16, not {str(x.dtype).removeprefix('torch.')}"
    return None


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which kernels feed *dtype* to matrix products: Triton's interpreter cannot multiply bf16."""
    if dtype == torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


class Fitted:
    """A kernel that runs with fewer pipeline stages where a GPU's shared memory is too small for all it was tuned for.

    Stages change what is in flight, not what is computed. The reduced number is remembered for the same options.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._reduced: dict[str, dict[str, int]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a call that launches on *grid*."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch, with one stage less after every refusal.

        Raises:
            UnsupportedError: the kernel does not fit with a single stage either.
        """
        asked = repr(options) if self._reduced else ""
        options |= self._reduced.get(asked, {})
        while True:
            try:
                return self.kernel[grid](*args, **options)
            except OutOfResources as error:
                stages = {"num_stages": 3} | {k: v for k, v in options.items() if k in ("num_stages", "STAGES")}
                fewer = {name: count - 1 for name, count in stages.items() if count > 1}
                if not fewer:
                    raise UnsupportedError(
                        f"{self.kernel.__name__} does not fit this GPU: it needs {error.required} of {error.name}, "
                        f"there are {error.limit}; run this operator with use_tier('torch')"
                    ) from error
                asked = asked or repr(options)
                options |= fewer
                self._reduced[asked] = self._reduced.get(asked, {}) | fewer


def fitted(kernel: Any) -> Fitted:
    """Wrap a kernel that the host launches and whose loads run ahead through shared memory."""
    return Fitted(kernel)


class GPUOperator:
    """A host function that launches kernels, registered with torch.library so that a compiler sees one operator.

    Outside of compilation the function is called directly, through one autograd node: the registered path costs the
    CPU several times as much, which small tensors feel.
    """

    def __init__(self, function: Callable[..., Any], name: str, schema: str, mutates_args: Iterable[str]):
        self.function = function
        self.registered = torch.library.custom_op(name, function, mutates_args=mutates_args, schema=schema)
        self.gradient: Callable[..., Any] | None = None
        self.setup: Callable[..., None] | None = None

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the function that makes outputs of the right shape without running."""
        return self.registered.register_fake(function)

    def register_autograd(self, gradient: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Set the backward function and what it needs saved."""
        self.gradient, self.setup = gradient, setup_context
        self.registered.register_autograd(gradient, setup_context=setup_context)

    def __call__(self, *args: Any) -> Any:
        """Run on *args*, positionally as in the schema."""
        if traced():
            return self.registered(*args)
        if self.gradient is None or not torch.is_grad_enabled():
            return self.function(*args)
        flat = _flatten(args)
        if not any(isinstance(x, Tensor) and x.requires_grad for x in flat):
            return self.function(*args)
        return _Eager.apply(self, [len(x) if isinstance(x, list) else None for x in args], *flat)


class _Eager(torch.autograd.Function):
    """Autograd node of a `GPUOperator`; lists of tensors travel flattened."""

    @staticmethod
    def forward(ctx: Any, operator: GPUOperator, sizes: list[int | None], *flat: Any) -> Any:
        rest = iter(flat)
        args = tuple(next(rest) if n is None else [next(rest) for _ in range(n)] for n in sizes)
        output = operator.function(*args)
        assert operator.setup is not None
        operator.setup(ctx, args, output)
        ctx.operator, ctx.listed = operator, isinstance(output, list)
        return tuple(output) if ctx.listed else output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        result = ctx.operator.gradient(ctx, list(grads)) if ctx.listed else ctx.operator.gradient(ctx, *grads)
        return None, None, *_flatten(result if isinstance(result, tuple) else (result,))


def _flatten(values: Sequence[Any]) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


def operator(
    name: str, *, schema: str, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], GPUOperator]:
    """Register the decorated host function as the operator *name*; see `GPUOperator`."""
    return lambda function: GPUOperator(function, name, schema, mutates_args)
