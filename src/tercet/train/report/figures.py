"""The figures of a report, each from the rows of a run: what it shows, and a sentence on how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tercet.train.metrics import Row
from tercet.train.report.run import Run, last
from tercet.train.report.svg import (
    LEFT,
    RIGHT,
    Figure,
    Line,
    Rule,
    Scale,
    chart,
    raster,
    rectangle,
    short,
    text,
)

WIDE = 1060.0
HALF = 520.0
MAX_COLUMNS = 240
"""Columns of an expert heat map; more steps are averaged in groups."""
MAX_PANELS = 6
"""Layers drawn one by one; of more, this many evenly spread."""
MAX_RIDGES = 24
"""Heads drawn one by one; of more, the mean of each layer."""
EMBEDDING = "embedding"


@dataclass(frozen=True)
class Panel:
    """One figure with its words."""

    key: str
    title: str
    figure: Figure | None
    """None when the run has nothing for it yet."""
    caption: str
    wide: bool = False


def panels(run: Run) -> list[Panel]:
    """Return all panels in the order of the page."""
    return [
        compression(run),
        loss(run),
        learning_rate(run),
        gradient_norms(run),
        expert_load(run),
        violation(run),
        speed(run),
        mixing(run),
        decay(run),
    ]


def _series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float | None]]:
    return [row["step"] for row in rows], [row.get(key) for row in rows]


def _has(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the bias-corrected exponential average of *values*; gaps stay gaps and are not averaged over."""
    out: list[float | None] = []
    total, share = 0.0, 0.0
    for value in values:
        if value is not None:
            total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        out.append(total / share if value is not None else None)
    return out


def compression(run: Run, width: float = HALF) -> Panel:
    """Held-out bits per byte against the two compressors."""
    rules = [
        Rule(f"{name} {value:.2f}", value)
        for name, key in (("gzip -9", "gzip_bits_per_byte"), ("xz -9", "xz_bits_per_byte"))
        if (value := run.number(key)) is not None
    ]
    whole, part = _whole_and_part(run.validation)
    lines = [
        Line("on a part of it", *_series(part, "bits_per_byte"), 0, "dots"),
        Line(
            "on all of it" if part else "held-out bits per byte",
            *_series(whole, "bits_per_byte"),
            1 if part else 0,
            "dots",
        ),
    ]
    figure = chart([line for line in lines if line.xs], width=width, rules=rules, end_marks=True)
    return Panel(
        "compression",
        "Bits per byte on held-out text",
        figure,
        "How many bits the model needs for a byte of files it has not seen; lower is better. "
        + (
            "Below a dashed line it compresses them better than that program does the same bytes."
            if rules
            else "Unlike the loss, this can be compared between vocabularies and with compressors."
        ),
    )


def _whole_and_part(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Part evaluations of a split and those of more of it: their values must not be joined by a line."""
    sizes = [row["bytes"] for row in rows if row.get("bytes")]
    limit = max(sizes, default=0)
    whole = [row for row in rows if (row.get("bytes") or limit) == limit]
    return whole, [row for row in rows if row not in whole]


def loss(run: Run, width: float = HALF) -> Panel:
    """Training, validation and multi-token-prediction loss."""
    steps, values = _series(run.train, "loss")
    lines = [
        Line("each step", steps, values, 0, "faint", legend=False),
        Line("training", steps, smooth(values, 0.9), 0),
        *(
            Line("validation", *_series(rows, "loss"), 1, "dots", legend=not n)
            for n, rows in enumerate(rows for rows in _whole_and_part(run.validation) if rows)
        ),
    ]
    if _has(run.train, "mtp_loss"):
        steps, values = _series(run.train, "mtp_loss")
        lines.append(Line("token after next (MTP)", steps, smooth(values, 0.9), 3, "dashed"))
    return Panel(
        "loss",
        "Loss",
        chart([line for line in lines if line.xs], width=width),
        "Nats per token, smoothed over about ten steps. Training and validation together: it is learning; training "
        "falling alone: it is memorising.",
    )


def learning_rate(run: Run) -> Panel:
    """The schedule as it was applied."""
    kind = run.config.schedule.kind if run.config else "the"
    return Panel(
        "learning-rate",
        "Learning rate",
        chart([Line("learning rate", *_series(run.train, "lr"), 2)]),
        f"The {kind} schedule. K3 warms up over the first 1 % of steps and then follows a cosine (report §3.2).",
    )


def gradient_norms(run: Run) -> Panel:
    """Norms before clipping."""
    names = {"grad_norm": "all", "grad_norm_embedding": "embedding", "grad_norm_router": "routers"}
    lines = [Line(name, *_series(run.train, key), n) for n, (key, name) in enumerate(names.items())]
    skipped = sum(bool(row.get("skipped")) for row in run.train)
    clipped = max((row.get("qk_clipped_heads") or 0 for row in run.train), default=0)
    events = [
        f"{skipped} steps had no finite gradient and were skipped." if skipped else "No step was skipped.",
        f"QK-Clip held back at most {clipped} heads in a step." if clipped else "",
    ]
    limit = (
        [Rule(f"clipped above {run.config.optim.grad_clip:g}", run.config.optim.grad_clip)]
        if run.config and _has(run.train, "grad_norm")
        else []
    )
    return Panel(
        "gradients",
        "Gradient norms",
        chart([line for line in lines if line.xs], rules=limit, logarithmic=True),
        f"Before clipping{', which acts above the dashed line' if limit else ''}; the axis is logarithmic. Per-head "
        f"Muon and QK-Clip are there to keep this free of spikes (report §2.5). {' '.join(events)}".strip(),
    )


def speed(run: Run) -> Panel:
    """Tokens per second."""
    steps, values = _series(run.train, "tokens_per_second")
    lines = [
        Line("each step", steps, values, 2, "faint", legend=False),
        Line("tokens per second", steps, smooth(values, 0.9), 2),
    ]
    return Panel(
        "speed",
        "Throughput",
        chart([line for line in lines if line.xs]),
        "Tokens trained per second of optimiser steps; evaluation and checkpoints are not counted.",
    )


def _layers(rows: Sequence[Row]) -> list[str]:
    return sorted({layer for row in rows for layer in row.get("balance") or {}}, key=int)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most *count* of *items*, evenly spread, the first and the last among them; the middle one of one."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[len(items) // 2]]
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


def expert_load(run: Run, width: float = WIDE, only: int = MAX_PANELS) -> Panel:
    """Heat map of every expert's load over the steps, one strip a layer."""
    layers = _layers(run.train)
    shown = spread(layers, only)
    parts, top = [], 0.0
    for layer in shown:
        figure = _load_strip(run.train, layer, width, layer == shown[-1])
        if figure is not None:
            parts.append(figure.placed(0, top))
            top += figure.height + 12
    remark = f" {len(shown)} of {len(layers)} layers are drawn." if len(shown) < len(layers) else ""
    return Panel(
        "experts",
        "Expert load",
        Figure(width, top, "".join(parts)) if parts else None,
        "One row an expert, one column a step: red has more than its fair share of the tokens, blue less, blank is "
        "balanced. Quantile Balancing sets each step's bias from the scores of the step before, so the colour should "
        f"fade within a few steps (report §2.3.3).{remark}",
        wide=True,
    )


def _load_strip(rows: Sequence[Row], layer: str, width: float, is_last: bool) -> Figure | None:
    """One layer: title with MaxVio at the right, heat map, and steps below the last one."""
    kept = [(row["step"], row["balance"][layer]) for row in rows if layer in (row.get("balance") or {})]
    kept = [(step, entry) for step, entry in kept if entry.get("load")]
    if not kept:
        return None
    experts = len(kept[-1][1]["load"])
    loads_SE = np.array([[np.nan if v is None else v for v in entry["load"]] for _, entry in kept], dtype=float)
    groups = np.array_split(np.arange(len(kept)), min(len(kept), MAX_COLUMNS))
    columns_CE = np.stack([loads_SE[group].mean(0) for group in groups])
    high = min(max(4.0 * experts, 56.0), 150.0)
    left, right, top = LEFT, width - RIGHT, 22.0
    newest = [entry.get("max_violation") for _, entry in kept[-20:] if entry.get("max_violation") is not None]
    now = f"MaxVio {short(sum(newest) / len(newest))} over the last {len(newest)} steps" if newest else ""
    parts = [
        text(left, 13, f"layer {layer}", "title"),
        text(right, 13, now, "label end"),
        rectangle(left, top, right - left, high, "frame"),
        raster(columns_CE.T * experts, left, top, right - left, high),
        text(left - 6, top + 9, "0", "tick end"),
        text(left - 6, top + high, str(experts - 1), "tick end"),
    ]
    step = (right - left) / len(groups)
    for n, group in enumerate(groups):
        first, end = kept[group[0]][0], kept[group[-1]][0]
        column = columns_CE[n]
        where = f"step {first:,}" if first == end else f"steps {first:,} to {end:,}"
        if not np.isnan(column).any():
            busy, idle = int(column.argmax()), int(column.argmin())
            where += f"\nbusiest: expert {busy}, {column[busy] * experts:.2f}× its share"
            where += f"\nidlest: expert {idle}, {column[idle] * experts:.2f}×"
        parts.append(rectangle(left + n * step, top, step, high, "strip", where))
    height = top + high
    if is_last:
        scale = Scale(kept[0][0] - 0.5, kept[-1][0] + 0.5, left, right)
        parts += [
            text(scale(v), height + 15, f"{int(v):,}", "tick middle") for v in scale.ticks(8) if float(v).is_integer()
        ]
        parts.append(text((left + right) / 2, height + 30, "step", "tick middle"))
        height += 34
    return Figure(width, height, "".join(parts))


def violation(run: Run, width: float = HALF) -> Panel:
    """MaxVio of each layer over the steps."""
    layers = _layers(run.train)
    series = {
        layer: [((row.get("balance") or {}).get(layer) or {}).get("max_violation") for row in run.train]
        for layer in layers
    }
    steps = [row["step"] for row in run.train]
    if len(layers) <= MAX_PANELS:
        lines = [Line(f"layer {layer}", steps, smooth(series[layer], 0.7), n) for n, layer in enumerate(layers)]
    else:
        table = np.array([[np.nan if v is None else v for v in row] for row in series.values()], dtype=float)
        whole = ~np.isnan(table).any(0)
        picks = (("worst layer", np.max, 4), ("median layer", np.median, 0), ("best layer", np.min, 2))
        lines = [
            Line(
                name,
                steps,
                smooth([float(pick(table[:, n])) if whole[n] else None for n in range(len(steps))], 0.7),
                colour,
            )
            for name, pick, colour in picks
        ]
    return Panel(
        "violation",
        "Load imbalance (MaxVio)",
        chart(lines, width=width, logarithmic=True) if lines else None,
        "The busiest expert's load over the mean load, minus 1, over each training batch; 0 is perfect. The floor is "
        "sampling noise, higher the fewer tokens an expert sees in a step (report appendix C and D).",
    )


def mixing(run: Run, width: float = WIDE) -> Panel:
    """Heat map of the mean Attention-Residuals weights."""
    probe = next((row for row in reversed(run.probes) if row.get("mixes")), None)
    return Panel(
        "mixing",
        "Attention Residuals: which sub-layer reads which block",
        _mixing_figure(probe, run, width) if probe else None,
        "Each row is one read: an attention or feed-forward sub-layer, or the output. Its weights over the embedding "
        "and the sums of earlier blocks add up to 1; the last one of a row is the block in progress. All rows start "
        "uniform, because the queries start at zero; what differs now was learned (report §2.2)."
        + (f" At step {probe['step']:,}, on held-out text." if probe else ""),
        wide=True,
    )


def _mixing_figure(probe: Row, run: Run, width: float) -> Figure:
    mixes = probe["mixes"]
    columns = max(len(mix["weights"]) for mix in mixes)
    left, top, row_height = 132.0, 26.0, 22.0 if len(mixes) <= 40 else 12.0
    step = min((width - left - RIGHT) / columns, 150.0)
    parts = [text(left + (n + 0.5) * step, 15, _source(n, run), "tick middle") for n in range(columns)]
    for row, mix in enumerate(mixes):
        y = top + row * row_height
        name = "output" if mix["place"] == "output" else f"layer {mix['layer']} {mix['place']}"
        parts.append(text(left - 8, y + row_height / 2 + 3.5, name, "tick end"))
        for n, weight in enumerate(mix["weights"]):
            if weight is None:
                continue
            rms = mix["rms"][n]
            tip = f"{name} reads {_source(n, run)}\nweight {weight:.3f}, RMS of the source {short(rms)}"
            parts.append(
                rectangle(
                    left + n * step + 1, y + 1, step - 2, row_height - 2, "cell", tip, fill_opacity=f"{weight:.3f}"
                )
            )
            if row_height > 16 and step > 34:
                look = "cellvalue middle" + (" strong" if weight > 0.55 else "")
                parts.append(text(left + (n + 0.5) * step, y + 15, f"{weight:.2f}", look))
    height = top + len(mixes) * row_height
    final = mixes[-1]
    if final["place"] == "output":
        parts.append(text(left - 8, height + 17, "RMS of the source", "tick end"))
        for n, rms in enumerate(final["rms"]):
            parts.append(text(left + (n + 0.5) * step, height + 17, short(rms), "tick middle"))
        height += 24
    return Figure(width, height, "".join(parts))


def _source(n: int, run: Run) -> str:
    if n == 0:
        return EMBEDDING
    size = run.config.model.attn_res_block_size if run.config else None
    if size == 1:
        return f"layer {n - 1}"
    return f"block {n}" if size is None else f"layers {(n - 1) * size}–{n * size - 1}"


def decay(run: Run, width: float = WIDE, tall: float = 30.0) -> Panel:
    """Ridges of the half-lives of every KDA head, at the first and at the newest probe."""
    probes = [row for row in run.probes if row.get("decay")]
    return Panel(
        "decay",
        "KDA decay: how long each head remembers",
        _decay_figure(probes[0], probes[-1], width, tall) if probes else None,
        "The distribution of half-lives over channels and tokens, per head; 8 tokens means that half of a memory is "
        "gone after 8 tokens. Filled: now. Thin line: at the first evaluation. The gate is bounded, so nothing fades "
        "faster than 0.14 tokens (report §2.1.1); heads that keep both fast and slow channels have learned to do "
        "short and long range at once." + (f" At step {probes[-1]['step']:,}, on held-out text." if probes else ""),
        wide=True,
    )


def _ridges(probe: Row) -> list[tuple[str, int, list[float], float | None]]:
    """Name, layer, histogram and half-life of every row: heads, or layer means if there are too many heads."""
    entries = sorted(probe["decay"].items(), key=lambda item: int(item[0]))
    heads = sum(len(entry["histogram"]) for _, entry in entries)
    rows: list[tuple[str, int, list[float], float | None]] = []
    for layer, entry in entries:
        histograms = np.array(entry["histogram"], dtype=float)
        if heads > MAX_RIDGES:
            lives = [v for v in entry["half_life"] if v is not None]
            rows.append((f"layer {layer}", int(layer), histograms.mean(0).tolist(), float(np.median(lives or [0]))))
            continue
        for head, (histogram, life) in enumerate(zip(histograms, entry["half_life"], strict=True)):
            rows.append((f"layer {layer} head {head}", int(layer), histogram.tolist(), life))
    return rows


def _decay_figure(first: Row, newest: Row, width: float, tall: float) -> Figure:
    edges = newest["half_life_edges"]
    rows, before = _ridges(newest), {row[0]: row[2] for row in _ridges(first)}
    step = tall if len(rows) <= 16 else 22.0
    held = [n for n in range(len(edges) - 1) if any(h[n] for h in (*(row[2] for row in rows), *before.values()))]
    edges = edges[max(0, held[0] - 3) : held[-1] + 5] if held else edges
    cut = slice(max(0, held[0] - 3), held[-1] + 4) if held else slice(None)
    left, top, lift = 106.0, 30.0, 1.5 * step
    x = Scale(edges[0], edges[-1], left, width - RIGHT - 54, logarithmic=True)
    peak = max([*(max(row[2]) for row in rows), *(max(h) for h in before.values())]) or 1.0
    base = top + lift - step / 2
    bottom = base + len(rows) * step
    ticks = [2.0**n for n in range(-3, 14) if edges[0] <= 2.0**n <= edges[-1]]
    parts = [f'<path d="M{x(t):.1f} {top}V{bottom:.1f}" class="grid"/>' for t in ticks]
    parts += [text(x(t), bottom + 15, short(t), "tick middle") for t in ticks]
    parts.append(text((left + x.end) / 2, bottom + 31, "half-life in tokens", "tick middle"))
    parts.append(text(width - RIGHT, 13, "at mean rate", "tick end"))
    colours = {layer: n for n, layer in enumerate(sorted({row[1] for row in rows}))}
    for n, (name, layer, histogram, life) in enumerate(rows):
        y, colour = base + (n + 1) * step - 4, colours[layer] % 6
        parts.append(
            f'<path d="{_ridge(histogram[cut], edges, x, y, lift / peak, closed=True)}" class="ridge f{colour}"/>'
        )
        if name in before and first["step"] != newest["step"]:
            parts.append(f'<path d="{_ridge(before[name][cut], edges, x, y, lift / peak)}" class="before"/>')
        parts.append(text(left - 8, y, name, "tick end"))
        if life is not None:
            parts.append(text(width - RIGHT, y, short(life), f"value end f{colour}"))
        mean = f"half-life at the mean rate: {short(life)} tokens"
        parts.append(rectangle(left, y - step + 2, x.end - left, step, "strip", f"{name}\n{mean}"))
    return Figure(width, bottom + 36, "".join(parts))


def _ridge(
    histogram: Sequence[float], edges: Sequence[float], x: Scale, y: float, gain: float, *, closed: bool = False
) -> str:
    """Return the outline of one histogram through the centres of its bins."""
    centres = [(low * high) ** 0.5 for low, high in pairwise(edges)]
    points = [f"{x(c):.1f} {y - gain * (share or 0.0):.1f}" for c, share in zip(centres, histogram, strict=True)]
    start, end = f"{x.start:.1f} {y:.1f}", f"{x.end:.1f} {y:.1f}"
    return f"M{start}L{'L'.join(points)}L{end}" + ("Z" if closed else "")


def caption_numbers(run: Run) -> str:
    """Return one line that says what came out, for the head of a page or picture."""
    bits, seconds, tokens = (run.number(key) for key in ("bits_per_byte", "training_seconds", "tokens"))
    parts = [
        f"{short(bits)} bits per byte on held-out text" if bits is not None else "",
        f"{tokens / 1e6:.2f} M tokens" if tokens else "",
        f"{seconds:,.0f} s of training" if seconds else "",
    ]
    final = last(run.train, "loss")
    if bits is None and final is not None:
        parts.insert(0, f"training loss {final:.3f}")
    return " · ".join(part for part in parts if part) or "nothing recorded yet"
