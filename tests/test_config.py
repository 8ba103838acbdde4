"""Settings, overrides, presets, files and errors: L0, no torch."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tercet import errors
from tercet.config import BalanceConfig, KDAConfig, ModelConfig, MoEConfig, RunConfig
from tercet.errors import ConfigError, MissingDependencyError, StorageError, TercetError, missing, nearest
from tercet.presets import PRESETS, k3_model, kimi_linear_48b_model, preset, published_learning_rate
from tercet.util.files import append_line, atomic_open, write_json
from tercet.util.settings import difference, from_dict, override, parse_assignment, read_toml, to_dict
from tercet.util.text import count, duration, size


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = preset(name)
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config and difference(again, config) == []


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'kimi-linear-48b'"):
        preset("kimi-linear-48")


def test_layer_lists_are_the_published_ones():
    """M15: 1-based in files, 0-based here, taken from the list and not from an every-fourth rule."""
    k3 = k3_model()
    assert k3.full_attention_layers == (*range(3, 92, 4), 92)
    assert k3.is_mla(91) and k3.is_mla(92) and len(k3.full_attention_layers) == 24 and len(k3.kda_layers) == 69
    kimi = kimi_linear_48b_model()
    assert [n + 1 for n in kimi.full_attention_layers] == [4, 8, 12, 16, 20, 24, 27]
    listed = [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]
    assert [n + 1 for n in kimi.kda_layers] == listed
    assert not k3.is_moe(0) and all(k3.is_moe(n) for n in range(1, 93))


def test_published_values():
    k3 = k3_model()
    assert (k3.hidden_size, k3.vocab_size, k3.attn_res_block_size, k3.intermediate_size) == (7168, 163_840, 12, 33_792)
    assert (k3.moe.num_experts, k3.moe.num_experts_per_token, k3.moe.latent_size) == (896, 16, 3584)
    assert k3.mla.cache_width == 576 and k3.mla.qk_head_dim == 192 and k3.kda.width == 12_288
    assert k3.kda.gate_lower_bound == -5.0 and kimi_linear_48b_model().kda.gate_lower_bound is None
    assert kimi_linear_48b_model().moe.routed_scaling_factor == 2.446


def test_architecture_has_no_defaults():
    """M32, M37: a forgotten architecture key is an error, never another model."""
    for key in ("hidden_size", "num_layers", "attn_res_block_size", "activation", "kda", "mla", "moe"):
        data = to_dict(k3_model())
        del data[key]
        with pytest.raises(ConfigError, match=f"{key} is missing"):
            from_dict(ModelConfig, data)
    for group, kind in (("kda", KDAConfig), ("moe", MoEConfig)):
        for key in to_dict(k3_model())[group]:
            data = to_dict(k3_model())
            del data[group][key]
            with pytest.raises(ConfigError, match=rf"{group}\.{key} is missing"):
                from_dict(ModelConfig, data)
        assert kind.__dataclass_fields__


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lrr=1", r"unknown setting 'optim.lrr' — did you mean 'lr'\? \(at optim\)"),
        ("optm.lr=1", "did you mean 'optim'"),
        ("optim=1", "is a group of settings"),
        ("optim.lr.x=1", "unknown setting"),
        ("optim.lr=fast", "optim.lr must be float, got 'fast'"),
        ("optim.lr=true", "optim.lr must be float, got True"),
        ("train.steps=1.5", "train.steps must be int"),
        ("train.steps=true", "train.steps must be int"),
        ("train.recompute=1", "train.recompute must be bool"),
        ("optim.adam_betas=[0.9]", "needs 2 values, got 1"),
        ("optim.adam_betas=0.9", "must be a list"),
        ("optim.matrix_optimizer=moun", "did you mean 'muon'"),
        ("optim.lr=-1", "must be positive"),
        ("data.batch_sequences=7", "must be a multiple of"),
        ("model.kda.gate_lower_bound=-5.01", r"must lie in \[-5, 0\)"),
        ("model.kda.gate_lower_bound=0.0", r"must lie in \[-5, 0\)"),
        ("model.moe.num_experts_per_token=16", r"\(k\+1\)-th score"),
        ("model.full_attention_layers=[4]", "0-based"),
        ("model.full_attention_layers=[2, 1]", "sorted"),
        ("model.attn_res_block_size=0", "positive number"),
        ("model.activation=gelu", "use one of"),
        ("model.hidden_size=0", "positive"),
        ("model.moe.latent_size=none", "latent_norm needs"),
        ("model.num_nextn_predict_layers=2", "use one of"),
        ("balance.ema=1.0", r"must lie in \[0, 1\)"),
        ("schedule.warmup_fraction=1.5", r"must lie in \[0, 1\]"),
        ("nonsense", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
    ],
)
def test_bad_settings(assignment, message):
    with pytest.raises(ConfigError, match=message):
        override(preset("tiny"), dict([parse_assignment(assignment)]))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 3e-4", 3e-4),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=none", None),
        ("a.b=x y", "x y"),
        ('a.b="3"', "3"),
    ],
)
def test_assignments_read_as_toml(text, value):
    assert parse_assignment(text) == ("a.b", value)


def test_override_is_checked_and_pure():
    before = preset("tiny")
    after = override(before, {"optim.lr": 1, "optim.qk_clip": None, "model.full_attention_layers": [1, 3]})
    assert after.optim.lr == 1.0 and isinstance(after.optim.lr, float)
    assert after.optim.qk_clip is None and after.model.full_attention_layers == (1, 3)
    assert before == preset("tiny")
    assert len(difference(before, after)) == 3


def test_difference_names_settings():
    assert difference(preset("tiny"), override(preset("tiny"), {"model.vocab_size": 100})) == [
        "model.vocab_size: 4096 → 100"
    ]


def test_toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[optim]\nlr = 1e-3\n[optim.muon]\nmomentum = 0.9\n")
    assert read_toml(file) == {"optim.lr": 1e-3, "optim.muon.momentum": 0.9}
    assert override(preset("tiny"), read_toml(file)).optim.muon.momentum == 0.9
    file.write_text("lr = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(file)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_toml(tmp_path)


def test_from_dict_wants_tables():
    with pytest.raises(ConfigError, match="must be a table"):
        from_dict(BalanceConfig, [1, 2])
    with pytest.raises(ConfigError, match=r"optim\. must be a table|optim"):
        from_dict(RunConfig, {**to_dict(preset("tiny")), "optim": 3})


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        preset("tiny").optim.lr = 1.0  # type: ignore[misc]
    assert replace(preset("tiny"), preset="mine").preset == "mine"


def test_published_learning_rate():
    assert published_learning_rate(1e6) == 4e-3
    assert published_learning_rate(103e9) == pytest.approx(2.36 * 103e9**-0.35)


def test_every_error_is_also_a_standard_one():
    made = [getattr(errors, name) for name in dir(errors) if name.endswith("Error")]
    for kind in made:
        assert issubclass(kind, TercetError)
        assert kind is TercetError or any(base.__module__ == "builtins" for base in kind.__bases__)
    assert nearest("x", []) == "" and nearest("zzz", ["a", "b"]) == " — known: a, b"
    with pytest.raises(ImportError, match=r"pip install 'tercet\[data\]'"):
        raise missing("pyarrow", "data", "reading parquet")
    assert issubclass(MissingDependencyError, ImportError)


def _write_and_fail(path, error: BaseException) -> None:
    with atomic_open(path) as handle:
        handle.write(b"half")
        raise error


def test_atomic_write_is_all_or_nothing(tmp_path):
    path = tmp_path / "deep" / "config.json"
    write_json(path, {"a": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    with pytest.raises(RuntimeError):
        _write_and_fail(path, RuntimeError("a bug"))
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    assert os.listdir(path.parent) == ["config.json"]


def test_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        _write_and_fail(path, KeyboardInterrupt())
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tercet.util.files.os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*No space left.*MB are free"):
        write_json(tmp_path / "x.json", {})
    assert os.listdir(tmp_path) == []


def test_unwritable_places(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_json(file / "x.json", {})
    with pytest.raises(StorageError, match="cannot write"):
        append_line(tmp_path / "absent" / "metrics.jsonl", {})


def test_append_line(tmp_path):
    for step in range(3):
        append_line(tmp_path / "m.jsonl", {"step": step})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_numbers_as_people_read_them():
    assert [count(x) for x in (950, 12_345, 4.56e6, 2.779e12, 0.25)] == ["950", "12.3k", "4.56M", "2.78T", "0.25"]
    assert [size(x) for x in (0, 1023, 1024, 414 * 1024**2)] == ["0 B", "1023 B", "1.00 KiB", "414.00 MiB"]
    assert [duration(x) for x in (4.2, 59.94, 185, 7800)] == ["4.2 s", "59.9 s", "3:05", "2:10:00"]


def test_settings_need_no_torch():
    modules = "tercet.errors, tercet.config, tercet.presets, tercet.util.settings, tercet.util.files, tercet.util.text"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
