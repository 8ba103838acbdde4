"""Compare tercet with llama.cpp on miniatures of both architectures: ``make interop``.

Builds llama-cpp-python in an environment of its own (`engine`; about ten minutes on two cores, once), writes a K3 and
a Kimi-Linear miniature, and compares the logits of

* tercet in fp64, from the published directory,
* llama.cpp on tercet's GGUF export,
* llama.cpp on what its own converter makes of the published directory,

and every tensor of the two GGUF files bit for bit. The last lines are a table; the exit status is 1 if a row fails.

K3's experts run twice. Dequantised, everything is fp32. Packed, llama.cpp on a CPU rounds the inputs of every MXFP4
product to eight bits, which is its choice of arithmetic and not a property of the file: there the fp64 reference
rounds the same inputs in the same way (`EightBitExperts`).

The miniatures have ``rms_norm_eps`` 1e-6, because llama.cpp uses that setting also where the architecture has a fixed
1e-6, and token sequences on which no router (and no rounding to eight bits) is near a tie, because llama.cpp cannot be
told which experts to take.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from engine import BuildError, Engine, build
from torch import Tensor

from tercet.checkpoint.gguf import export_gguf
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import as_kimi_linear, write_miniature
from tercet.checkpoint.runs import export_checkpoint
from tercet.errors import TercetError
from tercet.model import CausalLM, Context, Observer
from tercet.ops import Routing, routed_experts, situ_glu
from tercet.presets import tiny_model

HERE = Path(__file__).parent
TOKENS, PACKED_TOKENS = 96, 16
"""Tokens of a comparison; with packed experts fewer, as each brings some 2,400 values that must not be near a tie."""
TOLERANCE = 1e-4
"""Relative distance of logits that passes: fp32 rounding through a few layers."""
MARGIN = 1e-4
"""Smallest lead of the last chosen expert over the first unchosen one, in units of the score."""
ROUNDING_MARGIN = 3e-5
"""Smallest distance of an eight-bit code from the middle between two integers; fp32 errs by some 1e-5 there."""


class Row(NamedTuple):
    """One line of the table."""

    architecture: str
    experts: str
    source: str
    tokens: int
    error: float
    """Relative distance to tercet's fp64 logits."""
    same: bool
    """Whether all tensors of the two GGUF files are the same, bit for bit."""

    @property
    def passed(self) -> bool:
        """Whether logits agree within the tolerance and tensors agree exactly."""
        return self.same and self.error <= TOLERANCE


class EightBitExperts:
    """Routed experts with the input of each product rounded to eight bits, as llama.cpp's Q8_0 does.

    A block of 32 values has an fp16 scale, its largest magnitude / 127, and codes rounded to the nearest integer.
    """

    def __init__(self) -> None:
        self.closest = 0.5
        """Distance of the unrounded code that came closest to the middle between two integers."""

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the codes stand for."""
        blocks = x.reshape(-1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        codes = blocks / scale.clamp_min(1e-30)
        self.closest = min(self.closest, float((codes.abs() % 1 - 0.5).abs().min()))
        return (codes.round() * scale.half().to(x.dtype)).view_as(x)

    def __call__(
        self, z: Tensor, weights: Tensor, experts: Tensor, *stacks: Tensor, activation: str, **betas: float
    ) -> Tensor:
        """Compute ``Σ_e p_e · w2_e act(w1_e z, w3_e z)`` token by token."""
        assert activation == "situ", "only K3's experts are packed"
        w1, w2, w3 = stacks
        rows, out = self.rounded(z), torch.zeros_like(z)
        for token, (chosen, share) in enumerate(zip(experts.tolist(), weights)):
            for expert, weight in zip(chosen, share):
                inner = situ_glu(F.linear(rows[token], w1[expert]), F.linear(rows[token], w3[expert]), **betas)
                out[token] += weight * F.linear(self.rounded(inner), w2[expert])
        return out


class _Margins(Observer):
    """Smallest lead of a chosen expert over an unchosen one."""

    def __init__(self, model: CausalLM) -> None:
        self.biases = {
            layer: module.get_buffer("block_sparse_moe.gate.e_score_correction_bias")
            for layer, module in enumerate(model.model.layers)
            if model.config.is_moe(layer)
        }
        self.smallest = float("inf")

    def routing(self, layer: int, routing: Routing) -> None:
        """See `Observer.routing`."""
        biased = (routing.scores + self.biases[layer]).sort(-1, descending=True).values
        k = routing.experts.shape[-1]
        self.smallest = min(self.smallest, float((biased[:, k - 1] - biased[:, k]).min()))


def reference(model: CausalLM, packed: bool) -> tuple[Tensor, Tensor]:
    """Return tokens on which neither a router nor a rounding is near a tie, and their fp64 logits."""
    model, count = model.double(), PACKED_TOKENS if packed else TOKENS
    for seed in range(1000):
        tokens = torch.randint(0, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))
        margins, eight_bit = _Margins(model), EightBitExperts()
        experts = eight_bit if packed else routed_experts
        with torch.no_grad(), mock.patch("tercet.model.moe.routed_experts", experts):
            logits = model(tokens, Context(observer=margins))
        if margins.smallest > MARGIN and eight_bit.closest > ROUNDING_MARGIN:
            return tokens[0], logits[0]
    raise BuildError("no token sequence without near ties found; lower MARGIN")


def relative(x: np.ndarray, y: Tensor) -> float:
    """Return ‖x − y‖ / ‖y‖."""
    difference = torch.from_numpy(x).double() - y
    return float(difference.norm() / y.norm())


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two GGUF files hold the same tensors, types and bytes."""
    x, y = ({tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (a, b))
    return x.keys() == y.keys() and all(
        x[name].tensor_type == y[name].tensor_type
        and x[name].shape.tolist() == y[name].shape.tolist()
        and np.array_equal(x[name].data, y[name].data)
        for name in x
    )


def compare(architecture: str, experts: str, published: Path, engine: Engine) -> list[Row]:
    """Run one published directory three ways."""
    tokens, expected = reference(load_model(published, show=False), experts == "mxfp4")
    np.save(tokens_file := published.with_suffix(".tokens.npy"), tokens.numpy())
    files = {who: published.with_name(f"{published.name}-{who}.gguf") for who in ("tercet", "llama.cpp")}
    export_gguf(published, files["tercet"], dtype="F32", show=False)
    command = [sys.executable, HERE / "convert.py", engine.source, published, files["llama.cpp"]]
    _quietly(command)
    same, rows = same_tensors(*files.values()), []
    for who, label in (("tercet", "our export"), ("llama.cpp", "llama.cpp's converter on our published layout")):
        out = published.with_name(f"{published.name}-{who}.logits.npy")
        _quietly([engine.python, HERE / "logits.py", files[who], tokens_file, out])
        rows.append(Row(architecture, experts, label, len(tokens), relative(np.load(out), expected), same))
    return rows


def _quietly(command: list[str | Path]) -> None:
    """Run *command*; show what it says only if it fails.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{Path(command[1]).name} failed on {command[-1]}\n{done.stdout}{done.stderr}")


def compare_all(work: Path, engine: Engine) -> list[Row]:
    """Write the miniatures afresh and compare each."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    config = replace(tiny_model(), vocab_size=512, num_layers=6, full_attention_layers=(2, 5), attn_res_block_size=2)
    config = replace(config, rms_norm_eps=1e-6)
    print("comparing K3", flush=True)
    write_miniature(work / "k3", LAYOUTS["k3"], config)
    export_checkpoint(work / "k3", work / "k3-plain", experts="plain", show=False)
    rows = compare("kimi-k3", "fp32", work / "k3-plain", engine)
    rows += compare("kimi-k3", "mxfp4", work / "k3", engine)
    print("comparing Kimi-Linear", flush=True)
    write_miniature(work / "kimi-linear", LAYOUTS["kimi-linear"], as_kimi_linear(config))
    return rows + compare("kimi-linear", "fp32", work / "kimi-linear", engine)


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(f"\nrelative error: logits beside tercet in fp64, limit {TOLERANCE:g}")
    print("tensors: our GGUF against the converter's, bit for bit\n")
    print(
        f"{'architecture':<13}{'experts':<9}{'GGUF from':<47}{'tokens':>6}{'relative error':>16}  {'tensors':<9}result"
    )
    for row in rows:
        print(
            f"{row.architecture:<13}{row.experts:<9}{row.source:<47}{row.tokens:>6}{row.error:>16.2e}"
            f"  {'same' if row.same else 'DIFFER':<9}{'pass' if row.passed else 'FAIL'}"
        )


def main() -> int:
    """Build, compare both architectures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/interop"), help="environment, sources, miniatures")
    work = parser.parse_args().work.resolve()
    try:
        rows = compare_all(work / "miniatures", build(work))
    except KeyboardInterrupt:
        print("\ninterop: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (BuildError, TercetError, OSError) as error:
        print(f"interop: {error}", file=sys.stderr)
        return 2
    show(rows)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
