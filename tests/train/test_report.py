"""The page: complete at every stage of a run, free of outside references, and safe from what a model writes."""

import json
import math
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from tercet.cli.main import main
from tercet.errors import DataError
from tercet.presets import preset
from tercet.train.report import write_picture, write_report
from tercet.train.report.figures import MAX_COLUMNS, smooth, spread
from tercet.train.report.svg import Line, Scale, chart, clean, png, short
from tercet.util.settings import override, to_dict

SECTIONS = [
    "compression",
    "loss",
    "learning-rate",
    "gradients",
    "experts",
    "violation",
    "speed",
    "mixing",
    "decay",
    "samples",
    "settings",
]
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a browser would see."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.stack, self.ids, self.addresses, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "action", "data", "srcset") or name.startswith("on"):
                self.addresses.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if not self.stack or self.stack[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def _train_row(step: int, layers=(1, 2, 3), experts: int = 16) -> dict:
    random = np.random.default_rng(step)
    load = {str(layer): random.dirichlet(np.ones(experts) * step).tolist() for layer in layers}
    return {
        "kind": "train",
        "step": step,
        "loss": 8.3 - math.log(step),
        "mtp_loss": None,
        "lr": 4e-3 / step,
        "tokens": 4096 * step,
        "seconds": 0.5 * step,
        "tokens_per_second": 8000.0 + step,
        "grad_norm": 1.0 + 1.0 / step,
        "grad_norm_router": 0.01,
        "grad_norm_embedding": 0.3,
        "skipped": False,
        "qk_clipped_heads": 0,
        "balance": {
            layer: {"max_violation": max(shares) * experts - 1, "cv": 0.1, "dead": 0, "load": shares}
            for layer, shares in load.items()
        },
    }


def _probe_row(step: int, layers=(0, 1, 2), heads: int = 4) -> dict:
    histogram = np.random.default_rng(step).dirichlet(np.ones(32), size=heads).tolist()
    return {
        "kind": "probe",
        "step": step,
        "mixes": [
            {"layer": 0, "place": "mlp", "weights": [0.75, 0.25], "rms": [0.02, 1.5]},
            {"layer": 1, "place": "attention", "weights": [0.4321, 0.5679], "rms": [0.02, 1.5]},
            {"layer": 4, "place": "output", "weights": [0.2, 0.3, 0.5], "rms": [0.02, 1.5, 1.25]},
        ],
        "half_life_edges": [2.0 ** (n / 2) for n in range(-6, 27)],
        "decay": {
            str(layer): {"histogram": histogram, "half_life": [3.25] * heads, "near_floor": 0.1, "near_one": 0.2}
            for layer in layers
        },
        "load": {},
    }


SUMMARY = {
    "training_seconds": 151.2,
    "bits_per_byte": 1.8765,
    "gzip_bits_per_byte": 2.1234,
    "xz_bits_per_byte": 1.8012,
    "validation_bytes": 1_234_567,
    "tokens": 2_457_600,
    "parameters": 3_141_592,
    "active_parameters": 1_500_000,
}


def _write(directory, rows, *, config=True, summary=None):
    directory.mkdir(exist_ok=True)
    settings = override(preset("tiny"), {"train.steps": 40, "optim.lr": 2e-3})
    if config:
        (directory / "config.json").write_text(json.dumps(to_dict(settings)))
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))
    if rows is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _rows(steps: int = 40, sample: str = "def f(x):\n    return x", **more) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        rows.append(_train_row(step, **more))
        if step % 10 == 0:
            rows.append({"kind": "validation", "step": step, "loss": 3.0, "bits_per_byte": 3.0 - step / 40})
            rows.append(_probe_row(step))
            rows.append({"kind": "sample", "step": step, "prompt": "import ", "text": sample})
    return rows


def _page(directory) -> Page:
    return Page(write_report(directory).read_text(encoding="utf-8"))


def _check_closed(page: Page, source: str) -> None:
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"base64,[\w+/=]*", "", source).lower())
    assert "link" not in page.tags and "iframe" not in page.tags and page.tags.count("script") == 1
    assert "@import" not in source and "url(" not in source


def test_finished_run(tmp_path):
    run = _write(tmp_path / "demo", _rows(), summary=SUMMARY)
    page, source = _page(run), (run / "report.html").read_text(encoding="utf-8")
    _check_closed(page, source)
    assert [key for key in page.ids if key in SECTIONS] == list(SECTIONS)
    assert "nothing recorded yet" not in page.text
    for figure in ("1.877", "2.123", "1.801", "1,234,567 bytes", "2.46M", "2:31", "3.14M", "1.5M active"):
        assert figure in page.text
    assert "finished, 40 steps" in page.text
    assert "0.43" in page.text and "layer 1 attention" in page.text and "layer 2 head 3" in page.text
    assert "optim.lr" in page.text and "0.01 → 0.002" in page.text and "full_attention_layers" in page.text
    assert page.text.count("import def f(x):") == 4
    assert "report §2.2" in page.text and "report §2.1.1" in page.text and "report §2.3.3" in page.text


def test_stopped_run_without_summary(tmp_path):
    run = _write(tmp_path / "stopped", _rows(25))
    with open(run / "metrics.jsonl", "a") as handle:
        handle.write('{"kind": "train", "step": 26, "lo')
    page = _page(run)
    assert "step 25 of 40" in page.text and "2.500" in page.text
    assert "102k" in page.text and "12.5 s" in page.text


@pytest.mark.parametrize("rows", [None, []])
def test_empty_run(tmp_path, rows):
    run = _write(tmp_path / "empty", rows)
    page = _page(run)
    _check_closed(page, (run / "report.html").read_text(encoding="utf-8"))
    assert [key for key in page.ids if key in SECTIONS] == list(SECTIONS)
    assert page.text.count("nothing recorded yet") == len(SECTIONS) - 1
    assert "no steps yet" in page.text and "not evaluated yet" in page.text


def test_a_bare_directory_and_one_step(tmp_path):
    assert "config.json is missing" in _page(_write(tmp_path / "bare", None, config=False)).text
    page = _page(_write(tmp_path / "one", [_train_row(1)], config=False))
    assert "1 steps" in page.text and "layer 3" in page.text


def test_what_cannot_be_read_is_said(tmp_path):
    run = _write(tmp_path / "odd", _rows(10))
    (run / "summary.json").write_text("{")
    (run / "config.json").write_text('{"preset": "tiny", "modle": {}}')
    text = _page(run).text
    assert "summary.json cannot be read" in text and "another version" in text and "did you mean 'model'" in text
    with pytest.raises(DataError, match="no run directory"):
        write_report(tmp_path / "nowhere")
    (run / "metrics.jsonl").write_text('oops\n{"kind": "train", "step": 1}\n')
    with pytest.raises(DataError, match="line 1"):
        write_report(run)


@pytest.mark.parametrize(
    "evil",
    [
        "</script><script>alert(1)</script>",
        "<b>bold</b> & <img src=x onerror=alert(1)>",
        "</pre></main></body>",
        "\" onmouseover='x'",
        "<!-- ]]> <svg/onload=alert(1)>",
        "&lt;already&gt;",
    ],
)
def test_samples_cannot_become_markup(tmp_path, evil):
    page = _page(_write(tmp_path / "evil", _rows(10, sample=evil)))
    assert evil in page.text
    assert page.tags.count("script") == 1 and "img" not in page.tags and "b" in page.tags
    assert not any("alert" in address for address in page.addresses)


def test_samples_of_any_bytes_can_be_written(tmp_path):
    page = _page(_write(tmp_path / "bytes", _rows(10, sample="a\x00b\x1b[31m\ud800é\u2028\x85\uffff")))
    assert "a␀b␛[31m" in page.text and "é" in page.text and "\x00" not in page.text


def test_numbers_that_are_not_finite_leave_gaps(tmp_path):
    rows = _rows(20)
    for row in rows[4:12]:
        row.update({key: None for key in row if key in ("loss", "grad_norm", "lr", "bits_per_byte")})
    rows[3]["loss"], rows[13]["grad_norm"], rows[15]["loss"] = math.nan, math.inf, -math.inf
    rows[5]["balance"] = {"1": {"max_violation": None, "load": [None] * 16}}
    run = _write(tmp_path / "gaps", rows)
    source = write_report(run).read_text(encoding="utf-8")
    drawing = "".join(re.findall(r'(?: d| x| y| cx| cy|width|height)="([^"]*)"', source))
    assert "nan" not in drawing and "inf" not in drawing
    ElementTree.parse(write_picture(run))


def test_everything_not_finite(tmp_path):
    rows = [{**_train_row(step), "loss": math.nan, "grad_norm": math.nan, "balance": {}} for step in (1, 2)]
    probe = _probe_row(2)
    for mix in probe["mixes"]:
        mix["weights"], mix["rms"] = [None] * len(mix["weights"]), [None] * len(mix["rms"])
    for entry in probe["decay"].values():
        entry["half_life"] = [None] * 4
    Page(write_report(_write(tmp_path / "nan", [*rows, probe])).read_text(encoding="utf-8"))


def test_a_deep_and_wide_model_stays_a_small_page(tmp_path):
    rows = [_train_row(step, layers=range(1, 13), experts=256) for step in range(1, 31)]
    rows.append(_probe_row(30, layers=range(20), heads=16))
    run = _write(tmp_path / "wide", rows)
    page = _page(run)
    assert "6 of 12 layers are drawn" in page.text and "worst layer" in page.text
    assert "layer 19" in page.text and "layer 19 head" not in page.text
    assert (run / "report.html").stat().st_size < 1_000_000


def test_picture_stands_alone(tmp_path):
    run = _write(tmp_path / "demo", _rows(), summary=SUMMARY)
    path = write_picture(run, tmp_path / "docs" / "report.svg")
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join("".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    for figure in ("1.88 bits per byte", "gzip -9 2.12", "Attention Residuals", "KDA decay", "Expert load"):
        assert figure in words
    assert path.read_text().count("http") == 1
    ElementTree.parse(write_picture(_write(tmp_path / "empty", None)))


def test_verb(tmp_path, capsys):
    run = _write(tmp_path / "demo", _rows(10))
    assert main(["report", str(run), "--picture", str(tmp_path / "p.svg")]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(tmp_path / "p.svg")]
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run directory" in capsys.readouterr().err


def test_heat_map_image_decodes_to_its_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    data = png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (7, 5, 8, 6, 0, 0, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 29)
    assert not lines[:, 0].any() and np.array_equal(lines[:, 1:].reshape(5, 7, 4), pixels)


def test_chart_puts_points_where_the_axes_say():
    figure = chart([Line("a", [0, 10], [1.0, 3.0], 0)], width=200, height=100)
    (path,) = re.findall(r'<path d="(M[\d. L]+)" class="line s0 "/>', figure.body)[:1]
    (x1, y1), (x2, y2) = (map(float, point.split()) for point in path[1:].split("L"))
    assert (x1, x2) == (46, 188) and y1 > y2
    scale = Scale(0.9, 3.1, 66, 26)
    assert (y1, y2) == (pytest.approx(scale(1.0), abs=0.06), pytest.approx(scale(3.0), abs=0.06))
    assert chart([Line("a", [0], [None], 0)]) is None and chart([]) is None
    assert chart([Line("a", [1], [0.0], 0)], logarithmic=True) is None


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-3.0, 1e4), (1.79, 1.81), (1e-7, 2e-7)])
def test_ticks_are_round_and_inside(bounds):
    for logarithmic in (False, True):
        if logarithmic and bounds[0] <= 0:
            continue
        ticks = Scale(*bounds, 0, 1, logarithmic).ticks()
        assert all(bounds[0] - 1e-12 <= tick <= bounds[1] * (1 + 1e-12) for tick in ticks)
        assert logarithmic or 2 <= len(ticks) <= 11


def test_long_runs_are_averaged_into_the_heat_map(tmp_path):
    run = _write(tmp_path / "long", [_train_row(step, layers=(1,)) for step in range(1, 601)])
    source = write_report(run).read_text(encoding="utf-8")
    assert source.count("busiest: expert") <= MAX_COLUMNS and "steps 1 to 3" in source


def test_small_helpers():
    assert smooth([4.0, None, 2.0], 0.5) == [4.0, None, pytest.approx((0.25 * 4 + 0.5 * 2) / 0.75)]
    assert spread(list(range(10)), 4) == [0, 3, 6, 9] and spread([1, 2], 5) == [1, 2] and spread([1, 2, 3], 1) == [2]
    assert [short(v) for v in (None, math.nan, 0, 0.01234, 12345.6, 1.5e-7, 2.0e9)] == [
        "—", "—", "0", "0.0123", "12,346", "1.5e-7", "2e9",
    ]  # fmt: skip
    assert clean("a\nb\tc\r") == "a\nb\tc␍"
