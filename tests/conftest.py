"""Shared helpers of the tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: tests run them on the CPU

import pytest
import torch
from hypothesis import settings

# A green run is green again; `make test-slow` searches at random instead.
settings.register_profile("steady", derandomize=True)
settings.register_profile("search")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
