"""What a step counts and sums beside its products: gradients of experts, loads, the histogram of needed biases."""

from __future__ import annotations

import torch
from harness import Case, relative_error

from tercet.ops import accumulate, count_choices, count_needed, use_tier


def cases(device: torch.device) -> list[Case]:
    """Return the sums and counts of one micro-batch of `base`."""
    big = device.type == "cuda"
    return [_gradients(device, 48 if big else 2, (64, 512, 512) if big else (4, 8, 8)), _counts(device, big)]


def _gradients(device: torch.device, count: int, shape: tuple[int, ...]) -> Case:
    totals = [torch.randn(shape, device=device) for _ in range(count)]
    parts = [torch.randn(shape, device=device).bfloat16() for _ in range(count)]

    def plain():
        for total, part in zip(totals, parts):
            total.add_(part)

    def check():
        total = totals[0].clone()
        accumulate([total], [parts[0]])
        return {"sum": (relative_error(total, totals[0].double() + parts[0].double()), 1e-6)}

    name = f"{count} gradients of {'×'.join(map(str, shape))} into fp32"
    size = 10 * sum(total.numel() for total in totals)
    return Case(name, lambda: accumulate(totals, parts), {"add_ for each": plain}, check, size)


def _counts(device: torch.device, big: bool) -> Case:
    tokens, experts, k, bins = (32_768, 64, 6, 1000) if big else (40, 6, 2, 10)
    scores = torch.rand(tokens, experts, device=device)
    cutoff, chosen = scores.topk(k + 1).values[:, k], scores.topk(k).indices
    histogram = torch.zeros(experts, bins, dtype=torch.int32, device=device)
    loads = torch.zeros(experts, dtype=torch.int64, device=device)
    edges = {"lowest": torch.tensor(-1.0, device=device), "width": torch.tensor(2.0 / bins, device=device)}

    def count(histogram=histogram, loads=loads):
        count_needed(histogram, scores, cutoff, **edges)
        count_choices(loads, chosen)

    def plain(histogram=histogram, loads=loads):
        with use_tier("reference"):
            count(histogram, loads)

    def check():
        ours, formula = ([torch.zeros_like(x) for x in (histogram, loads)] for _ in range(2))
        count(*ours)
        plain(*formula)
        return {name: (relative_error(a, b), 1e-9) for name, a, b in zip(("histogram", "loads"), ours, formula)}

    name = f"balancing counts, {tokens} × {experts}, {k} chosen, {bins} bins"
    return Case(name, count, {"PyTorch": plain}, check, bytes=4 * scores.numel() + 8 * chosen.numel())
