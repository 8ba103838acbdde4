"""MTP layers whose files repeat head and embedding: read as copies, written as copies, refused when they are none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.checkpoint.comparison import compare_weights
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.inspection import summarize
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import write_miniature
from tercet.checkpoint.runs import export_checkpoint, import_checkpoint
from tercet.checkpoint.weights import weights
from tercet.checkpoint.writer import INDEX_NAME
from tercet.cli.main import main
from tercet.errors import CheckpointError
from tercet.util.files import write_json
from tests.checkpoint.miniatures import MINIATURE
from tests.checkpoint.test_directory import edit_shard
from tests.checkpoint.test_round_trip import contents

WITH_MTP = replace(MINIATURE, num_nextn_predict_layers=1)
LAST = WITH_MTP.num_layers
HEAD, EMBEDDING = (f"language_model.{name}.weight" for name in ("lm_head", "model.embed_tokens"))
HEAD_COPY = f"language_model.model.layers.{LAST}.shared_head.head.weight"
EMBEDDING_COPY = f"language_model.model.layers.{LAST}.embed_tokens.weight"
MTP_SHARD = f"model-{LAST + 1:05d}-of-000008.safetensors"


@pytest.fixture
def repeating(tmp_path: Path) -> Path:
    """Return a K3 miniature whose MTP layer carries both copies, written by the safetensors library."""
    directory = tmp_path / "repeating"
    write_miniature(directory, LAYOUTS["k3"], WITH_MTP)
    outside = load_file(directory / f"model-{LAST + 2:05d}-of-000008.safetensors")
    tensors = load_file(directory / MTP_SHARD)
    copies = {HEAD_COPY: outside[HEAD].clone(), EMBEDDING_COPY: outside[EMBEDDING].clone()}
    save_file(tensors | copies, directory / MTP_SHARD, metadata={"format": "pt"})
    index = json.loads((directory / INDEX_NAME).read_text())
    index["metadata"]["total_size"] += sum(copy.nbytes for copy in copies.values())
    index["weight_map"] = dict(sorted((index["weight_map"] | dict.fromkeys(copies, MTP_SHARD)).items()))
    write_json(directory / INDEX_NAME, index)
    return directory


def test_copies_are_read_once_and_stated(repeating: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = CheckpointDirectory.open(repeating)
    assert sorted(directory.copies) == [EMBEDDING_COPY, HEAD_COPY]
    assert directory.misplaced() == 0
    model = load_model(directory)
    assert not [name for name, _ in model.named_parameters() if "shared_head.head" in name]
    assert torch.equal(model.lm_head.weight.bfloat16(), directory.tensor(HEAD))
    summary = summarize(directory)
    assert summary.components["repeated head and embedding"] == (0, 2 * 320 * 64 * 2)
    vision = sum(summary.components[name][0] for name in ("vision tower", "vision projector"))
    assert summary.weights == sum(weight.numel for weight in weights(WITH_MTP)) + vision
    assert main(["checkpoint", "verify", str(repeating)]) == 0
    assert f"note: {HEAD_COPY} repeats lm_head.weight" in capsys.readouterr().out
    assert main(["checkpoint", "import", str(repeating), str(tmp_path / "run")]) == 0
    assert f"{EMBEDDING_COPY} repeats model.embed_tokens.weight, byte for byte" in capsys.readouterr().out


def test_both_copies_come_back(repeating: Path, tmp_path: Path) -> None:
    """Directory to directory, and through a run that holds the head once, every byte."""
    export_checkpoint(repeating, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(repeating)
    import_checkpoint(repeating, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000000"
    assert not [name for name in CheckpointDirectory.open(step).entries if "shared_head.head" in name]
    export_checkpoint(tmp_path / "run", tmp_path / "through")
    assert contents(tmp_path / "through") == contents(repeating)
    assert not compare_weights(*map(CheckpointDirectory.open, (repeating, tmp_path / "through"))).differences


def test_a_changed_head_takes_its_copy_along(repeating: Path, tmp_path: Path) -> None:
    import_checkpoint(repeating, tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000000").glob("model-*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"].mul_(2)
    save_file(tensors, file)
    export_checkpoint(tmp_path / "run", tmp_path / "tuned")
    tuned, before = CheckpointDirectory.open(tmp_path / "tuned"), CheckpointDirectory.open(repeating)
    assert torch.equal(tuned.tensor(HEAD_COPY), tuned.tensor(HEAD))
    assert torch.equal(tuned.tensor(HEAD), 2 * before.tensor(HEAD))
    assert torch.equal(tuned.tensor(EMBEDDING_COPY), before.tensor(EMBEDDING))


@pytest.mark.parametrize(("copy", "original"), [(HEAD_COPY, HEAD), (EMBEDDING_COPY, EMBEDDING)])
def test_what_is_no_copy_is_refused_by_name(repeating: Path, tmp_path: Path, copy: str, original: str) -> None:
    """One bit is enough."""
    edit_shard(repeating, MTP_SHARD, lambda tensors: tensors[copy].view(torch.int16)[7, 3:4].bitwise_xor_(-(2**15)))
    for act in (
        lambda: load_model(repeating),
        lambda: import_checkpoint(repeating, tmp_path / "run"),
        lambda: export_checkpoint(repeating, tmp_path / "out"),
        lambda: compare_weights(CheckpointDirectory.open(repeating), CheckpointDirectory.open(repeating)),
    ):
        with pytest.raises(CheckpointError, match=f"'{copy}' is not a copy of '{original}'"):
            act()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_shape_and_dtype_of_a_copy_are_checked(repeating: Path) -> None:
    edit_shard(repeating, MTP_SHARD, lambda tensors: tensors.update({HEAD_COPY: torch.zeros(320, 32).bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"'{HEAD_COPY}' has shape \[320, 32\], expected \[320, 64\]"):
        CheckpointDirectory.open(repeating)


def test_without_the_layer_nothing_is_repeated(repeating: Path) -> None:
    """A configuration that leaves the layer out leaves its copies out, equal or not."""
    edit_shard(repeating, MTP_SHARD, lambda tensors: tensors[HEAD_COPY].zero_())
    config = json.loads((repeating / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    (repeating / "config.json").write_text(json.dumps(config))
    directory = CheckpointDirectory.open(repeating)
    assert not directory.copies
    assert HEAD_COPY in directory.skipped
    load_model(directory)
