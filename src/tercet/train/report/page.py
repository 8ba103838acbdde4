"""Lays the figures, samples and settings of a run out as one HTML page or one SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import tercet
from tercet.errors import ConfigError
from tercet.presets import preset
from tercet.train.report import figures, style
from tercet.train.report.figures import HALF, WIDE, Panel, spread
from tercet.train.report.run import Run
from tercet.train.report.svg import Figure, clean, rectangle, text
from tercet.util.settings import difference, to_dict
from tercet.util.text import count, duration

MAX_SAMPLES = 12
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses any request that something on the page might make."""


def html(run: Run) -> str:
    """Return the whole page."""
    cards = "".join(_card(panel) for panel in figures.panels(run))
    title = _safe(f"{run.name} — tercet")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{style.COLOURS}{style.DRAWING}{style.PAGE}</style></head><body><main>"
        f"{_head(run)}{_outcome(run)}"
        f'<div class="figures">{cards}</div>'
        f"{_samples(run)}{_settings(run)}"
        f"<footer>Written by tercet {tercet.__version__} from {_safe(run.name)}/metrics.jsonl. “Report” in the "
        "captions is the Kimi K3 technical report.</footer>"
        f'</main><div id="tip" hidden></div><script>{style.SCRIPT}</script></body></html>\n'
    )


def _safe(content: str) -> str:
    return escape(clean(content))


def _head(run: Run) -> str:
    kind = f"preset <b>{_safe(run.config.preset)}</b> · " if run.config else ""
    remarks = "".join(f'<p class="remark">{_safe(remark)}</p>' for remark in run.remarks)
    return f'<h1>{_safe(run.name)}</h1><p class="status">{kind}{_safe(run.status)}</p>{remarks}'


def _outcome(run: Run) -> str:
    """The numbers that matter: a bar each for the model and the compressors, and tiles beside them."""
    tokens, seconds = run.number("tokens"), run.number("training_seconds")
    total, active = run.number("parameters"), run.number("active_parameters")
    rate = tokens / seconds if tokens and seconds else run.number("tokens_per_second")
    tiles = [
        ("tokens trained on", count(tokens) if tokens is not None else "—", ""),
        ("training time", duration(seconds) if seconds is not None else "—", ""),
        ("tokens per second", count(rate) if rate is not None else "—", ""),
        ("parameters", count(total) if total is not None else "—", f", {count(active)} active" if active else ""),
    ]
    cells = "".join(
        f'<div class="card tile"><div class="n">{value}</div><div class="w">{label}{more}</div></div>'
        for label, value, more in tiles
    )
    bars = _bars(run)
    label = "bits per byte beside gzip and xz"
    drawing = bars.inline(label) if bars else '<div class="none">not evaluated yet</div>'
    size = run.number("validation_bytes")
    same = f"on the same {size:,.0f} bytes of held-out text" if size else "on held-out text"
    return (
        f'<div class="outcome"><div class="card"><h2>Bits per byte</h2>{drawing}'
        f'<figcaption>{same}; less is better</figcaption></div><div class="tiles">{cells}</div></div>'
    )


def _bars(run: Run) -> Figure | None:
    rows = [
        (name, value, look)
        for name, value, look in (
            (run.config.preset if run.config else "model", run.number("bits_per_byte"), "f0"),
            ("gzip -9", run.number("gzip_bits_per_byte"), "bar"),
            ("xz -9", run.number("xz_bits_per_byte"), "bar"),
        )
        if value is not None
    ]
    if not rows or rows[0][2] != "f0":
        return None
    longest, left, right = max(value for _, value, _ in rows), 66.0, 470.0
    parts = []
    for n, (name, value, look) in enumerate(rows):
        y, length = 4 + 34.0 * n, (right - left) * value / longest
        parts.append(text(left - 10, y + 17, name, "end title" if look == "f0" else "end label"))
        fill = "f0" if look == "f0" else "quiet"
        parts.append(rectangle(left, y, length, 24, fill, rx="4"))
        parts.append(text(left + length + 8, y + 17, f"{value:.3f}", "value"))
    return Figure(HALF, 8 + 34.0 * len(rows), "".join(parts))


def _card(panel: Panel) -> str:
    wide = " wide" if panel.wide else ""
    drawing = panel.figure.inline(panel.title) if panel.figure else '<div class="none">nothing recorded yet</div>'
    return (
        f'<figure class="card{wide}" id="{panel.key}"><h2>{_safe(panel.title)}</h2>{drawing}'
        f"<figcaption>{_safe(panel.caption)}</figcaption></figure>"
    )


def _samples(run: Run) -> str:
    shown = spread(run.samples, MAX_SAMPLES)
    rows = "".join(
        f'<div class="sample"><div class="at">step {row["step"]:,}</div><pre><span class="p">'
        f"{_safe(str(row.get('prompt', '')))}</span>{_safe(str(row.get('text', '')))}</pre></div>"
        for row in shown
    )
    if not rows:
        rows = '<div class="none">nothing recorded yet</div>'
    remark = f" {len(shown)} of {len(run.samples)} are shown." if len(shown) < len(run.samples) else ""
    return (
        '<section class="below card" id="samples"><h2>What it writes</h2>'
        f"{rows}<figcaption>Greyed: the beginning it was given, from a held-out file. After it: the model's own "
        f"continuation at that step.{remark}</figcaption></section>"
    )


def _settings(run: Run) -> str:
    if run.config is None:
        body = '<div class="none">config.json is missing</div>'
    else:
        try:
            rows = [row.partition(": ") for row in difference(preset(run.config.preset), run.config)]
            listed = "".join(f"<tr><th>{_safe(key)}</th><td>{_safe(change)}</td></tr>" for key, _, change in rows)
            changed = f"<table>{listed}</table>" if listed else "<p>None: this is the preset as it stands.</p>"
        except ConfigError:
            changed = f"<p>There is no preset {_safe(run.config.preset)!r} to compare with.</p>"
        body = (
            f"<h3>Different from the preset {_safe(run.config.preset)}</h3>{changed}"
            f"<details><summary>All settings</summary>{_tables(to_dict(run.config))}</details>"
        )
    return f'<section class="below card" id="settings"><h2>Settings</h2>{body}</section>'


def _tables(data: Mapping[str, Any], name: str = "") -> str:
    """Return one table of the plain settings of *data*, then those of each group in it."""
    plain = "".join(
        f"<tr><th>{_safe(key)}</th><td>{_safe(str(value))}</td></tr>"
        for key, value in data.items()
        if not isinstance(value, Mapping)
    )
    groups = "".join(_tables(value, f"{name}{key}.") for key, value in data.items() if isinstance(value, Mapping))
    heading = f"<h3>{_safe(name.rstrip('.'))}</h3>" if name and plain else ""
    return f"{heading}<table>{plain}</table>{groups}"


def picture(run: Run) -> str:
    """Return a standalone SVG of the run's main figures, for a README."""
    rows: list[Sequence[Panel]] = [
        (figures.compression(run), figures.loss(run)),
        (figures.expert_load(run, only=1),),
        (figures.mixing(run, HALF), figures.violation(run)),
        (figures.decay(run, tall=20.0),),
    ]
    parts, top = list(_picture_head(run)), 92.0
    for row in rows:
        drawn = [panel for panel in row if panel.figure is not None]
        high = 0.0
        for n, panel in enumerate(drawn):
            assert panel.figure is not None
            x = 24.0 + n * (WIDE - HALF)
            parts.append(text(x, top, panel.title, "panel"))
            parts.append(panel.figure.placed(x, top + 14))
            high = max(high, panel.figure.height)
        top += high + 50 if drawn else 0.0
    width, height = WIDE + 48, max(top - 10, 130.0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img"><title>{_safe(run.name)}: {_safe(figures.caption_numbers(run))}</title>'
        f"<style>{style.COLOURS}{style.DRAWING}</style>"
        f'<rect width="100%" height="100%" rx="14" fill="var(--card)"/>{"".join(parts)}</svg>\n'
    )


def _picture_head(run: Run) -> Iterator[str]:
    name = run.config.preset if run.config else run.name
    yield text(24, 42, f"tercet {name}: {run.status}", "headline")
    rivals = [
        f"{label} {value:.2f}"
        for label, key in (("gzip -9", "gzip_bits_per_byte"), ("xz -9", "xz_bits_per_byte"))
        if (value := run.number(key)) is not None
    ]
    beside = f" ({', '.join(rivals)} on the same bytes)" if rivals else ""
    yield text(24, 64, figures.caption_numbers(run) + beside, "subline")
