"""Newton–Schulz of 96 heads of 128 × 7168, and of stacks of experts: 512 × 512 (`base`) and 3072 × 3584 (K3)."""

from __future__ import annotations

import torch
from harness import Case, relative_error

from tercet.ops import newton_schulz, use_tier
from tercet.ops.newton_schulz import COEFFICIENTS, reference


def cases(device: torch.device) -> list[Case]:
    """Return heads with bf16 and fp32 momenta, experts with fp32 ones."""
    stacks = ((256, 512, 512), (24, 3072, 3584)) if device.type == "cuda" else ((2, 136, 144),)
    return [*_heads(device), *(_experts(device, *shape) for shape in stacks)]


def _experts(device: torch.device, count: int, rows: int, columns: int) -> Case:
    """Blocks that are iterated by whole products; the plain loop sets the error that is allowed."""
    blocks = torch.randn(count, rows, columns, device=device)

    def loop(blocks=blocks):
        with use_tier("reference"):
            return newton_schulz(blocks)

    def check():
        few = blocks[:2]
        exact = reference.newton_schulz(few.double(), coefficients=COEFFICIENTS["quintic"], dtype=torch.float64)
        return {"out": (relative_error(newton_schulz(few), exact), 1.1 * relative_error(loop(few), exact))}

    flops = 10.0 * count * rows * rows * (2 * columns + rows)
    name = f"Newton–Schulz {count}×({rows}×{columns}) float32"
    return Case(name, lambda: newton_schulz(blocks), {"bf16 loop": loop}, check, 6 * blocks.numel(), flops)


def _heads(device: torch.device) -> list[Case]:
    count, rows, columns = (96, 128, 7168) if device.type == "cuda" else (2, 16, 64)
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        blocks = torch.randn(count, rows, columns, device=device).to(dtype)

        def loop(blocks=blocks):
            with use_tier("reference"):
                return newton_schulz(blocks)

        def check(blocks=blocks, dtype=dtype):
            spike = 300 * torch.randn(1, rows, 1, device=device) * torch.randn(1, 1, columns, device=device)
            hard = blocks[:1].float() + spike
            errors = {}
            for name, x in (("random", blocks[:4]), ("one singular value 1e4 above", hard.to(dtype))):
                exact = x.bfloat16() if device.type == "cuda" else x
                expected = reference.newton_schulz(
                    exact.double(), coefficients=COEFFICIENTS["quintic"], dtype=torch.float64
                )
                errors[name] = (relative_error(newton_schulz(x), expected), 1e-2)
            return errors

        name = f"Newton–Schulz {count}×({rows}×{columns}) {str(dtype).removeprefix('torch.')}"
        size = blocks.numel() * (2 * blocks.element_size() + 2)
        gram = count * 4 * rows**2 * columns
        made.append(Case(name, lambda b=blocks: newton_schulz(b), {"bf16 loop": loop}, check, size, gram, graph=True))
    return made
