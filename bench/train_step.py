"""One training step of a preset on a GPU: our kernels, the torch tier, and PyTorch around fla's KDA.

    python bench/train_step.py [base] [--set data.batch_sequences=16] [--steps 5] [--arms ours,fla,torch]

The same model, loss, optimiser and random tokens in one process; only the operators differ. Around fla's KDA run the
torch tier and, for the routed experts, PyTorch's grouped products: what is there without kernels of one's own.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from tercet.cli.common import add_configuration, configuration
from tercet.ops.registry import OPERATORS, use_tier
from tercet.train.timing import StepTiming, matmul_rate, measure_step

sys.path.insert(0, str(Path(__file__).parent / "ops"))  # the peers of single operators
from grouped import grouped_experts

ARMS = {"ours": "ours", "fla": "fla's KDA, grouped_mm, torch tier", "torch": "torch tier"}


@contextmanager
def torch_everywhere(**peers: Callable) -> Iterator[None]:
    """Force the torch tier, and for the operators named the given functions."""
    kept = {name: OPERATORS[name].torch_tier for name in peers}
    for name, peer in peers.items():
        OPERATORS[name].torch_tier = peer
    try:
        with use_tier("torch"):
            yield
    finally:
        for name, tier in kept.items():
            OPERATORS[name].torch_tier = tier


def fla_kda(q, k, v, z, b, A_log, dt_bias, *, scale, lower_bound, state, cu_seqlens):
    """Run KDA with fla's chunk kernels, gate, norms and sigmoid inside."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        q,
        k,
        v,
        g=z,
        beta=b,
        A_log=A_log,
        dt_bias=dt_bias.flatten(),
        scale=scale,
        initial_state=state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens.to(q.device, torch.long),
        cu_seqlens_cpu=cu_seqlens.long(),
    )


def grouped_situ(z, weights, experts, w1, w2, w3, **_):
    """Run the experts with PyTorch's grouped products around eager SiTU."""
    return grouped_experts(z, weights, experts, w1, w2, w3)


def main() -> None:
    """Time the arms and print a table row and the phases of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_configuration(parser)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=f"which to time, of {', '.join(ARMS)} (the slow ones last)"
    )
    args = parser.parse_args()
    chosen = args.arms.split(",")
    if unknown := [name for name in chosen if name not in ARMS]:
        parser.error(f"no such arm: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    config, device = configuration(args), torch.device("cuda")
    rate = matmul_rate(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a large bf16 product: {rate / 1e12:.0f} TFLOP/s")
    print("| arm | tokens/s | ms a step | TFLOP/s | MFU of 989 | peak GiB |\n|---|---|---|---|---|---|")
    peers = {"fused_kda": fla_kda, "routed_experts": grouped_situ}
    scopes = {"ours": nullcontext(), "fla": torch_everywhere(**peers), "torch": torch_everywhere()}
    for arm in chosen:
        name, scope = ARMS[arm], scopes[arm]
        try:
            with scope:
                timing = measure_step(config, device, steps=args.steps)
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"| {name} | did not run: {type(error).__name__} | | | | |", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        print(_line(name, timing), flush=True)


def _line(name: str, timing: StepTiming) -> str:
    phases = ", ".join(f"{p} {1e3 * s:.1f}" for p, s in sorted(timing.phases.items(), key=lambda x: -x[1]))
    return (
        f"| {name} | {timing.tokens_per_second:,.0f} | {1e3 * timing.seconds:.1f} | {timing.achieved / 1e12:.1f} "
        f"| {100 * timing.achieved / 989e12:.1f} % | {timing.peak_bytes / 2**30:.1f} |\n  phases, ms: {phases}"
    )


if __name__ == "__main__":
    main()
