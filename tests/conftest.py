"""Shared helpers of the tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """‖x − ref‖ / ‖ref‖ in fp64 (kernels.md §0, rule 6); 0 for two zeros."""
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    difference, norm = (x - reference).norm(), reference.norm()
    return float(difference / norm) if norm > 0 else float(difference)
