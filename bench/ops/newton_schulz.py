"""Newton–Schulz of 96 heads of 128 × 7168."""

from __future__ import annotations

import torch
from harness import Case, relative_error

from tercet.ops import newton_schulz, use_tier
from tercet.ops.newton_schulz import COEFFICIENTS, reference


def cases(device: torch.device) -> list[Case]:
    """Return bf16 and fp32 momenta."""
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
