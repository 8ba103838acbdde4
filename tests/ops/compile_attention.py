"""Compile MLA attention's Gluon kernels for Hopper; print of each its shared memory, products and serial warnings."""

import subprocess
import tempfile

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tercet.ops.attention import hopper
from tercet.ops.attention.gluon_backward import key_kernel
from tercet.ops.attention.gluon_forward import forward_kernel


def tile(rows, width, element="bf16"):
    kind = gl.bfloat16 if element == "bf16" else gl.float32
    return f"tensordesc<{element}[{rows}, {width}],{gl.NVMMASharedLayout.get_default_for([rows, width], kind)!r}>"


def report(kernel, types, constants):
    names = kernel.arg_names
    types = {"kv": "*bf16", "tiles": "*i32", "scale": "fp32"} | types
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, aligned)
    made = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    print(kernel.__name__, made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async"), said.count("serialized"))


report(
    forward_kernel,
    {
        "q_tile": tile(64, 128), "qr_tile": tile(64, 64), "k_tile": tile(128, 128), "v_tile": tile(128, 128),
        "kr_tile": tile(128, 64), "out": "*fp32", "lse": "*fp32", "row_max": "*fp32",
    },
    hopper.WIDTHS | {"M": 128, "N": 128, "STAGES": 2},
)  # fmt: skip
report(
    key_kernel,
    {
        "q_tile": tile(64, 128), "qr_tile": tile(64, 64), "grad_tile": tile(64, 128), "k_tile": tile(64, 128),
        "kr_tile": tile(64, 64), "v_tile": tile(64, 128), "lse_tile": tile(1, 64, "fp32"),
        "delta_tile": tile(1, 64, "fp32"), "pe": "*bf16", "ds": "*bf16", "d_kv": "*bf16",
    },
    hopper.WIDTHS | {"M": 64, "N": 128, "STAGES": 3},
)  # fmt: skip
