"""Where a model runs."""

from __future__ import annotations

import torch

from tercet.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device called *name*; ``auto`` is the GPU if there is one, else the CPU.

    Raises:
        ConfigError: this machine does not offer it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"this machine does not offer the device {name!r}: {reason}; use cpu, cuda or auto"
        ) from error
    return device
