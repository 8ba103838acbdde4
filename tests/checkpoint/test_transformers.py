"""Kimi-Linear exchanged with transformers' own implementation, in both directions."""

from pathlib import Path

import pytest
import torch

from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.runs import export_checkpoint, import_checkpoint
from tests.checkpoint.miniatures import MINIATURES, published
from tests.numerics import relative_error

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 320, (2, 37), generator=torch.Generator().manual_seed(3))


def hf_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def test_transformers_opens_our_export(tmp_path: Path) -> None:
    ours = load_model(published("kimi-linear"))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        published("kimi-linear"), dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert theirs.config.layer_types == ["linear_attention"] * 2 + ["full_attention"] * 2
    with torch.no_grad():
        assert relative_error(ours(TOKENS), hf_logits(theirs)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_open_what_transformers_saves(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        published("kimi-linear"), dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    theirs.to(dtype).save_pretrained(tmp_path / "saved")
    theirs.to(torch.float32)
    directory = CheckpointDirectory.open(tmp_path / "saved")
    assert directory.model == MINIATURES["kimi-linear"]
    assert directory.files["model.layers.0.mlp.up_proj.weight"] == "model.safetensors"  # saved under another name
    with torch.no_grad():
        assert relative_error(load_model(directory)(TOKENS), hf_logits(theirs)) < 1e-5


def test_a_saved_model_survives_import_and_export(tmp_path: Path) -> None:
    """transformers → run → published → transformers: the same weights, under the published names."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(published("kimi-linear"), dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "saved")
    import_checkpoint(tmp_path / "saved", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    out = CheckpointDirectory.open(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.weight" in out.headers[out.files["model.layers.0.mlp.up_proj.weight"]].entries
    assert out.dtypes().keys() == {"F32"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, old), (other, new) in zip(theirs.named_parameters(), again.named_parameters()):
        assert name == other
        assert torch.equal(old, new), name


def test_fp32_export_is_exact(tmp_path: Path) -> None:
    ours = load_model(published("kimi-linear"))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape)
    write_published(ModelSource(ours), tmp_path / "out", LAYOUTS["kimi-linear"], dtype="F32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        assert relative_error(ours(TOKENS), hf_logits(theirs)) < 1e-5
