"""Compile every kernel for one kind of GPU, which needs none: ``python compile_kernels.py sm_90``.

Operators run forward and backward on small tensors of a CPU that is taken for the GPU named; what they launch is
compiled and not run, so numbers mean nothing here. As on the GPU, a kernel that wants more shared memory than there is
is refused. Prints JSON: per kernel the most shared memory and, of Gluon kernels, what ptxas says of their products;
the cases that failed, and the kernels that nothing launched.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

name = sys.argv[1]
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
TENSOR_MEMORY = 512
amd = name.startswith("gfx")
TARGET = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name[3:]), 32)
if amd:
    torch.version.hip = "of a GPU to compile for"


class Driver:
    """The little of a driver that compiling asks for."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(Driver())

from tercet import ops  # noqa: E402
from tercet.ops import gpu, registry  # noqa: E402

FOUND = gpu.Chip(multiprocessors=100, shared_memory=SHARED[name] << 10, generation=0 if amd else int(name[3:]) // 10)
gpu.chip = lambda device: FOUND  # before the modules that use it are imported
gpu.GLUON_VERSIONS = (".".join(triton.__version__.split(".")[:2]),)
registry._gpu = lambda args: torch.device("cpu")  # which is the GPU
torch.nn.functional.grouped_mm = lambda left, right, offs: left.new_zeros(len(offs), left.shape[0], right.shape[1])

launched, launch = {}, JITFunction.run


def compiled(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    entry = launched.setdefault(self.fn, {"shared": 0} | _products(self, kernel))
    shared, tensor_memory = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0
    if shared > FOUND.shared_memory:
        raise OutOfResources(shared, FOUND.shared_memory, "shared memory")
    if tensor_memory > TENSOR_MEMORY:
        raise OutOfResources(tensor_memory, TENSOR_MEMORY, "tensor memory")
    entry["shared"] = max(entry["shared"], shared)
    return kernel


def _products(function, kernel):
    """Count a Gluon kernel's tensor-core instructions, and warnings that ptxas runs them one by one."""
    if not isinstance(function, GluonJITFunction):
        return {}
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"products": kernel.asm["ptx"].count("wgmma.mma_async"), "serialized": said.count("serialized")}


JITFunction.run = compiled

BF16, FP32 = torch.bfloat16, torch.float32
T = 64
BOUNDS = torch.tensor([0, 40, 64], dtype=torch.int32)


def leaf(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype).requires_grad_()


def pulled(result):
    """Run the backward pass of every tensor in *result* that has one."""
    tensors = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor)]
    outputs = [x for x in tensors if x.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])


def kda_rows(dtype=BF16, heads=2, width=128):
    wide = [leaf(1, T, heads, width, dtype=dtype) for _ in "qkvz"]
    return [*wide, leaf(1, T, heads, dtype=dtype), leaf(heads, dtype=FP32), leaf(heads, width, dtype=FP32)]


def kda(dtype=BF16, floor=-5.0, with_state=True, pieces=0):
    from tercet.ops.kda.triton_plan import use_pieces

    state = leaf(2, 2, 128, 128, dtype=FP32) if with_state else None
    with use_pieces(pieces):
        pulled(ops.fused_kda(*kda_rows(dtype), cu_seqlens=BOUNDS, state=state, lower_bound=floor))


def kda_slices(dtype=BF16):
    q, k, v, *rest = (x.detach() for x in kda_rows(dtype))
    ops.fused_kda_fold(k, v, *rest, cu_seqlens=BOUNDS)
    ops.fused_kda_adjoint(v, q, k, *rest, cu_seqlens=BOUNDS)
    ops.fused_kda_export(q, k, v, *rest, exports=[(0, 16)], cu_seqlens=BOUNDS)


def decode(window, dtype=BF16, floor=-5.0):
    heads, width, ids = 2, 128, torch.tensor([0, 1], dtype=torch.int32)
    wide = [torch.randn(2, window, heads, width).to(dtype) for _ in range(5)]
    ops.kda_decode(
        *wide[:4], torch.randn(2, window, heads).to(dtype), wide[4],
        conv_weights=tuple(torch.randn(heads * width, 1, 4) for _ in "qkv"), A_log=torch.randn(heads),
        dt_bias=torch.randn(heads, width), norm_weight=torch.randn(width), state=torch.zeros(3, heads, width, width),
        conv_state=torch.zeros(3, 3, 3, heads, width).to(dtype), slots=ids, commits=ids if window > 1 else None,
        lower_bound=floor,
    )  # fmt: skip


def mixing(width, dtype=BF16, sources=3):
    rows, weights = [leaf(1, T, width, dtype=dtype) for _ in range(sources)], [leaf(width, dtype=dtype) for _ in "abc"]
    pulled(ops.attn_res(rows, *weights[:2]))
    out, handed = ops.attn_res_read(rows, *weights)
    pulled([out, *handed])
    with torch.no_grad():
        partial = ops.attn_res_bank(rows, torch.randn(24, width))
        ops.attn_res_merge(partial, 0, rows[0], torch.randn(width))


def experts(tokens, dtype=BF16, latent=512, inner=512, number=4, activation="situ"):
    chosen = torch.rand(tokens, number).argsort(1)[:, :2]
    weights = [leaf(number, *s, dtype=dtype) for s in ((inner, latent), (latent, inner), (inner, latent))]
    share = leaf(tokens, 2, dtype=FP32)
    pulled(ops.routed_experts(leaf(tokens, latent, dtype=dtype), share, chosen, *weights, activation=activation))


def routing(number, top_k):
    pulled(ops.router_logits(leaf(T, 512), leaf(number, 512, dtype=FP32)))
    routed = ops.route(leaf(T, number, dtype=FP32), torch.zeros(number), top_k=top_k)
    pulled(routed.weights)
    histogram = torch.zeros(number, 100, dtype=torch.int32)
    edges = {"lowest": torch.tensor(-1.0), "width": torch.tensor(0.02)}
    ops.count_needed(histogram, routed.scores.detach(), routed.cutoff.detach(), **edges)
    ops.count_choices(torch.zeros(number, dtype=torch.int64), torch.zeros(T, top_k, dtype=torch.int64))


def attention(dtype=BF16):
    rows = leaf(1, T, 2, 192, dtype=dtype), leaf(1, T, 2, 256, dtype=dtype), leaf(1, T, 64, dtype=dtype)
    o, _ = ops.mla_attention(*rows, scale=0.1, cu_seqlens=BOUNDS)
    pulled(ops.sigmoid_gate(o, leaf(1, T, 256, dtype=dtype), dtype=dtype))


def attention_on_triton():
    """Run the kernels behind the Gluon ones, which need as much."""
    from tercet.ops.attention import hopper

    takes, hopper.takes = hopper.takes, lambda *args: False
    attention()
    hopper.takes = takes


def elementwise(dtype):
    pulled(ops.situ_glu(leaf(T, 512, dtype=dtype), leaf(T, 512, dtype=dtype)))
    for width in (512, 7168):
        pulled(ops.rms_norm(leaf(T, width, dtype=dtype), leaf(width, dtype=dtype), eps=1e-5))
    gated = leaf(T, 8, 128, dtype=dtype), leaf(T, 8, 128, dtype=dtype), leaf(128, dtype=dtype)
    pulled(ops.gated_rms_norm(*gated, eps=1e-5))
    weight, state = leaf(1024, 1, 4, dtype=FP32), torch.zeros(2, 3, 1024, dtype=dtype)
    pulled(ops.short_conv(leaf(1, T, 1024, dtype=dtype), weight, cu_seqlens=BOUNDS, tail=False))
    pulled(ops.short_conv(leaf(1, T, 1024, dtype=dtype), weight, state=state, cu_seqlens=BOUNDS))
    ops.accumulate([torch.zeros(4096)], [torch.zeros(4096).to(dtype)])


def head(dtype):
    targets = torch.randint(4096, (T,))
    pulled(ops.linear_cross_entropy(leaf(T, 64, dtype=dtype), leaf(4096, 64, dtype=dtype), targets, torch.ones(T))[0])
    pulled(ops.token_logprobs(leaf(T, 64, dtype=dtype), leaf(4096, 64, dtype=dtype), targets))


def newton_schulz(rows, columns, dtype):
    from tercet.ops.newton_schulz import COEFFICIENTS, triton_

    triton_.call(torch.randn(4, rows, columns).to(dtype), coefficients=COEFFICIENTS["quintic"], dtype=BF16)


CASES = {
    **{f"KDA {x}": (lambda x=x: kda(x)) for x in (BF16, FP32)},
    "KDA without states": lambda: kda(with_state=False),
    "KDA softplus": lambda: kda(floor=None),
    **{f"KDA in pieces {x}": (lambda x=x: kda(x, pieces=2)) for x in (BF16, FP32)},
    "KDA slices": kda_slices,
    **{f"decode {w} {x}": (lambda w=w, x=x: decode(w, x)) for w in (1, 4) for x in (BF16, FP32)},
    "decode softplus": lambda: decode(1, floor=None),
    **{f"AttnRes {w} {x}": (lambda w=w, x=x: mixing(w, x)) for w in (1024, 7168) for x in (BF16, FP32)},
    "AttnRes of 12": lambda: mixing(7168, sources=12),
    **{f"experts {n} {x}": (lambda n=n, x=x: experts(n, x)) for n in (8, 100, 400) for x in (BF16, FP32)},
    "experts, deep": lambda: experts(400, latent=3584, inner=3072),
    "experts, many rows": lambda: experts(2000),
    "experts, odd widths": lambda: experts(100, latent=88, inner=72, activation="silu"),
    **{f"routing {n}": (lambda n=n, k=k: routing(n, k)) for n, k in ((64, 6), (896, 16))},
    **{f"attention {x}": (lambda x=x: attention(x)) for x in (BF16, FP32)},
    "attention without Gluon": attention_on_triton,
    **{f"element-wise {x}": (lambda x=x: elementwise(x)) for x in (BF16, FP32)},
    **{f"head {x}": (lambda x=x: head(x)) for x in (BF16, FP32)},
    **{
        f"Newton–Schulz {r} × {c} {x}": (lambda r=r, c=c, x=x: newton_schulz(r, c, x))
        for r, c, x in ((128, 512, BF16), (64, 512, FP32), (512, 512, FP32), (256, 2048, BF16))
    },
}


def kernels():
    """Return all functions of the package that Triton compiles and no other such function calls."""
    found = {}
    for module in pkgutil.walk_packages(ops.__path__, "tercet.ops."):
        if "triton" in module.name or "gluon" in module.name:
            for thing in vars(importlib.import_module(module.name)).values():
                thing = thing.kernel if isinstance(thing, gpu.Fitted) else thing
                if isinstance(thing, JITFunction):
                    found[thing.fn] = thing
    called = set()
    for fn, thing in found.items():
        named = {node.id for node in ast.walk(thing.parse()) if isinstance(node, ast.Name)}
        inner = (fn.__globals__.get(name) for name in named)
        called.update(getattr(other, "fn", None) for other in inner)
    return [fn for fn in found if fn not in called]


def key(fn):
    return f"{fn.__module__.removeprefix('tercet.ops.')}.{fn.__name__}"


failures = {}
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as cache, ops.use_tier("triton"):
    os.environ["TRITON_CACHE_DIR"] = cache
    for case, run in CASES.items():
        print(case, file=sys.stderr, flush=True)
        try:
            run()
        except Exception as error:
            failures[case] = f"{type(error).__name__}: {error}"
every = {key(fn): fn for fn in kernels()}
report = {
    "kernels": {key(fn): entry for fn, entry in launched.items()},
    "failures": failures,
    "all": sorted(every),
    "never": sorted(name for name, fn in every.items() if fn not in launched),
}
print(json.dumps(report))
