"""What a training step costs and where the time goes.

`measure_step` takes a run's own steps (`Stepper`) on random tokens. Phases are marked by identity nodes in the autograd
graph: one before and one after a phase, so that forward and backward are timed alike, on the device's own clock. The
plain step is timed first, without marks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tercet.config import RunConfig
from tercet.data.batch import Batch
from tercet.model import decoder
from tercet.model.decoder import DecoderLayer
from tercet.model.sizes import sizes
from tercet.parallel import Ranks
from tercet.train.step import Stepper, new_model
from tercet.train.workers import Workers


@dataclass(frozen=True)
class StepTiming:
    """Cost of one optimiser step."""

    seconds: float
    """Median, without marks."""
    tokens: int
    flops: float
    """Forward and backward by `Sizes.training_flops`; recomputation, if any, is not counted as useful."""
    phases: dict[str, float]
    """Seconds by phase, forward + backward, from one marked step, micro-batches one after another; ``rest`` is what no
    phase holds."""
    peak_bytes: int
    """Most device memory in use during a step (0 on a CPU)."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole step over its time."""
        return self.tokens / self.seconds

    @property
    def achieved(self) -> float:
        """Useful FLOP/s."""
        return self.flops / self.seconds


class _Clock:
    """Collects pairs of instants, on the GPU's stream or on the host."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.spans: dict[str, list[list[Any]]] = {}

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, phase: str) -> None:
        self.spans.setdefault(phase, []).append([self.now()])

    def end(self, phase: str) -> None:
        self.spans[phase][-1].append(self.now())

    def seconds(self) -> dict[str, float]:
        """Sum every phase; a recomputed forward that stops early leaves a span open, which counts as rest."""
        if self.on_gpu:
            torch.cuda.synchronize()
        closed = {phase: [span for span in spans if len(span) == 2] for phase, spans in self.spans.items()}
        if self.on_gpu:
            return {p: sum(a.elapsed_time(b) for a, b in pairs) / 1e3 for p, pairs in closed.items()}
        return {p: sum(b - a for a, b in pairs) for p, pairs in closed.items()}


class _Mark(torch.autograd.Function):
    """Identity that reports when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, report: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.report = report
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.report()
        return None, *grads


@dataclass
class _Phases:
    """Wraps functions so that their forward and backward time is booked to a phase."""

    clock: _Clock
    undo: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Replace ``owner.name`` by a timed version; its first argument is a tensor or a sequence of tensors."""
        original, clock = getattr(owner, name), self.clock

        def timed(first: Any, *args: Any, **kwargs: Any) -> Any:
            many = not isinstance(first, Tensor)
            marked = _Mark.apply(lambda: clock.end(phase), *(first if many else (first,)))
            clock.begin(phase)
            out = original(list(marked) if many else marked[0], *args, **kwargs)
            clock.end(phase)
            if isinstance(out, tuple):  # a result, and inputs handed on
                return _Mark.apply(lambda: clock.begin(phase), out[0])[0], *out[1:]
            return _Mark.apply(lambda: clock.begin(phase), out)[0]

        self._replace(owner, name, timed)

    def book(self, owner: Any, name: str, phase: str) -> None:
        """Replace ``owner.name``, which no gradient passes through or which forms it at once, by a timed version."""
        original, clock = getattr(owner, name), self.clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.begin(phase)
            out = original(*args, **kwargs)
            clock.end(phase)
            return out

        self._replace(owner, name, timed)

    def _replace(self, owner: Any, name: str, timed: Callable[..., Any]) -> None:
        original, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, timed)
        self.undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


@contextmanager
def _watched(stepper: Stepper, clock: _Clock) -> Iterator[None]:
    phases, kept = _Phases(clock), stepper.workers
    phases.watch(decoder, "attn_res", "AttnRes")
    phases.watch(decoder, "attn_res_read", "AttnRes")
    for layer in stepper.model.model.layers:
        assert isinstance(layer, DecoderLayer)
        kind = "MLA" if type(layer.self_attn).__name__.startswith("Multi") else "KDA"
        phases.watch(layer.self_attn, "forward", kind)
        phases.watch(layer.block_sparse_moe if layer.is_moe else layer.mlp, "forward", "MoE" if layer.is_moe else "MLP")
    for part in stepper.components:
        phases.book(part, "total", "loss")
    phases.book(stepper.optimizer, "step", "optimizer")
    phases.book(stepper.balancer, "finish", "balance")
    if stepper.qk_clip is not None:
        phases.book(stepper.qk_clip, "end_step", "balance")
    stepper.workers = Workers(1)  # phases of micro-batches side by side would overlap
    try:
        yield
    finally:
        stepper.workers = kept
        for restore in phases.undo:
            restore()


def _random_batch(config: RunConfig, device: torch.device) -> Batch:
    rows, length = config.train.micro_batch_sequences, config.data.sequence_length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.model.vocab_size, (rows * length + 1,), generator=generator).to(device)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)  # on the host, where lengths are read
    return Batch(ids[:-1], ids[1:], torch.ones(rows * length, device=device), bounds)


def measure_step(config: RunConfig, device: torch.device, *, steps: int = 5) -> StepTiming:
    """Time optimiser steps of *config* on random tokens.

    Args:
        config: the run; its micro-batch, batch and sequence length are used, its data is not.
        device: where to run.
        steps: timed steps, after two to warm up.
    """
    stepper = Stepper(new_model(config, device), config, Ranks())
    batches = [_random_batch(config, device)] * config.micro_batches
    times = []
    for n in range(steps + 2):
        if n == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _synchronize(device)
        started = time.perf_counter()
        stepper.step(batches, lr=1e-4, progress=0.0)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    clock = _Clock(device)
    with _watched(stepper, clock):
        clock.begin("all")
        stepper.step(batches, lr=1e-4, progress=0.0)
        clock.end("all")
    phases = clock.seconds()
    whole = phases.pop("all")
    phases["rest"] = whole - sum(phases.values())
    tokens = config.data.batch_sequences * config.data.sequence_length
    flops = tokens * sizes(config.model).training_flops(config.data.sequence_length)
    return StepTiming(statistics.median(times[2:]), tokens, flops, phases, peak)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_rate(device: torch.device) -> float:
    """Return FLOP/s of a large matrix product on *device*: bf16 8192³ on a GPU, fp32 1024³ on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(8):
        _synchronize(device)
        started = time.perf_counter()
        a @ a
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[3:])
