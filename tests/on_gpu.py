"""Pytest plugin of `make test-gpu`: kernels compile, and tensors are made on the device by default."""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is imported

import torch

torch.set_default_device("cuda")
_Generator = torch.Generator
torch.Generator = lambda device="cuda": _Generator(device)  # type: ignore[misc,assignment]
