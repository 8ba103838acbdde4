"""Write safetensors shards one tensor at a time, and publish a directory by one rename.

Tensors are ordered as the safetensors library orders them (wide dtypes first, then by name), so a file written here is
byte for byte the file that library would write. Memory holds one tensor, whatever the size of the shard.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.checkpoint.headers import MAX_HEADER_BYTES, METADATA
from tercet.checkpoint.layouts import DTYPE_BYTES, Layout, StoredTensor
from tercet.checkpoint.progress import Advance
from tercet.errors import CheckpointError, StorageError
from tercet.util.files import storage_error, write_json

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_LIBRARY_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64",
    "I64", "U64",
)  # fmt: skip

INDEX_NAME = "model.safetensors.index.json"

Provide = Callable[[StoredTensor], Tensor]
"""Returns the data of a stored tensor, in its dtype and shape."""


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty neighbour of *path* that takes its place when the block ends without an error.

    Raises:
        CheckpointError: *path* exists and is not an empty directory; nothing is ever overwritten.
        StorageError: the disk refused a write; nothing is left behind.
    """
    target = Path(path).absolute()
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointError(f"{target} already exists; choose another directory, or remove it first")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        os.replace(part, target)
        sync_directory(target.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(target, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shard(path: Path, tensors: Sequence[StoredTensor], provide: Provide, advance: Advance) -> None:
    """Write one safetensors file.

    Args:
        path: the new file; its directory is expected to be published by `new_directory`.
        tensors: what it holds, in any order.
        provide: gives the data, one tensor at a time.
        advance: told the bytes of every tensor written.

    Raises:
        StorageError: the disk refused a write.
        CheckpointError: the header would be larger than `read_header` accepts.
    """
    ordered = sorted(tensors, key=lambda tensor: (-_LIBRARY_ORDER.index(tensor.dtype), tensor.name))
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.nbytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors):,} tensors do not fit one file's header; write more shards")
    try:
        with open(path, "xb") as handle:
            handle.write(struct.pack("<Q", len(header)) + header)
            for tensor in ordered:
                handle.write(as_bytes(provide(tensor), tensor))
                advance(tensor.nbytes)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise storage_error(path, error) from error


def as_bytes(data: Tensor, tensor: StoredTensor) -> memoryview:
    """Return *data*'s bytes after checking that it is what the header promises."""
    expected = TORCH_DTYPES[tensor.dtype]
    assert data.dtype == expected and tuple(data.shape) == tensor.shape, (
        f"{tensor.name}: promised {tensor.dtype} {tensor.shape}, got {data.dtype} {tuple(data.shape)}"
    )
    flat = data.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def write_shards(
    directory: Path, chosen: Layout, tensors: Sequence[StoredTensor], provide: Provide, advance: Advance
) -> None:
    """Write all shards and the index into *directory*, shard by shard in the layout's placement."""
    by_shard: dict[int, list[StoredTensor]] = {}
    for tensor in tensors:
        by_shard.setdefault(tensor.shard, []).append(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(sorted(by_shard)):
        name = chosen.shard_name(number, len(by_shard))
        write_shard(directory / name, by_shard[shard], provide, advance)
        weight_map |= {tensor.name: name for tensor in by_shard[shard]}
    total = sum(tensor.nbytes for tensor in tensors)
    write_json(
        directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


assert set(DTYPE_BYTES) == set(TORCH_DTYPES) == set(_LIBRARY_ORDER)
