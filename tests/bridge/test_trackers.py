"""Trackers get the numbers, are loaded only when asked for, and name what is missing."""

import json
import subprocess
import sys
import types

import pytest

from tercet.bridge import trackers
from tercet.bridge.trackers import open_tracker, scalars
from tercet.errors import ConfigError, MissingDependencyError
from tercet.presets import preset
from tercet.train.metrics import MetricsLog

ROW = {
    "kind": "train",
    "step": 3,
    "loss": 2.5,
    "mtp_loss": None,
    "skipped": False,
    "update_rms": {"muon": 0.2},
    "balance": {"1": {"max_violation": 0.4, "load": [0.5, 0.5], "dead": 0}},
}


def test_scalars_are_named_by_kind():
    assert scalars(ROW) == {
        "train/loss": 2.5,
        "train/skipped": 0.0,
        "train/update_rms/muon": 0.2,
        "balance/layer1/max_violation": 0.4,
        "balance/layer1/dead": 0.0,
    }
    assert scalars({"kind": "validation", "step": 3, "bits_per_byte": 2.0}) == {"validation/bits_per_byte": 2.0}
    assert scalars({"kind": "probe", "step": 3, "x": 1.0}) == {}


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_remote_trackers_through_their_interface(name, tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType(name)
    fake.init = lambda **more: calls.append(("init", more))
    fake.log = lambda numbers, step: calls.append(("log", numbers, step))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, fake)
    with MetricsLog(tmp_path / "mine", [open_tracker(name, tmp_path / "mine", preset("tiny"))]) as log:
        log.append(ROW)
        log.append({"kind": "sample", "step": 3, "prompt": "a", "text": "b"})
    (_, start), logged, end = calls
    assert start["project"] == "tercet" and start["name"] == "mine" and start["config"]["preset"] == "tiny"
    assert logged == ("log", scalars(ROW), 3) and end == ("finish",)
    assert json.loads((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()[0]) == ROW


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_tracker("tensorboard", tmp_path, preset("tiny"))
    sink.write(ROW)
    sink.write({"kind": "sample", "step": 3, "prompt": "a", "text": "b"})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (3, 2.5)


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_names_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"tercet\[trackers\]"):
        open_tracker(name, tmp_path, preset("tiny"))


def test_an_unknown_tracker_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        open_tracker("wandbe", tmp_path, preset("tiny"))


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys, tercet.bridge.trackers\n"
        "print([name for name in ('wandb', 'trackio', 'tensorboard') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
