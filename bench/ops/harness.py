"""How an operator is measured: correctness first, then everyone in turn, from a cold L2, medians (kernels.md §16)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

COPY_BYTES = 4.27e12
MATMUL_FLOPS = 700e12
"""What one H200 reaches in a device copy and in a large bf16 product; the floors below use them."""
_FLUSH_BYTES = 1 << 28


@dataclass
class Case:
    """One row of the table."""

    name: str
    ours: Callable[[], Any]
    others: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Contenders by name: the torch tier, and peers that could be imported."""
    check: Callable[[], dict[str, tuple[float, float]]] = dict
    """Relative error against fp64 and its limit, by tensor."""
    bytes: float = 0.0
    """Bytes that have to move."""
    flops: float = 0.0
    graph: bool = False
    """Also time a CUDA-graph replay: for anything near launch latency."""

    @property
    def floor(self) -> float:
        """Milliseconds below which a result would be a measurement error."""
        return 1e3 * max(self.bytes / COPY_BYTES, self.flops / MATMUL_FLOPS)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x − ref‖ / ‖ref‖ in fp64."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / reference.norm().clamp(min=1e-300))


def compare(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], tensors: dict[str, Tensor], limits: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Return the error of the output (``out``) and of every gradient, against *reference* run in fp64."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    out, expected = ours(*leaves.values()), reference(*wide.values())
    pull = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(leaves.values()), pull)
    wanted = torch.autograd.grad(expected, list(wide.values()), pull.double())
    errors = {"out": relative_error(out, expected)}
    errors |= {name: relative_error(a, b) for name, a, b in zip(tensors, grads, wanted)}
    return {name: (error, limits.get(name, limits["gradients"])) for name, error in errors.items() if name in errors}


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """Return a call of *function* forward and backward with a fixed output gradient."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        pull = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, pull)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender."""

    median: float
    quartiles: tuple[float, float]
    peak_bytes: int
    """Device memory above what was allocated before."""


def measure(contenders: dict[str, Callable[[], Any]], *, seconds: float, device: torch.device) -> dict[str, Timing]:
    """Time all *contenders* in turn, about *seconds* for all together, the L2 cache flushed before every run."""
    flush = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.int8, device=device)
    peaks, slowest = {}, 0.0
    for name, run in contenders.items():
        run()
        peaks[name] = _peak(run, device)
        slowest = max(slowest, _span(run, flush)())
    rounds = max(5, min(50, int(seconds * 1e3 / max(slowest, 1e-3) / len(contenders))))
    for run in contenders.values():
        for _ in range(min(20, rounds)):
            run()
    spans: dict[str, list[Callable[[], float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            spans[name].append(_span(run, flush))
    times = {name: [elapsed() for elapsed in pending] for name, pending in spans.items()}
    results = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        results[name] = Timing(middle, (low, high), peaks[name])
    return results


def _span(run: Callable[[], Any], flush: Tensor) -> Callable[[], float]:
    """Start *run* after a flush and return how to read its milliseconds; the GPU's queue is not drained in between.

    So a GPU time holds launch latency only where the CPU cannot keep ahead, as in training.
    """
    flush.zero_()
    if flush.device.type != "cuda":
        started = time.perf_counter()
        run()
        elapsed = 1e3 * (time.perf_counter() - started)
        return lambda: elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    return read


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replay of *run* captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def importable(names: dict[str, Callable[[], Callable[[], Any]]]) -> dict[str, Callable[[], Any]]:
    """Build the peers whose packages are here; the others are left out."""

    def built() -> Iterator[tuple[str, Callable[[], Any]]]:
        for name, build in names.items():
            try:
                yield name, build()
            except ImportError:
                continue

    return dict(built())
