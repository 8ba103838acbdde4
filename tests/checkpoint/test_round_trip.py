"""Layout → tercet → layout, byte for byte; and writing that leaves nothing half done."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercet.checkpoint import writer
from tercet.checkpoint.base import Base
from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import random_model, write_miniature
from tercet.checkpoint.mxfp4 import PackedWeight, encode
from tercet.checkpoint.runs import export_checkpoint, import_checkpoint
from tercet.checkpoint.weights import weights
from tercet.data import Tokenizer
from tercet.errors import CheckpointError, ConfigError, StorageError
from tercet.model import CausalLM
from tercet.model.names import published_tensors
from tests.checkpoint.miniatures import MINIATURE, MINIATURES, editable, published
from tests.checkpoint.test_directory import SHARD_2, edit_shard

NAMES = ["k3", "kimi-linear"]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def with_rare_bytes(directory: Path) -> Path:
    """Give a K3 miniature codes that no encoder would choose: −0, small codes under large scales, scaled zeros."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".experts.0.w1.weight_packed"):
                tensor[0], tensor[1], tensor[2] = 0x88, 0x11, 0
            if name.endswith(".experts.0.w1.weight_scale"):
                tensor[:3] = 99

    edit_shard(directory, SHARD_2, change)
    total = sum(sum(e.nbytes for e in h.entries.values()) for h in CheckpointDirectory.open(directory).headers.values())
    index = json.loads((directory / writer.INDEX_NAME).read_text())
    writer.write_json(
        directory / writer.INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": index["weight_map"]},
    )
    (directory / "generation_config.json").write_text('{"temperature": 1.0}')
    return directory


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_in_memory(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    source = editable(name, tmp_path)
    if name == "k3":
        with_rare_bytes(source)
    model = load_model(source, dtype=dtype)
    write_published(ModelSource(model), tmp_path / "again", LAYOUTS[name], base=Base.open(source))
    assert contents(tmp_path / "again") == contents(source)


@pytest.mark.parametrize("name", NAMES)
def test_through_a_run(tmp_path: Path, name: str) -> None:
    source = editable(name, tmp_path)
    if name == "k3":
        with_rare_bytes(source)
    import_checkpoint(source, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)
    tokens = torch.randint(0, 320, (2, 11))
    assert torch.equal(load_model(tmp_path / "run")(tokens), load_model(source)(tokens))


@pytest.mark.parametrize("name", NAMES)
def test_directory_to_directory(tmp_path: Path, name: str) -> None:
    export_checkpoint(published(name), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(published(name))


def test_plain_experts_stay_plain(tmp_path: Path) -> None:
    model = random_model(MINIATURE)
    write_published(ModelSource(model), tmp_path / "plain", LAYOUTS["k3"], experts="plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())["text_config"]
    export_checkpoint(tmp_path / "plain", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "plain")
    tokens = torch.randint(0, 320, (1, 7))
    assert torch.equal(load_model(tmp_path / "again")(tokens), model(tokens))


def test_quantisation_on_export(tmp_path: Path) -> None:
    """Experts come out as the codec says, everything else unchanged."""
    model = random_model(MINIATURE)
    for rule in ("even", "floor", "rceil"):
        write_published(ModelSource(model), tmp_path / rule, LAYOUTS["k3"], rule=rule)  # type: ignore[arg-type]
        directory = CheckpointDirectory.open(tmp_path / rule)
        own = dict(published_tensors(model))
        for weight in weights(MINIATURE):
            value = directory.weight(weight)
            if isinstance(value, PackedWeight):
                expected = encode(own[weight.name], rule)  # type: ignore[arg-type]
                assert torch.equal(value.packed, expected.packed)
                assert torch.equal(value.scale, expected.scale)
            else:
                assert torch.equal(value.float(), own[weight.name].float())


def test_fine_tuning_changes_only_what_it_touched(tmp_path: Path) -> None:
    source = with_rare_bytes(editable("k3", tmp_path))
    model = load_model(source)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    with torch.no_grad():
        dict(published_tensors(model))[name][5] += 0.125
    write_published(ModelSource(model), tmp_path / "tuned", LAYOUTS["k3"], base=Base.open(source))
    old, new = CheckpointDirectory.open(source), CheckpointDirectory.open(tmp_path / "tuned")
    for stored in old.expected:
        if torch.equal(old.tensor(stored), new.tensor(stored)):
            continue
        assert stored.startswith(f"language_model.{name}_")
        changed = (old.tensor(stored) != new.tensor(stored)).any(-1).nonzero().flatten().tolist()
        assert changed == [5]


def test_run_keeps_what_weights_do_not_say(tmp_path: Path) -> None:
    source = editable("k3", tmp_path)
    (source / "modeling_evil.py").write_text("raise SystemExit")
    import_checkpoint(source, tmp_path / "run", dtype="F32")
    kept = {path.name for path in (tmp_path / "run" / "published").iterdir()}
    assert "config.json" in kept
    assert not any(name.endswith(".py") for name in kept)
    run = CheckpointDirectory.open(tmp_path / "run")
    assert run.dtypes().keys() == {"F32"}
    assert run.run is not None
    assert run.run.model == MINIATURE
    one = CheckpointDirectory.open(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert one.model == MINIATURE
    export_checkpoint(one.path, tmp_path / "again")
    del_evil = contents(source)
    del del_evil["modeling_evil.py"]
    assert contents(tmp_path / "again") == del_evil


def test_M29_reserved_ids_keep_their_places(tmp_path: Path) -> None:
    """The 256 ids at the end of the vocabulary survive import and export, used or not."""
    tokenizer = Tokenizer({bytes([n]): n for n in range(64)} | {bytes([n]): n for n in range(64, 256)})
    config = replace(MINIATURE, vocab_size=512)
    write_miniature(tmp_path / "k3", LAYOUTS["k3"], config)
    tokenizer.save(tmp_path / "k3")
    import_checkpoint(tmp_path / "k3", tmp_path / "run")
    run = Tokenizer.load(tmp_path / "run" / "tokenizer")
    assert run.vocab_size == 512
    assert run.control == tokenizer.control
    assert sorted(run.control.values()) == list(range(256, 512))
    export_checkpoint(tmp_path / "run", tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == tokenizer.fingerprint
    data = json.loads((tmp_path / "again" / "config.json").read_text())
    assert data["bos_token_id"] == tokenizer.bos_id
    assert data["eos_token_id"] == tokenizer.end_of_msg_id
    assert data["pad_token_id"] == tokenizer.pad_id


def test_M28_ids_outside_the_embedding_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer({bytes([n]): n for n in range(256)})
    import_checkpoint(published("k3"), tmp_path / "run")  # embeds 320 ids
    tokenizer.save(tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "published").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="512 ids, but the model embeds 320"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    data = json.loads((published("k3") / "config.json").read_text())
    ids = [data[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")]
    assert all(0 <= identity < 320 for identity in ids)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    for act in (
        lambda: export_checkpoint(published("k3"), tmp_path / "out"),
        lambda: import_checkpoint(published("k3"), tmp_path / "out"),
        lambda: write_miniature(tmp_path / "out", LAYOUTS["k3"], MINIATURE),
    ):
        with pytest.raises(CheckpointError, match="already exists"):
            act()
    assert contents(tmp_path / "out") == {"precious": b"x"}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | type[BaseException]
) -> None:
    source = published("k3")  # written before writing starts to fail
    calls = 0
    original = writer.as_bytes

    def fail(*args: object) -> memoryview:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise failure
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "as_bytes", fail)
    expected = StorageError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        export_checkpoint(source, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_bases_of_other_models_and_kinds_are_refused(tmp_path: Path) -> None:
    source = ModelSource(random_model(MINIATURE))
    with pytest.raises(CheckpointError, match="another model"):
        write_published(source, tmp_path / "x", LAYOUTS["k3"], base=Base.open(published("kimi-linear")))
    import_checkpoint(published("k3"), tmp_path / "run")
    with pytest.raises(CheckpointError, match="published checkpoint"):
        Base.open(tmp_path / "run")
    with pytest.raises(ConfigError, match="BF16, not F32"):
        write_published(source, tmp_path / "x", LAYOUTS["k3"], dtype="F32")
    with pytest.raises(ConfigError, match="F8"):
        write_published(source, tmp_path / "x", LAYOUTS["k3"], dtype="F8")
    with pytest.raises(ConfigError, match="kimi-linear layout cannot hold"):
        export_checkpoint(published("k3"), tmp_path / "x", layout_name="kimi-linear")


def test_multi_token_prediction_layer_travels(tmp_path: Path) -> None:
    config = replace(MINIATURE, num_nextn_predict_layers=1)
    write_miniature(tmp_path / "k3", LAYOUTS["k3"], config)
    model = load_model(tmp_path / "k3")
    assert isinstance(model, CausalLM)
    export_checkpoint(tmp_path / "k3", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "k3")
    names = CheckpointDirectory.open(tmp_path / "k3").entries
    assert "language_model.model.layers.4.shared_head.norm.weight" in names
    assert "language_model.model.layers.4.block_sparse_moe.experts.5.w2.weight_packed" in names


def test_miniatures_are_reproducible(tmp_path: Path) -> None:
    for name in NAMES:
        write_miniature(tmp_path / name, LAYOUTS[name], MINIATURES[name])
        assert contents(tmp_path / name) == contents(published(name))
