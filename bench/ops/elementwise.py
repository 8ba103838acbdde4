"""SiTU, RMSNorm, gated RMSNorm and the short convolution at the widths of K3 and of the `base` preset."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import Case, compare, gradients

from tercet.ops import gated_rms_norm, rms_norm, short_conv, situ_glu, use_tier

LIMITS = {"out": 5e-3, "gradients": 5e-3}


def cases(device: torch.device) -> list[Case]:
    """Return forward and forward + backward of each, against the torch tier."""
    if device.type != "cuda":
        return _cases(device, 16, 64, 32, 2)
    return _cases(device, 8192, 33_792, 7168, 96) + _cases(device, 32_768, 1024, 512, 8)


def _cases(device: torch.device, tokens: int, inner: int, hidden: int, heads: int) -> list[Case]:

    def rows(*shape):
        return torch.randn(*shape, device=device).bfloat16()

    def conv(x, weight):
        return short_conv(x, weight, tail=False)[0]

    def situ(gate, up):
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def causal(x, weight):
        padded = F.pad(x, (0, 0, weight.shape[2] - 1, 0)).transpose(1, 2)
        return F.silu(F.conv1d(padded, weight, groups=x.shape[2])).transpose(1, 2)

    width = heads * 128
    table = {
        f"SiTU, {tokens} × {inner}": (situ_glu, situ, [rows(tokens, inner), rows(tokens, inner)], 3, 5),
        f"RMSNorm, {tokens} × {hidden}": (
            lambda x, w: rms_norm(x, w, eps=1e-5),
            norm,
            [rows(tokens, hidden), rows(hidden)],
            2,
            3,
        ),
        f"gated RMSNorm, {tokens} × {heads} × 128": (
            lambda x, g, w: gated_rms_norm(x, g, w, eps=1e-5),
            lambda x, g, w: norm(x, w) * g.sigmoid(),
            [rows(tokens, heads, 128), rows(tokens, heads, 128), rows(128)],
            3,
            5,
        ),
        f"short convolution, {tokens} × {width}": (
            conv,
            causal,
            [rows(1, tokens, width), torch.randn(width, 1, 4, device=device)],
            2,
            3,
        ),
    }
    made = []
    for name, (run, formula, inputs, moved, moved_back) in table.items():

        def torch_tier(*x, run=run):
            with use_tier("torch"):
                return run(*x)

        def check(run=run, formula=formula, inputs=inputs):
            few = {
                f"input {n}": x[:, :100] if x.ndim == 3 and x.shape[0] == 1 else x[:100] for n, x in enumerate(inputs)
            }
            few[f"input {len(inputs) - 1}"] = inputs[-1] if inputs[-1].shape != inputs[0].shape else inputs[-1][:100]
            return compare(run, formula, few, LIMITS)

        size = 2 * inputs[0].numel()
        forward = {"torch tier": lambda f=torch_tier, i=inputs: f(*i)}
        made.append(Case(f"{name}, forward", lambda r=run, i=inputs: r(*i), forward, check, moved * size))
        both = {"torch tier": gradients(torch_tier, inputs)}
        made.append(
            Case(f"{name}, forward + backward", gradients(run, inputs), both, bytes=(moved + moved_back) * size)
        )
    return made
