"""``metrics.jsonl`` survives crashes, resumes without telling a step twice, and says which line is broken."""

import json
import math

import pytest

from tercet.errors import DataError, StorageError, TercetWarning
from tercet.train.metrics import METRICS, MetricsLog, finite, read_metrics


def _train(step: int, **more) -> dict:
    return {"kind": "train", "step": step, "loss": 3.0, **more}


class Recorder:
    def __init__(self, fail_at: int | None = None):
        self.rows, self.closed, self.fail_at = [], False, fail_at

    def write(self, row):
        if row["step"] == self.fail_at:
            raise RuntimeError("the network is down")
        self.rows.append(row)

    def close(self):
        self.closed = True


def test_rows_come_back_in_order_and_reach_every_sink(tmp_path):
    one, two = Recorder(), Recorder()
    rows = [_train(1), {"kind": "validation", "step": 1, "loss": 2.0, "bits_per_byte": 1.5}, _train(2)]
    with MetricsLog(tmp_path / "run", [one, two]) as log:
        for row in rows:
            log.append(row)
    assert read_metrics(tmp_path / "run") == rows == one.rows == two.rows
    assert one.closed and two.closed


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []
    MetricsLog(tmp_path)
    assert read_metrics(tmp_path) == []


def test_numbers_that_are_not_finite_become_null(tmp_path):
    MetricsLog(tmp_path).append(_train(1, grad_norm=math.nan, balance={3: {"load": [0.5, math.inf], "dead": 0}}))
    text = (tmp_path / METRICS).read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert row["grad_norm"] is None
    assert row["balance"] == {"3": {"load": [0.5, None], "dead": 0}}
    assert finite((1, -math.inf, "nan", True)) == [1, None, "nan", True]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_dropped_wherever_it_tore(tmp_path, cut):
    log = MetricsLog(tmp_path)
    for step in range(3):
        log.append(_train(step))
    path = tmp_path / METRICS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert len(whole.splitlines()[-1]) > 39
    kept = 3 if cut == 1 else 2  # the first byte lost is only the line end
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(kept))
    again = MetricsLog(tmp_path)
    again.append(_train(9))
    assert [row["step"] for row in read_metrics(tmp_path)] == [*range(kept), 9]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\0" * 64 + b"\n", b"\xff\xfe", b'{"kind": "train", "st\n'])
def test_a_garbage_tail_is_dropped(tmp_path, tail):
    MetricsLog(tmp_path).append(_train(1))
    with open(tmp_path / METRICS, "ab") as handle:
        handle.write(tail)
    assert len(read_metrics(tmp_path)) == 1
    MetricsLog(tmp_path).append(_train(2))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("what is this", "line 2 is not a metrics row: 'what is this'"),
        ("", "line 2 is not a metrics row"),
        ("[1, 2]", "line 2 is not a metrics row"),
        ('{"kind": "trian", "step": 1}', "kind 'trian'"),
        ('{"kind": "train", "step": "1"}', "step '1'"),
        ('{"kind": "train"}', "step None"),
    ],
)
def test_garbage_in_the_middle_names_the_line(tmp_path, line, message):
    good = json.dumps(_train(1))
    (tmp_path / METRICS).write_text(f"{good}\n{line}\n{good}\n")
    for act in (read_metrics, MetricsLog):
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 2") as caught:
            act(tmp_path)
        assert message in str(caught.value)


def test_a_bad_row_is_refused_before_it_is_written(tmp_path):
    log = MetricsLog(tmp_path)
    for row in ({"kind": "train"}, {"step": 3}, {"kind": "train", "step": True}):
        with pytest.raises(DataError, match="kind"):
            log.append(row)
    assert read_metrics(tmp_path) == []


def test_truncate_after_keeps_what_the_checkpoint_knows(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 2, 3, 4):
        log.append(_train(step))
    before = (tmp_path / METRICS).read_bytes().splitlines()
    assert log.truncate_after(2) == 2
    assert (tmp_path / METRICS).read_bytes().splitlines() == before[:3]
    assert log.truncate_after(2) == 0
    log.append(_train(3))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_failing_tracker_is_dropped_and_training_goes_on(tmp_path):
    good, bad = Recorder(), Recorder(fail_at=2)
    log = MetricsLog(tmp_path, [bad, good])
    log.append(_train(1))
    with pytest.warns(TercetWarning, match="Recorder failed .*the network is down"):
        log.append(_train(2))
    log.append(_train(3))
    assert [row["step"] for row in good.rows] == [1, 2, 3]
    assert [row["step"] for row in bad.rows] == [1]
    assert len(read_metrics(tmp_path)) == 3


def test_an_unwritable_place_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, DataError), match="file"):
        MetricsLog(tmp_path / "file")
    log = MetricsLog(tmp_path / "run")
    (tmp_path / "run" / METRICS).unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(StorageError, match="cannot write"):
        log.append(_train(1))
