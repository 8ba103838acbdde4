"""Pytest plugin of `make test-gpu`: kernels compile, and tensors are made on the device by default."""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is imported

import torch

torch.set_default_device("cuda")
_Generator = torch.Generator


class _OnDevice:
    """Makes generators of the default device, as the tensors they fill."""

    def __new__(cls, device="cuda"):
        return _Generator(device)


torch.Generator = _OnDevice
