"""Every kernel compiles for every kind of GPU there is code for, and fits its memories; this needs no GPU.

In another process, because kernels here are interpreted; see `compile_kernels`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

TARGETS = [
    "sm_90",
    *(pytest.param(target, marks=pytest.mark.slow) for target in ("sm_80", "sm_86", "sm_100", "sm_120", "gfx942")),
]

HOPPER = {
    "attention.gluon_backward.key_kernel",
    "attention.gluon_forward.forward_kernel",
    "attention.triton_products.key_product",
    "attention.triton_products.prepare_kernel",
    "attention.triton_products.query_product",
    "experts.gluon_weights.weight_gradient_kernel",
}
"""Kernels for Hopper alone."""
PRODUCTS = {
    "attention.gluon_backward.key_kernel": 2 * 3 * 8,
    "attention.gluon_forward.forward_kernel": 2 * 3 * 8,
    "experts.gluon_weights.weight_gradient_kernel": 2 * 8,
}
"""Tensor-core instructions in a Gluon kernel at least: both groups of warps issue products of their own."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target):
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script, target], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["failures"] == {}
    assert set(said["never"]) == (set() if target == "sm_90" else HOPPER)  # nothing is left out above
    assert set(said["kernels"]) == set(said["all"]) - set(said["never"])
    gluon = {name: kernel for name, kernel in said["kernels"].items() if "gluon" in name}
    assert set(gluon) == (set(PRODUCTS) if target == "sm_90" else set())
    for name, kernel in gluon.items():
        assert kernel["products"] >= PRODUCTS[name]
        assert kernel["serialized"] == 0  # and ptxas lets them overlap
