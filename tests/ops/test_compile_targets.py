"""Every kernel compiles for every kind of GPU there is code for, and fits its memories; this needs no GPU.

In another process, because kernels here are interpreted; see `compile_kernels`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

TARGETS = [
    "sm_90",
    *(pytest.param(target, marks=pytest.mark.slow) for target in ("sm_80", "sm_86", "sm_100", "sm_120", "gfx942")),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target):
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script, target], env=os.environ, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["failures"] == {}
    assert said["never"] == []  # no kernel is left out above
    gluon = {name: kernel for name, kernel in said["kernels"].items() if "gluon" in name}
    assert len(gluon) == (3 if target == "sm_90" else 0)
    for kernel in gluon.values():
        assert kernel["products"] >= 2 * 8  # both groups of warps issue products of their own
        assert kernel["serialized"] == 0  # and ptxas lets them overlap
