"""A directory against its configuration: every deviation is named, nothing outside the directory is touched."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.inspection import summarize
from tercet.checkpoint.layouts import LAYOUTS, StoredTensor, index
from tercet.checkpoint.load import load_model, load_weights
from tercet.checkpoint.mxfp4 import PackedWeight
from tercet.checkpoint.published_config import write_config
from tercet.checkpoint.vision import PUBLISHED_VISION
from tercet.checkpoint.weights import weights
from tercet.checkpoint.writer import INDEX_NAME
from tercet.errors import CheckpointError, ConfigError
from tercet.model import build
from tercet.presets import k3_model
from tests.checkpoint.miniatures import MINIATURE, MINIATURES, editable, published

K3_EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight"
SHARD_2 = "model-00002-of-000007.safetensors"


def edit_shard(directory: Path, file: str, change: Any) -> None:
    """Rewrite one shard after ``change(tensors)``, keeping the index in step."""
    tensors = load_file(directory / file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})
    index = json.loads((directory / INDEX_NAME).read_text())
    for name in before - set(tensors):
        del index["weight_map"][name]
    for name in set(tensors) - before:
        index["weight_map"][name] = file
    del index["metadata"]["total_size"]
    (directory / INDEX_NAME).write_text(json.dumps(index))


def edit_index(directory: Path, change: Any) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    change(index)
    (directory / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_opens_what_the_layout_says(name: str) -> None:
    directory = CheckpointDirectory.open(published(name))
    assert directory.model == MINIATURES[name]
    assert directory.layout.name == name
    assert directory.problems() == []
    assert directory.misplaced() == 0
    assert directory.nbytes == sum(tensor.nbytes for tensor in directory.expected.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{K3_EXPERT}_scale"), f"missing tensor '{K3_EXPERT}_scale' (expected U8 [32, 1])"),
        (
            lambda t: t.update({f"{K3_EXPERT}_packed": torch.zeros(16, 32, dtype=torch.uint8)}),
            f"'{K3_EXPERT}_packed' has shape [16, 32], expected [32, 16]",
        ),
        (
            lambda t: t.update({f"{K3_EXPERT}_packed": torch.zeros(32, 16, dtype=torch.int8)}),
            f"'{K3_EXPERT}_packed' is I8, expected U8",
        ),
        (
            lambda t: t.update({"language_model.model.layers.1.self_attn.dt_bias": torch.zeros(64).bfloat16()}),
            "'language_model.model.layers.1.self_attn.dt_bias' is BF16, expected F32",
        ),
        (
            lambda t: t.update({"language_model.model.layers.1.input_layernorm.weight": torch.ones(64)}),
            "is F32, expected BF16",
        ),
        (lambda t: t.update({"language_model.model.rotary.inv_freq": torch.ones(4)}), "unexpected tensor"),
    ],
)
def test_every_deviation_names_the_tensor(tmp_path: Path, change: Any, message: str) -> None:
    directory = editable("k3", tmp_path)
    edit_shard(directory, SHARD_2, change)
    with pytest.raises(CheckpointError) as error:
        load_model(directory)
    assert message in str(error.value)


def test_M6_an_unused_tensor_is_an_error(tmp_path: Path) -> None:
    """A loader without a slot for the latent norm must not drop it in silence — nor tercet miss it in a file."""
    directory = editable("k3", tmp_path)
    norm = "language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight"
    edit_shard(directory, SHARD_2, lambda tensors: tensors.pop(norm))
    with pytest.raises(CheckpointError, match=f"missing tensor '{norm}'"):
        CheckpointDirectory.open(directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["latent_moe_use_norm"] = False
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unexpected tensor.*routed_expert_norm"):
        CheckpointDirectory.open(directory)


def test_long_lists_of_problems_are_counted(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    edit_shard(directory, SHARD_2, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n])
    with pytest.raises(CheckpointError, match="and 28 more"):
        CheckpointDirectory.open(directory)


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "C:\\x.safetensors", ".hidden.safetensors",
     "model.bin", "x\0.safetensors", 7, None, ""],
)  # fmt: skip
def test_an_index_cannot_leave_its_directory(tmp_path: Path, file: Any) -> None:
    directory = editable("k3", tmp_path)
    shutil.copy(directory / SHARD_2, tmp_path / "outside.safetensors")
    edit_index(directory, lambda index: index["weight_map"].update({f"{K3_EXPERT}_packed": file}))
    with pytest.raises(CheckpointError, match=r"not a plain \.safetensors name"):
        CheckpointDirectory.open(directory)


def test_an_index_must_agree_with_the_headers(tmp_path: Path) -> None:
    def refused(change: Any, message: str) -> None:
        directory = editable("k3", tmp_path)
        edit_index(directory, change)
        with pytest.raises(CheckpointError, match=message):
            CheckpointDirectory.open(directory)
        shutil.rmtree(directory)

    name = f"{K3_EXPERT}_packed"
    refused(lambda i: i["weight_map"].update({name: "model-00009-of-000009.safetensors"}), "cannot read.*00009")
    refused(lambda i: i["weight_map"].update({name: "model-00001-of-000007.safetensors"}), "does not hold it")
    refused(lambda i: i["weight_map"].update({"ghost": SHARD_2}), "'ghost' in .* does not hold it")
    refused(lambda i: i["weight_map"].pop(name), "which model.safetensors.index.json places in None")
    refused(lambda i: i["metadata"].update({"total_size": 1}), "claims 1 bytes")
    refused(lambda i: i.update({"weight_map": []}), "no weight_map")


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    name = f"{K3_EXPERT}_packed"
    text = (directory / INDEX_NAME).read_text()
    (directory / INDEX_NAME).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{SHARD_2}",'))
    with pytest.raises(CheckpointError, match="twice"):
        CheckpointDirectory.open(directory)
    shutil.copy(published("k3") / INDEX_NAME, directory / INDEX_NAME)
    tensors = load_file(directory / "model-00001-of-000007.safetensors")
    tensors[name] = torch.zeros(32, 16, dtype=torch.uint8)
    save_file(tensors, directory / "model-00001-of-000007.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.*places in '{SHARD_2}'"):
        CheckpointDirectory.open(directory)
    kimi = editable("kimi-linear", tmp_path)
    tensors = load_file(kimi / "model-00001-of-00005.safetensors")
    tensors["model.layers.0.block_sparse_moe.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    save_file(tensors, kimi / "model-00001-of-00005.safetensors")
    edit_index(kimi, lambda i: (i["metadata"].clear(), i["weight_map"].update(
        {"model.layers.0.block_sparse_moe.up_proj.weight": "model-00001-of-00005.safetensors"})))  # fmt: skip
    with pytest.raises(CheckpointError, match="is in both"):
        CheckpointDirectory.open(kimi)


def test_truncated_and_missing_shards(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    whole = (directory / SHARD_2).read_bytes()
    (directory / SHARD_2).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"{SHARD_2}.*truncated"):
        CheckpointDirectory.open(directory)
    (directory / SHARD_2).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read.*{SHARD_2}"):
        CheckpointDirectory.open(directory)
    (directory / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        CheckpointDirectory.open(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        CheckpointDirectory.open(directory)
    with pytest.raises(CheckpointError, match="not a directory"):
        CheckpointDirectory.open(directory / "nowhere")


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    directory = CheckpointDirectory.open(editable("k3", tmp_path))
    (directory.path / SHARD_2).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="changed its size"):
        directory.tensor(f"{K3_EXPERT}_packed")


def test_config_of_no_known_kind(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither"):
        CheckpointDirectory.open(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        CheckpointDirectory.open(directory)


def test_M1_decay_is_per_head_and_its_padding_must_be_zero(tmp_path: Path) -> None:
    """The stored length equals the head width by accident: entries past the heads are padding, never channels."""
    name = "language_model.model.layers.1.self_attn.A_log"
    directory = CheckpointDirectory.open(published("k3"))
    assert directory.entries[name].shape == (32,)
    assert directory.tensor(name)[2:].abs().sum() == 0
    weight = next(w for w in weights(MINIATURE) if w.role == "decay" and w.layer == 1)
    value = directory.weight(weight)
    assert isinstance(value, torch.Tensor)
    assert torch.equal(value, directory.tensor(name)[:2])
    assert value.unique().numel() == 2
    broken = editable("k3", tmp_path)
    edit_shard(broken, SHARD_2, lambda tensors: tensors[name][5:6].fill_(1e-3))
    with pytest.raises(CheckpointError, match=r"32 values for 2 heads.*not zero"):
        load_model(broken)


def test_M11_quantisation_is_decided_by_the_tensors(tmp_path: Path) -> None:
    """The released ignore list forgets router and latent projections; tercet looks at what is there instead."""
    directory = editable("k3", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"]["ignore"] = ["re:.*self_attn.*"]
    (directory / "config.json").write_text(json.dumps(config))
    reference = load_model(published("k3"))
    tokens = torch.randint(0, 320, (1, 9))
    assert torch.equal(load_model(directory)(tokens), reference(tokens))

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        packed = PackedWeight(tensors.pop(f"{K3_EXPERT}_packed"), tensors.pop(f"{K3_EXPERT}_scale"))
        tensors[K3_EXPERT] = packed.decode(torch.bfloat16)

    edit_shard(directory, SHARD_2, unpack)
    assert torch.equal(load_model(directory)(tokens), reference(tokens))


def test_layer_of_multi_token_prediction_is_skipped_unless_configured(tmp_path: Path) -> None:
    directory = editable("k3", tmp_path)
    extra = "language_model.model.layers.4.enorm.weight"
    edit_shard(directory, SHARD_2, lambda tensors: tensors.update({extra: torch.ones(64).bfloat16()}))
    opened = CheckpointDirectory.open(directory)
    assert opened.skipped == [extra]
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing tensor .*layers\.4\.eh_proj"):
        CheckpointDirectory.open(directory)


def test_weights_of_another_architecture_are_refused() -> None:
    directory = CheckpointDirectory.open(published("k3"))
    with pytest.raises(CheckpointError, match=r"another model.*activation"):
        load_weights(build(MINIATURES["kimi-linear"]), directory)


def test_loading_leaves_the_files_alone(tmp_path: Path) -> None:
    directory = editable("kimi-linear", tmp_path)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    opened = CheckpointDirectory.open(directory)
    opened.tensor("model.norm.weight").zero_()  # the mapping is private
    model = load_model(opened)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.slow
def test_the_whole_of_k3_is_verified_from_headers(tmp_path: Path) -> None:
    """All 96 headers of the released size over files full of holes: 1.56 TB that take no room."""
    chosen, config = LAYOUTS["k3"], k3_model()
    by_shard: dict[int, list[StoredTensor]] = {}
    for tensor in chosen.stored(config, PUBLISHED_VISION):
        by_shard.setdefault(tensor.shard, []).append(tensor)
    for shard, tensors in by_shard.items():
        table, offset = {}, 0
        for tensor in tensors:
            offsets = [offset, offset := offset + tensor.nbytes]
            table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        header = json.dumps(table).encode()
        with open(tmp_path / chosen.shard_name(shard, 96), "wb") as handle:
            handle.write(struct.pack("<Q", len(header)) + header)
            handle.truncate(8 + len(header) + offset)
    (tmp_path / INDEX_NAME).write_text(json.dumps(index(chosen, config, PUBLISHED_VISION)))
    (tmp_path / "config.json").write_text(json.dumps(write_config(chosen, config, PUBLISHED_VISION)))
    directory = CheckpointDirectory.open(tmp_path)
    assert (len(directory.entries), directory.nbytes) == (497_220, 1_560_860_324_864)
    assert directory.misplaced() == 0
    assert summarize(directory).quantised_share == pytest.approx(0.9794, abs=1e-4)


def test_progress_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    load_model(published("k3"), show=True)
    text = capsys.readouterr().err
    assert "loading k3" in text
    assert "100%" in text or "B/s" in text
