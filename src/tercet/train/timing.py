"""What a training step costs and where the time goes.

`measure_step` builds the model, loss, optimiser, balancer and QK-Clip of a run and steps on random tokens. Phases are
marked by identity nodes in the autograd graph: one before and one after a phase, so that forward and backward are timed
alike, on the device's own clock. The plain step is timed first, without marks.
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
from tercet.model import CausalLM, Context, build, decoder, to_compute_dtype
from tercet.model.decoder import DecoderLayer
from tercet.model.sizes import sizes
from tercet.train.balance import balancer_for
from tercet.train.loss import components
from tercet.train.observers import Observers
from tercet.train.optimizer import Optimizer
from tercet.train.qk_clip import QKClip


@dataclass(frozen=True)
class StepTiming:
    """Cost of one optimiser step."""

    seconds: float
    """Median, without marks."""
    tokens: int
    flops: float
    """Forward and backward by `Sizes.training_flops`; recomputation, if any, is not counted as useful."""
    phases: dict[str, float]
    """Seconds by phase, forward + backward, from one marked step; ``rest`` is what no phase holds."""
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

        setattr(owner, name, timed)
        is_module = isinstance(owner, torch.nn.Module)
        self.undo.append(lambda: delattr(owner, name) if is_module else setattr(owner, name, original))


@contextmanager
def _watched(model: CausalLM, clock: _Clock) -> Iterator[None]:
    phases = _Phases(clock)
    phases.watch(decoder, "attn_res", "AttnRes")
    phases.watch(decoder, "attn_res_read", "AttnRes")
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        kind = "MLA" if type(layer.self_attn).__name__.startswith("Multi") else "KDA"
        phases.watch(layer.self_attn, "forward", kind)
        phases.watch(layer.block_sparse_moe if layer.is_moe else layer.mlp, "forward", "MoE" if layer.is_moe else "MLP")
    try:
        yield
    finally:
        for restore in phases.undo:
            restore()


class _Step:
    """One optimiser step on fixed random tokens."""

    def __init__(self, config: RunConfig, device: torch.device):
        self.config, self.device = config, device
        self.model = build(config.model, seed=config.train.seed, device=device)
        if device.type == "cuda":
            to_compute_dtype(self.model, torch.bfloat16)
        self.optimizer = Optimizer(self.model, config.optim)
        self.components = components(self.model, config.train)
        self.balancer = balancer_for(self.model, config.balance)
        self.qk_clip = QKClip(config.model, config.optim.qk_clip) if config.optim.qk_clip is not None else None
        self.batch = self._random_batch()

    def _random_batch(self) -> Batch:
        rows, length = self.config.train.micro_batch_sequences, self.config.data.sequence_length
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.model.vocab_size, (rows * length + 1,), generator=generator)
        ids = ids.to(self.device)
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)  # on the host, where lengths are read
        return Batch(ids[:-1], ids[1:], torch.ones(rows * length, device=self.device), bounds)

    def run(self, clock: _Clock | None = None) -> None:
        """Forward, backward and optimiser; with *clock*, loss, optimiser and balancing are booked."""
        clock = clock or _Clock(self.device)
        micro_batches = self.config.data.batch_sequences // self.config.train.micro_batch_sequences
        self.balancer.begin_step()
        if self.qk_clip is not None:
            self.qk_clip.begin_step()
        for index in range(micro_batches):
            self._micro_step(index, micro_batches, clock)
        clock.begin("optimizer")
        report = self.optimizer.step(1e-4)
        clock.end("optimizer")
        clock.begin("balance")
        self.balancer.finish(accepted=not report.skipped)
        if self.qk_clip is not None:
            self.qk_clip.end_step(self.optimizer, accepted=not report.skipped)
        clock.end("balance")

    def _micro_step(self, index: int, micro_batches: int, clock: _Clock) -> None:
        watching = [self.balancer.begin_micro_batch(index), *([self.qk_clip] if self.qk_clip is not None else [])]
        context = Context(
            cu_seqlens=self.batch.cu_seqlens,
            observer=Observers(*watching),
            recompute=self.config.train.recompute,
        )
        features = self.model.features(self.batch.tokens[None], context)
        clock.begin("loss")
        scale = 1 / (micro_batches * self.batch.tokens.numel())
        losses = [part.total(self.model, self.batch, features, context, scale) for part in self.components]
        clock.end("loss")
        if (auxiliary := self.balancer.auxiliary_loss()) is not None:
            losses.append(auxiliary / micro_batches)
        torch.stack(losses).sum().backward()
        self.optimizer.accumulate()


def measure_step(config: RunConfig, device: torch.device, *, steps: int = 5) -> StepTiming:
    """Time optimiser steps of *config* on random tokens.

    Args:
        config: the run; its micro-batch, batch and sequence length are used, its data is not.
        device: where to run; bf16 on a GPU, fp32 on a CPU.
        steps: timed steps, after two to warm up.
    """
    step = _Step(config, device)
    times = []
    for n in range(steps + 2):
        if n == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _synchronize(device)
        started = time.perf_counter()
        step.run()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    clock = _Clock(device)
    with _watched(step.model, clock):
        clock.begin("all")
        step.run(clock)
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
