"""safetensors headers that lie, and headers that are noise."""

import contextlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tercet.checkpoint import headers
from tercet.checkpoint.headers import parse_json, read_header, read_json
from tercet.checkpoint.layouts import StoredTensor
from tercet.checkpoint.writer import TORCH_DTYPES, write_shard
from tercet.errors import CheckpointError


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def write(path: Path, table: Any, data: bytes = bytes(8), length: int | None = None) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b.c": torch.arange(7), "empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: (e.dtype, e.shape, e.nbytes) for name, e in header.entries.items()} == {
        "a": ("F32", (3, 5), 60),
        "b.c": ("I64", (7,), 56),
        "empty": ("F32", (0, 4), 0),
        "scalar": ("F32", (), 4),
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": entry(offsets=[0, 16])}, "truncated file or lying header"),
        ({"a": entry(offsets=[8, 0])}, "before it begins"),
        ({"a": entry(offsets=[0, 2**63])}, "2^63"),
        ({"a": entry(offsets=[-8, 0])}, "2^63"),
        ({"a": entry(offsets=[0.0, 8.0])}, "2^63"),
        ({"a": entry(offsets=[0, 8, 8])}, "two numbers"),
        ({"a": entry(shape=[2**63])}, "2^63"),
        ({"a": entry(shape=[2**62, 2**62])}, "but its offsets span 8"),
        ({"a": entry(shape=[-2])}, "2^63"),
        ({"a": entry(shape=[True, 2])}, "2^63"),
        ({"a": entry(shape=[1] * 17)}, "up to 16"),
        ({"a": entry(shape="2")}, "shape"),
        ({"a": entry(shape=[3])}, "12 bytes, but its offsets span 8"),
        ({"a": entry(dtype="F33")}, "unknown dtype 'F33'"),
        ({"a": entry(dtype=None)}, "unknown dtype None"),
        ({"a": entry(dtype="F64")}, "16 bytes"),
        ({"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[2], offsets=[0, 8])}, "overlaps"),
        ({"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[1], offsets=[0, 4])}, "overlaps"),
        ({"a": entry(shape=[1], offsets=[4, 8])}, "gap"),
        ({"a": entry(shape=[1], offsets=[0, 4])}, "end at"),
        ({}, "end at"),
        ({"a": entry(surprise=1)}, "exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32"}}, "exactly"),
        ({"a": 7}, "exactly"),
        ({"__metadata__": {"format": 1}}, "strings"),
        ([], "not an object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": {}}', "names 'a' twice"),
    ],
)
def test_lies_are_refused(tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_header(write(tmp_path / "x.safetensors", table))
    assert message in str(error.value)
    assert "x.safetensors" in str(error.value)


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="claims a header of 18,446,744,073,709,551,615 bytes"):
        read_header(write(path, {}, length=2**64 - 1))
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(write(path, {}, length=1000))
    path.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="at least 8"):
        read_header(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path)


def test_oversized_index_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.json").write_text("{" + " " * 100 + "}")
    monkeypatch.setattr(headers, "MAX_INDEX_BYTES", 64)
    with pytest.raises(CheckpointError, match="not believed"):
        read_json(tmp_path / "index.json")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = save({"a": torch.randn(2, 2), "b": torch.arange(3)})
    path = tmp_path / "x.safetensors"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="end at"):
        read_header(path)


def check_consistent(path: Path) -> None:
    """A header that is accepted describes the file exactly, and the library agrees with it."""
    header = read_header(path)
    covered = sorted((e.start, e.start + e.nbytes) for e in header.entries.values() if e.nbytes)
    for (_, end), (start, _) in itertools.pairwise(covered):
        assert end == start
    assert not covered or covered[-1][1] == path.stat().st_size
    with safetensors.safe_open(path, "pt") as library:
        names = set(library.keys())
        assert names == set(header.entries)
        for name in names:
            assert tuple(library.get_slice(name).get_shape()) == header.entries[name].shape


VALID = save({"a": torch.randn(2, 3), "b.weight": torch.arange(4, dtype=torch.uint8), "c": torch.zeros(1, 0)})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_files_are_refused_or_understood(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=3))
        content[position : position + data.draw(st.integers(0, 4))] = piece
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(bytes(content))
    try:
        read_header(path)
    except CheckpointError:
        return
    check_consistent(path)


NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64]), st.booleans(), st.floats())
FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "I64", "X", "", None]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=4), FIELDS, max_size=3), st.integers(0, 40))
def test_generated_tables_are_refused_or_understood(tmp_path: Path, table: dict[str, Any], size: int) -> None:
    path = write(tmp_path / "fuzz.safetensors", table, bytes(size))
    try:
        read_header(path)
    except CheckpointError:
        return
    check_consistent(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_parse_or_raise(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        parse_json(data, "noise")


@pytest.mark.parametrize("seed", range(3))
def test_writes_what_the_library_writes(tmp_path: Path, seed: int) -> None:
    """Our streamed file is byte for byte the library's, whatever the dtypes and names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for n, dtype in enumerate(TORCH_DTYPES.values()):
        shape = tuple(torch.randint(0, 4, (n % 4,), generator=generator).tolist())
        tensors[f"layer.{n}.é{seed}"] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    stored = [StoredTensor(name, names[x.dtype], tuple(x.shape), 0, "", None) for name, x in tensors.items()]
    write_shard(tmp_path / "own.safetensors", stored, lambda tensor: tensors[tensor.name], lambda nbytes: None)
    assert (tmp_path / "own.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
