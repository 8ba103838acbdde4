"""Files of a checkpoint written by an enemy: configuration, index, links, pipes, holes. Refused in one clear error.

Each fuzz test runs briefly here and for long under ``-m slow``.
"""

import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fuzzing import longer
from tercet.checkpoint.directory import CheckpointDirectory, read_headers
from tercet.checkpoint.headers import MAX_HEADER_BYTES, parse_json, read_header, read_json
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.miniature import write_miniature
from tercet.checkpoint.published_config import read_config, write_config
from tercet.checkpoint.runs import export_checkpoint
from tercet.checkpoint.writer import INDEX_NAME
from tercet.errors import CheckpointError, ConfigError
from tests.checkpoint.miniatures import MINIATURE, editable, published
from tests.checkpoint.test_headers import FIELDS, VALID, check_consistent, write

NAMES = pytest.mark.parametrize("name", ["k3", "kimi-linear"])
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**63, 10**400, -(2**63), 1e308, -0.0, 1e-400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside *data*."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def mutate(data: Any, draw: st.DataObject) -> Any:
    """Replace, remove or rename a few values."""
    data = copy.deepcopy(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        paths = places(data)
        if not paths:
            break
        *parents, last = draw.draw(st.sampled_from(paths))
        holder = data
        for key in parents:
            holder = holder[key]
        if isinstance(holder, dict) and draw.draw(st.booleans()):
            value = holder.pop(last)
            if draw.draw(st.booleans()):
                holder[draw.draw(st.sampled_from([str(last) + "_", "num_experts", "n_group", "layer_types"]))] = value
        else:
            holder[last] = draw.draw(anything)
    return data


@NAMES
@QUICK
@given(st.data())
def test_any_configuration_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """What is read is a model that can be written again and reads the same; nothing else than our errors is raised."""
    chosen = mutate(json.loads((published(name) / "config.json").read_text()), data)
    try:
        found = read_config(parse_json(json.dumps(chosen).encode(), "config.json"))
    except (CheckpointError, ConfigError):
        return
    again = write_config(found.layout, found.model, found.vision)
    assert read_config(json.loads(json.dumps(again))).model == found.model


@QUICK
@given(st.data())
def test_any_configuration_beside_weights_is_opened_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """A configuration that asks for other, more or endless tensors ends in an error, soon, and never in a crash."""
    directory = tmp_path / "k3"
    if not directory.exists():
        editable("k3", tmp_path)
    original = json.loads((published("k3") / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(mutate(original, data)))
    try:
        opened = CheckpointDirectory.open(directory)
    except (CheckpointError, ConfigError):
        return
    assert opened.model.num_layers == MINIATURE.num_layers


test_any_configuration_for_long = NAMES(longer(test_any_configuration_is_read_or_refused, st.data()))
test_any_configuration_beside_weights_for_long = longer(
    test_any_configuration_beside_weights_is_opened_or_refused, st.data(), examples=5_000
)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 2**31 - 1), ("num_experts", 10**9), ("rms_norm_eps", float("inf")), ("hidden_size", 2**63)],
)
def test_bombs_in_a_configuration(tmp_path: Path, key: str, value: Any) -> None:
    """A number that would make a list of billions of tensors is refused before any list is made."""
    directory = editable("k3", tmp_path)
    text = (directory / "config.json").read_text()
    config = json.loads(text)
    config["text_config"][key] = value
    (directory / "config.json").write_text(json.dumps(config).replace("Infinity", "1e999"))
    with pytest.raises(ConfigError, match=r"beyond|not believed|name 4 layers"):
        CheckpointDirectory.open(directory)
    config = json.loads(text)
    config["vision_config"]["vt_num_hidden_layers"] = 2**30
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vt_num_hidden_layers must be a positive number below"):
        CheckpointDirectory.open(directory)


FILES = st.one_of(
    st.sampled_from(
        ["a.safetensors", "b.safetensors", "../secret.safetensors", "link.safetensors", "loop.safetensors"]
    ),
    st.sampled_from(["folder.safetensors", "/etc/hostname", "a.safetensors/", "\0", "", "c" * 300 + ".safetensors"]),
    st.text(max_size=8),
    anything,
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a directory of two shards, among traps, with a secret beside it."""
    folder = tmp_path / "d"
    folder.mkdir()
    save_file({"x": torch.zeros(2), "y": torch.zeros(3)}, folder / "a.safetensors")
    save_file({"z": torch.zeros(1)}, folder / "b.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "folder.safetensors").mkdir()
    return folder


@QUICK
@given(
    st.dictionaries(st.sampled_from(["x", "y", "z", "w", ""]) | st.text(max_size=3), FILES, max_size=4),
    st.one_of(st.none(), st.just({"total_size": 24}), anything),
    st.binary(max_size=3),
    st.integers(0, 200),
)
def test_any_index_is_read_or_refused(
    shards: Path, weight_map: dict[str, Any], metadata: Any, noise: bytes, at: int
) -> None:
    """Whatever is read lies in the directory and is what the headers say."""
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    at = min(at, len(text))
    (shards / INDEX_NAME).write_bytes(text[:at] + noise + text[at + len(noise) // 2 :])
    try:
        headers = read_headers(shards)
    except CheckpointError:
        return
    assert {header.path.parent for header in headers.values()} == {shards}
    names = {name: file for file, header in headers.items() for name in header.entries}
    assert names == read_json(shards / INDEX_NAME)["weight_map"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}',
        b'{"weight_map": {"x": "a.safetensors"}, "metadata": {"total_size": NaN}}',
        b'{"weight_map": {"x": "a.safetensors"}, "metadata": {"total_size": -Infinity}}',
        b'{"weight_map": {"\xff": "a.safetensors"}}',
        b'{"weight_map": ' * 50_000,
        b'{"weight_map": {"x": ' + b"[" * 50_000,
        b'{"weight_map": {"x": "a.safetensors", "y": "loop.safetensors"}}',
        b'{"weight_map": {"x": "a.safetensors", "y": "folder.safetensors"}}',
        b'{"weight_map": {"x": "a.safetensors", "y": "pipe.safetensors"}}',
        b'{"weight_map": {"x": "a.safetensors", "y": "zero.safetensors"}}',
        b'{"weight_map": {"x": "..\\\\secret.safetensors"}}',
        b'{"weight_map": {"x": "a.safetensors"}}',
    ],
)
def test_traps_around_an_index(shards: Path, text: bytes) -> None:
    """Twice, no number, no text, too deep; a link to itself, a folder, a pipe that would never end, a device."""
    os.mkfifo(shards / "pipe.safetensors")
    (shards / "zero.safetensors").symlink_to("/dev/zero")
    (shards / INDEX_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}|safetensors"):
        read_headers(shards)


def test_a_configuration_that_is_a_pipe(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    with pytest.raises(CheckpointError, match=r"no config\.json|not a plain file"):
        CheckpointDirectory.open(directory)


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    """Hub caches are folders of links into a store of blobs; they open, and nothing in the store is changed."""
    store, links = editable("k3", tmp_path), tmp_path / "snapshot"
    links.mkdir()
    for file in store.iterdir():
        (links / file.name).symlink_to(file)
    before = {file.name: file.read_bytes() for file in store.iterdir()}
    export_checkpoint(links, tmp_path / "out")
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert {file.name: file.read_bytes() for file in store.iterdir()} == before


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """An output that is a link, to something or to nothing, is refused, never followed or replaced."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("x")
    for target in ("precious", "nowhere"):
        (tmp_path / "out").symlink_to(tmp_path / target)
        with pytest.raises(CheckpointError, match=r"out.* already exists"):
            write_miniature(tmp_path / "out", LAYOUTS["k3"], MINIATURE)
        (tmp_path / "out").unlink()
    assert os.listdir(tmp_path) == ["precious"]
    assert os.listdir(tmp_path / "precious") == ["x"]


def test_a_file_of_holes_with_a_huge_header(tmp_path: Path) -> None:
    """Header lengths that the file really has, and that would fill the memory: refused from eight bytes."""
    path = tmp_path / "x.safetensors"
    for length in (MAX_HEADER_BYTES + 1, 2**40):
        with open(path, "wb") as handle:
            handle.write(struct.pack("<Q", length))
            handle.truncate(8 + length)
        with pytest.raises(CheckpointError, match="the limit is"):
            read_header(path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 1_000_000,
        b'{"a":{"dtype":"F32","shape":[' + b"0," * 500_000 + b'0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 4_000 + b'],"data_offsets":[0,8]}}',
        b'{"__metadata__":{' + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}}",
        b'{"' + b"a" * 1_000_000 + b'":1}',
    ],
)
def test_zip_bombs(tmp_path: Path, text: bytes) -> None:
    """Deep, wide, long: the error names the file and stays readable."""
    with pytest.raises(CheckpointError) as error:
        read_header(write(tmp_path / "x.safetensors", text))
    assert "x.safetensors" in str(error.value)


@QUICK
@given(st.data())
def test_spliced_files_are_refused_or_understood(tmp_path: Path, data: st.DataObject) -> None:
    """Pieces of a valid file moved, repeated and dropped, lengths kept in step so that deeper checks are reached."""
    (length,) = struct.unpack("<Q", VALID[:8])
    header, body = bytearray(VALID[8 : 8 + length]), VALID[8 + length :]
    for _ in range(data.draw(st.integers(1, 3))):
        start, size = data.draw(st.integers(0, len(header) - 1)), data.draw(st.integers(0, 12))
        piece = header[start : start + size]
        at = data.draw(st.integers(0, len(header)))
        header[at : at + data.draw(st.sampled_from([0, size]))] = piece
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + bytes(header) + body[: data.draw(st.integers(0, len(body)))])
    try:
        read_header(path)
    except CheckpointError:
        return
    check_consistent(path)


test_spliced_files_for_long = longer(test_spliced_files_are_refused_or_understood, st.data())


@QUICK
@given(st.dictionaries(st.text(max_size=4), FIELDS, max_size=4), st.integers(0, 60), st.integers(0, 2**64 - 1))
def test_tables_with_any_length_field(tmp_path: Path, table: dict[str, Any], size: int, length: int) -> None:
    path = write(tmp_path / "x.safetensors", table, bytes(size), length=length)
    try:
        read_header(path)
    except CheckpointError:
        return
    check_consistent(path)
