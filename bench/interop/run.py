"""Compare tercet with llama.cpp on miniatures of both architectures: ``make interop``.

Builds llama-cpp-python in an environment of its own (about six minutes on two cores, once), writes a K3 and a
Kimi-Linear miniature, and compares the logits of

* tercet in fp64, from the published directory,
* llama.cpp on tercet's GGUF export,
* llama.cpp on what its own converter makes of the published directory.

Packed experts are compared bit for bit, and run dequantised: on a CPU llama.cpp multiplies MXFP4 weights with inputs
rounded to eight bits, which is its choice of arithmetic and not a property of the file.

The miniatures have ``rms_norm_eps`` 1e-6, because llama.cpp uses that setting also where the architecture has a fixed
1e-6, and token sequences on which no router is near a tie, because llama.cpp cannot be told which experts to take.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import venv
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from tercet.checkpoint.gguf import export_gguf
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import as_kimi_linear, write_miniature
from tercet.checkpoint.runs import export_checkpoint
from tercet.config import ModelConfig
from tercet.model import CausalLM, Context, Observer
from tercet.ops import Routing
from tercet.presets import tiny_model

VERSION = "0.3.36"
HERE = Path(__file__).parent
TOKENS = 96
TOLERANCE = 1e-4
"""Relative distance of logits that passes: fp32 rounding through a few layers."""
MARGIN = 1e-4
"""Smallest lead of the last chosen expert over the first unchosen one, in units of the score."""


def build(work: Path) -> tuple[Path, Path]:
    """Return the environment's Python and the source tree of llama.cpp, building both if they are absent."""
    python, name = work / "venv" / "bin" / "python", f"llama_cpp_python-{VERSION}"
    archive = work / f"{name}.tar.gz"
    if not python.exists():
        venv.create(work / "venv", with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not archive.exists():
        wanted = [f"llama-cpp-python=={VERSION}", "--no-binary", "llama-cpp-python", "--no-deps", "-d", str(work)]
        subprocess.run([*pip, "download", *wanted], check=True)
    if not (work / name).exists():
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
    if subprocess.run([str(python), "-c", "import llama_cpp"], capture_output=True).returncode:
        print("building llama.cpp, once; this takes some minutes", flush=True)
        environment = os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
        subprocess.run(["nice", "-n", "19", *pip, "install", str(archive)], check=True, env=environment)
    return python, work / name / "vendor" / "llama.cpp"


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


def reference(model: CausalLM) -> tuple[Tensor, Tensor, float]:
    """Return tokens on which no router is near a tie, their fp64 logits, and the smallest lead."""
    model = model.double()
    for seed in range(200):
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        margins = _Margins(model)
        with torch.no_grad():
            logits = model(tokens, Context(observer=margins))
        if margins.smallest > MARGIN:
            return tokens[0], logits[0], margins.smallest
    raise SystemExit("no token sequence without near ties found; lower MARGIN")


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


def compare(name: str, config: ModelConfig, work: Path, python: Path, source: Path) -> bool:
    """Write one miniature, run it three ways, print the distances."""
    folder = work / name
    if not folder.exists():
        write_miniature(folder, LAYOUTS[name], config)
    tokens, expected, margin = reference(load_model(folder, show=False))
    np.save(work / "tokens.npy", tokens.numpy())
    plain = work / f"{name}-plain"
    if not plain.exists():
        export_checkpoint(folder, plain, experts="plain", show=False)
    fine = True
    for published in (folder, plain):
        ours, theirs = (work / f"{published.name}-{writer}.gguf" for writer in ("tercet", "converter"))
        for path in (ours, theirs):
            path.unlink(missing_ok=True)
        export_gguf(published, ours, dtype="F32", show=False)
        subprocess.run([sys.executable, str(HERE / "convert.py"), str(source), str(published), str(theirs)], check=True)
        same = same_tensors(ours, theirs)
        fine &= same
        print(
            f"{published.name:<18} {'all' if same else 'NOT ALL'} tensors of both GGUF files are bit for bit the same"
        )
    for label, path in (("tercet's GGUF", ours), ("llama.cpp's converter", theirs)):
        out = work / "logits.npy"
        subprocess.run(
            [str(python), str(HERE / "logits.py"), str(path), str(work / "tokens.npy"), str(out)], check=True
        )
        distance = relative(np.load(out), expected)
        fine &= distance <= TOLERANCE
        print(f"{name:<12} {label:<22} relative distance to tercet in fp64: {distance:.2e}", flush=True)
    print(f"{name:<12} {TOKENS} tokens, closest routing decision {margin:.1e}")
    return fine


def main() -> int:
    """Build, compare both architectures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/interop"), help="environment, sources, miniatures")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python, source = build(work)
    config = replace(tiny_model(), vocab_size=512, num_layers=6, full_attention_layers=(2, 5), attn_res_block_size=2)
    config = replace(config, rms_norm_eps=1e-6)
    results = [
        compare("k3", config, work, python, source),
        compare("kimi-linear", as_kimi_linear(config), work, python, source),
    ]
    print("agreed" if all(results) else f"BEYOND {TOLERANCE:g}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
