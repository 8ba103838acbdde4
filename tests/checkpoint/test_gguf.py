"""The GGUF file as the gguf package reads it back, value by value against the published checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tercet.checkpoint import gguf as export
from tercet.checkpoint.convert import ModelSource, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.gguf import check_runnable, export_gguf, repack
from tercet.checkpoint.gguf_vocabulary import byte_letters, from_tokenizer, spell, split
from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.load import load_model
from tercet.checkpoint.miniature import random_model
from tercet.checkpoint.mxfp4 import PackedWeight, encode
from tercet.cli.main import main
from tercet.config import ModelConfig
from tercet.data import Tokenizer
from tercet.errors import CheckpointError, ConfigError, MissingDependencyError
from tercet.model.names import published_tensors
from tests.checkpoint.miniatures import MINIATURE, MINIATURES, published

gguf = pytest.importorskip("gguf")


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(np.array(values)).reshape([int(n) for n in reversed(tensor.shape)])
    return fields, tensors


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_every_weight_arrives(tmp_path: Path, name: str) -> None:
    fields, got = read(export_gguf(published(name), tmp_path / "m.gguf", dtype="F32"))
    config = MINIATURES[name]
    own = {key: value.detach().float() for key, value in published_tensors(load_model(published(name)))}
    used = set()

    def same(target: str, expected: torch.Tensor) -> None:
        used.add(target)
        assert torch.equal(got[target].flatten(), expected.flatten()), target

    for layer in range(config.num_layers):
        p, b = f"model.layers.{layer}.", f"blk.{layer}."
        if config.is_mla(layer):
            expansion = own.pop(p + "self_attn.kv_b_proj.weight").view(2, 64, 32)
            assert got[b + "attn_k_b.weight"].shape == (2, 32, 32)
            same(b + "attn_k_b.weight", expansion[:, :32].transpose(1, 2))
            same(b + "attn_v_b.weight", expansion[:, 32:])
            if name == "k3":
                same(b + "attn_gate.weight", own.pop(p + "self_attn.g_proj.weight"))
        else:
            same(b + "ssm_a", -own.pop(p + "self_attn.A_log").exp())
            if name == "k3":
                same(b + "ssm_g.weight", own.pop(p + "self_attn.g_proj.weight"))
        if name == "k3":
            for mix, target in (("self_attention_res", "attn_res_score"), ("mlp_res", "ffn_res_score")):
                norm, proj = own.pop(f"{p}{mix}_norm.weight"), own.pop(f"{p}{mix}_proj.weight")
                same(f"{b}{target}.weight", norm * proj[0])
        if config.is_moe(layer):
            for part, target in (("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")):
                stack = [own.pop(f"{p}block_sparse_moe.experts.{e}.{part}.weight") for e in range(6)]
                same(f"{b}{target}.weight", torch.stack(stack))
        for rest, target in export._LAYER_NAMES.items():
            if p + rest in own:
                same(b + target, own.pop(p + rest))
    if name == "k3":
        norm, proj = own.pop("model.output_attn_res_norm.weight"), own.pop("model.output_attn_res_proj.weight")
        same("output_res_score.weight", norm * proj[0])
    for rest, target in export._GLOBAL_NAMES.items():
        same(target, own.pop(rest))
    assert not own
    assert used == set(got)
    assert fields["general.architecture"] == {"k3": "kimi-k3", "kimi-linear": "kimi-linear"}[name]
    assert fields["tokenizer.ggml.model"] == "none"


def test_hyper_parameters(tmp_path: Path) -> None:
    fields, _ = read(export_gguf(published("k3"), tmp_path / "m.gguf"))
    expected = {
        "attention.head_count_kv": [0, 0, 1, 1],
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.q_lora_rank": 32,
        "kda.head_dim": 32,
        "kda.gate_lower_bound": -5.0,
        "ssm.conv_kernel": 4,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_latent_length": 32,
        "attn_res.block_size": 2,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "leading_dense_block_count": 1,
        "vocab_size": 320,
    }
    for key, value in expected.items():
        assert fields[f"kimi-k3.{key}"] == value, key


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_types_of_tensors(tmp_path: Path, dtype: str) -> None:
    reader = gguf.GGUFReader(export_gguf(published("k3"), tmp_path / "m.gguf", dtype=dtype))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.ffn_up_exps.weight"] == "MXFP4"
    assert kinds["blk.1.attn_q.weight"] == dtype
    for name in ("blk.1.ssm_conv1d_q.weight", "blk.1.ffn_gate_inp.weight", "blk.1.ssm_dt.bias", "output_norm.weight"):
        assert kinds[name] == "F32"
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    assert shapes["blk.0.ssm_conv1d_k.weight"] == [4, 1, 64, 1]
    assert shapes["blk.0.ssm_a"] == [2]


def test_repacking_is_exact() -> None:
    packed = torch.randint(0, 256, (8, 48), dtype=torch.uint8)
    scale = torch.randint(2, 250, (8, 3), dtype=torch.uint8)
    weight = PackedWeight(packed, scale)
    theirs = gguf.quants.dequantize(repack(weight).numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(torch.from_numpy(theirs), weight.decode())


def test_experts_can_be_quantised_or_dequantised(tmp_path: Path) -> None:
    model = random_model(MINIATURE)
    write_published(ModelSource(model), tmp_path / "plain", LAYOUTS["k3"], experts="plain")
    _, kept = read(export_gguf(tmp_path / "plain", tmp_path / "kept.gguf", dtype="F32"))
    _, four = read(export_gguf(tmp_path / "plain", tmp_path / "four.gguf", experts="mxfp4", rule="rceil"))
    own = model.get_submodule("model.layers.1.block_sparse_moe.experts").get_parameter("w2").detach()
    assert torch.equal(kept["blk.1.ffn_down_exps.weight"], own)
    assert torch.equal(four["blk.1.ffn_down_exps.weight"], encode(own, "rceil").decode())
    _, plain = read(export_gguf(published("k3"), tmp_path / "plain.gguf", experts="plain"))
    expert = CheckpointDirectory.open(published("k3"))
    packed = load_model(expert).get_submodule("model.layers.1.block_sparse_moe.experts").get_parameter("w2")
    assert torch.equal(plain["blk.1.ffn_down_exps.weight"], packed.detach())


def test_vocabulary(tmp_path: Path) -> None:
    """Merges rebuild the ranks: applying them in order to single bytes gives every token, at its own rank."""
    text = "the cat sat on the mat, the rat sat on the cat; größe 你好 " * 40
    tokenizer = Tokenizer.train([text], 600)
    words = from_tokenizer(tokenizer, tokenizer.vocab_size + 7, tmp_path)
    assert len(words.tokens) == len(set(words.tokens)) == tokenizer.vocab_size + 7
    assert words.tokens[tokenizer.bos_id] == "[BOS]"
    assert words.kinds[tokenizer.bos_id] == 3
    assert words.kinds[-7:] == [5] * 7
    letters = byte_letters()
    assert len(set(letters)) == 256
    known = set(letters)
    for merge in words.merges:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert known == {spell(token) for token in tokenizer.ranks}
    assert split(b"a", tokenizer.ranks) is None


def test_a_run_brings_its_tokenizer(tmp_path: Path) -> None:
    from tests.checkpoint.test_training_run import write_run

    write_run(tmp_path / "run", "k3")
    assert main(["checkpoint", "export", "gguf", str(tmp_path / "run"), str(tmp_path / "m.gguf")]) == 0
    fields, _ = read(tmp_path / "m.gguf")
    assert fields["tokenizer.ggml.pre"] == "kimi-k2"
    assert len(fields["tokenizer.ggml.tokens"]) == 512
    assert fields["tokenizer.ggml.eos_token_id"] == 258


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kda": replace(MINIATURE.kda, num_heads=4)}, "as many KDA heads"),
        ({"full_attention_layers": ()}, "at least one KDA and one MLA"),
        ({"kda": replace(MINIATURE.kda, full_rank_gate=False)}, "full_rank_gate"),
        ({"num_nextn_predict_layers": 1}, "multi-token"),
        ({"activation": "silu"}, "activation"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    config: ModelConfig = replace(MINIATURE, **change)
    with pytest.raises(ConfigError, match=message):
        check_runnable(config)


def test_refusals_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.gguf").write_text("x")
    with pytest.raises(CheckpointError, match="already exists"):
        export_gguf(published("k3"), tmp_path / "there.gguf")
    with pytest.raises(ConfigError, match="Q4"):
        export_gguf(published("k3"), tmp_path / "m.gguf", dtype="Q4")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"tercet\[gguf\]"):
        export_gguf(published("k3"), tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]
