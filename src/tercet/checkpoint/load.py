"""From files into a model: shard by shard, strictly, in the dtype asked for.

    model = load_model("Kimi-Linear-48B-A3B-Instruct", dtype=torch.bfloat16)
    load_weights(model, CheckpointDirectory.open(path))

Peak memory is the model plus the mapped pages of one shard. MXFP4 experts are dequantised on the way; whoever wants
them packed asks `CheckpointDirectory.weight`, which returns them as they are stored.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tercet.checkpoint.convert import check_same_model
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import StoredTensor
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.progress import byte_progress
from tercet.model import CausalLM, to_compute_dtype
from tercet.model.names import published_tensors


def empty_model(directory: CheckpointDirectory, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Return a model with unset weights; the tensors of model.md §12 stay fp32 whatever *dtype*."""
    with torch.device("meta"):
        model = to_compute_dtype(CausalLM(directory.model), dtype)
    return model.to_empty(device=device)


def load_model(
    path: str | Path | CheckpointDirectory,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    show: bool | None = None,
) -> CausalLM:
    """Open a published checkpoint or a training run as a model.

    Args:
        path: a directory as `CheckpointDirectory.open` takes it, or one already open.
        dtype: dtype of the matrices.
        device: where they go.
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError, ConfigError: see `CheckpointDirectory.open`.
    """
    directory = path if isinstance(path, CheckpointDirectory) else CheckpointDirectory.open(path)
    model = empty_model(directory, dtype, device)
    load_weights(model, directory, show=show)
    return model.eval()


@torch.no_grad()
def load_weights(model: CausalLM, directory: CheckpointDirectory, *, show: bool | None = None) -> None:
    """Copy all weights into *model*, in the order in which files hold them.

    Raises:
        CheckpointError: the directory belongs to another architecture, or repeats its head with other bytes.
    """
    check_same_model(model.config, directory.model, str(directory.path))
    directory.check_copies()
    targets = dict(published_tensors(model))
    wanted = [tensor for tensor in directory.in_file_order() if tensor.weight is not None and tensor.part != "scale"]
    total = sum(directory.entries[tensor.name].nbytes for tensor in wanted)
    with byte_progress(f"loading {directory.path.name}", total, show) as advance:
        for tensor in wanted:
            _load(targets, directory, tensor)
            advance(directory.entries[tensor.name].nbytes)


def _load(targets: dict[str, Tensor], directory: CheckpointDirectory, tensor: StoredTensor) -> None:
    assert tensor.weight is not None
    target, value = targets[tensor.weight.name].data, directory.weight(tensor.weight)
    if isinstance(value, PackedWeight):
        exact = target.dtype if target.dtype in (torch.float32, torch.bfloat16, torch.float64) else torch.float32
        value = value.decode(exact)
    target.copy_(value)
