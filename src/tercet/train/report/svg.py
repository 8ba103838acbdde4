"""A small drawing kit: axes, lines and heat maps as SVG text, coloured by the classes of `style.COLOURS`.

Coordinates are SVG user units, about one pixel. Elements with ``data-tip`` show that text when pointed at (the page's
script does it; a picture file ignores it).
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Float

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 34
"""Margins of a chart around its plotting area."""
MAX_POINTS = 500
"""Points drawn of one line; longer ones are averaged in groups."""
MAX_STRIPS = 150
"""Places along an x axis that show a tip."""

Value = float | None


@dataclass(frozen=True)
class Figure:
    """A drawing of known size."""

    width: float
    height: float
    body: str

    def inline(self, label: str) -> str:
        """Return an ``<svg>`` element for an HTML page, as wide as its container."""
        box = f"0 0 {_n(self.width)} {_n(self.height)}"
        return f'<svg viewBox="{box}" role="img" aria-label="{escape(clean(label))}">{self.body}</svg>'

    def placed(self, x: float, y: float) -> str:
        """Return the drawing shifted to (x, y) of another one."""
        return f'<g transform="translate({_n(x)} {_n(y)})">{self.body}</g>'


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    """None is a gap."""
    colour: int
    look: str = ""
    """Further classes: ``faint``, ``dots``, ``dashed``."""
    legend: bool = True


@dataclass(frozen=True)
class Rule:
    """A horizontal line that others are measured against."""

    name: str
    y: float


def clean(text: str) -> str:
    """Return *text* with control characters made visible and lone surrogates replaced, so that any file can hold it."""
    shown = "".join(c if c in "\n\t" or ord(c) >= 32 else chr(0x2400 + ord(c)) for c in text)
    shown = "".join("\ufffd" if 0x7F <= ord(c) < 0xA0 or ord(c) in (0xFFFE, 0xFFFF) else c for c in shown)
    return shown.encode("utf-8", "replace").decode("utf-8")


def short(value: Value) -> str:
    """Write a number in three significant digits."""
    if value is None or not math.isfinite(value):
        return "—"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def text(x: float, y: float, content: str, look: str = "", **more: str) -> str:
    """Return a text element."""
    extra = "".join(f' {key.replace("_", "-")}="{escape(value)}"' for key, value in more.items())
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{look}"{extra}>{escape(clean(content))}</text>'


def rectangle(x: float, y: float, width: float, height: float, look: str, tip: str = "", **more: str) -> str:
    """Return a rectangle, with a tip if one is given."""
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    extra += f' data-tip="{escape(clean(tip))}"' if tip else ""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}" '
        f'class="{look}"{extra}/>'
    )


@dataclass(frozen=True)
class Scale:
    """Maps values to positions, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of *value*; beyond the range it is held at the edge."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values inside the range."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = max(1, round(len(decades) / count))
            tens = [10.0**n for n in decades[::every] if self.low <= 10.0**n <= self.high]
            return tens if len(tens) > 1 else [v for v in _one_two_five(decades) if self.low <= v <= self.high]
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _one_two_five(decades: Sequence[int]) -> Iterator[float]:
    for n in decades:
        yield from (m * 10.0**n for m in (1, 2, 5))


def fit(values: Sequence[Value], start: float, end: float, *, logarithmic: bool = False) -> Scale | None:
    """Return a scale that holds all finite *values* with a little room, or None if there is none."""
    known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not logarithmic)]
    if not known:
        return None
    low, high = min(known), max(known)
    if logarithmic:
        low, high = low / 1.15, high * 1.15
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - room, high + room
    return Scale(low, high, start, end, logarithmic)


def chart(
    lines: Sequence[Line],
    *,
    width: float = 520,
    height: float = 250,
    rules: Sequence[Rule] = (),
    logarithmic: bool = False,
    x_label: str = "step",
    end_marks: bool = False,
) -> Figure | None:
    """Draw *lines* over common axes; None if there is not one finite point.

    Args:
        lines: what to draw.
        width: of the figure.
        height: of the figure.
        rules: horizontal references, labelled at their left end.
        logarithmic: whether y is.
        x_label: under the axis.
        end_marks: write each line's last value beside its last point.
    """
    right = width - RIGHT - (30 if end_marks else 0)
    y = fit(
        [v for line in lines for v in line.ys] + [rule.y for rule in rules],
        height - BOTTOM,
        TOP,
        logarithmic=logarithmic,
    )
    finite = [_finite(line, logarithmic) for line in lines]
    xs = [x for points in finite for x, _ in points]
    if y is None or not xs:
        return None
    span = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    x = Scale(*span, LEFT, right)
    parts = [_axes(x, y, width, height, x_label)]
    parts += [f'<path d="M{LEFT} {_n(y(rule.y))}H{_n(right)}" class="rule"/>' for rule in rules]
    for line, points in zip(lines, finite, strict=True):
        parts.append(_draw(line, points, x, y))
        if end_marks and points and "faint" not in line.look:
            parts.append(
                text(x(points[-1][0]) + 5, y(points[-1][1]) + 4, short(points[-1][1]), f"value f{line.colour}")
            )
    parts += [text(LEFT + 5, y(rule.y) - 4, rule.name, "label halo") for rule in rules]
    parts.append(_legend([line for line in lines if line.legend]))
    parts.append(_strips(lines, x, y))
    return Figure(width, height, "".join(parts))


def _finite(line: Line, logarithmic: bool) -> list[tuple[float, float]]:
    return [
        (x, v)
        for x, v in zip(line.xs, line.ys, strict=True)
        if v is not None and math.isfinite(v) and (v > 0 or not logarithmic)
    ]


def _axes(x: Scale, y: Scale, width: float, height: float, x_label: str) -> str:
    base = height - BOTTOM
    parts = []
    for value in y.ticks():
        at = _n(y(value))
        parts.append(f'<path d="M{LEFT} {at}H{_n(x.end)}" class="grid"/>')
        parts.append(text(LEFT - 6, y(value) + 3.5, short(value), "tick end"))
    whole = [int(value) for value in x.ticks(6) if value == int(value)]
    parts += [text(x(value), base + 15, f"{value:,}", "tick middle") for value in whole]
    parts.append(f'<path d="M{LEFT} {_n(base)}H{_n(x.end)}" class="axis"/>')
    parts.append(text((LEFT + x.end) / 2, height - 4, x_label, "tick middle"))
    return "".join(parts)


def _draw(line: Line, points: list[tuple[float, float]], x: Scale, y: Scale) -> str:
    if not points:
        return ""
    if "dots" in line.look or len(points) == 1:
        marks = "".join(f'<circle cx="{_n(x(a))}" cy="{_n(y(b))}" r="2.6"/>' for a, b in points)
        dots = f'<g class="dot f{line.colour}">{marks}</g>'
    else:
        dots = ""
    known = dict(points)
    pieces: list[str] = []
    pen = "M"
    for a, b in _thin([(a, known.get(a)) for a in line.xs]):
        if b is None:
            pen = "M"
            continue
        pieces.append(f"{pen}{_n(x(a))} {_n(y(b))}")
        pen = "L"
    return f'<path d="{"".join(pieces)}" class="line s{line.colour} {line.look}"/>{dots}'


def _thin(points: list[tuple[float, Value]]) -> list[tuple[float, Value]]:
    """Average neighbours so that about `MAX_POINTS` remain; a group that is all gap stays a gap."""
    group = -(-len(points) // MAX_POINTS)
    if group < 2:
        return points
    out: list[tuple[float, Value]] = []
    for at in range(0, len(points), group):
        members = points[at : at + group]
        values = [v for _, v in members if v is not None]
        out.append((members[len(members) // 2][0], sum(values) / len(values) if values else None))
    return out


def _legend(lines: Sequence[Line]) -> str:
    parts, at = [], float(LEFT)
    for line in lines:
        parts.append(f'<path d="M{_n(at)} 10h14" class="line s{line.colour} {line.look}"/>')
        parts.append(text(at + 18, 13.5, line.name, "label"))
        at += 34 + 6.3 * len(line.name)
    return "".join(parts)


def _strips(lines: Sequence[Line], x: Scale, y: Scale) -> str:
    """Transparent bars along x that carry the values in words."""
    places = sorted({a for line in lines for a in line.xs})
    every = -(-len(places) // MAX_STRIPS)
    places = places[::every] + ([places[-1]] if (len(places) - 1) % every else [])
    tables = [(line, dict(zip(line.xs, line.ys, strict=True))) for line in lines]
    parts = []
    for n, place in enumerate(places):
        before = x(places[n - 1]) if n else 2 * x(place) - x(places[1]) if len(places) > 1 else x.start
        after = x(places[n + 1]) if n + 1 < len(places) else 2 * x(place) - before
        start, stop = (before + x(place)) / 2, (x(place) + after) / 2
        rows = [f"{line.name}: {short(table[place])}" for line, table in tables if table.get(place) is not None]
        tip = "\n".join([f"step {place:,.0f}", *rows])
        parts.append(rectangle(start, y.end, stop - start, y.start - y.end, "strip", tip))
    return "".join(parts)


def raster(ratios: Float[np.ndarray, "rows columns"], x: float, y: float, width: float, height: float) -> str:
    """Draw *ratios* as an image: red above 1, blue below, transparent at 1; a factor of 4 is the full colour.

    One image instead of thousands of rectangles keeps the page small; transparency lets it lie on any background.
    """
    log = np.log2(np.clip(np.nan_to_num(ratios, nan=1.0), 1e-6, None)) / 2.0
    strength = np.clip(np.abs(log), 0.0, 1.0)
    pixels = np.empty((*ratios.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((log > 0)[..., None], (226, 74, 51), (52, 108, 220))
    pixels[..., 3] = np.round(255 * strength**0.8)
    data = base64.b64encode(png(pixels)).decode()
    return (
        f'<image x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" preserveAspectRatio="none" '
        f'class="raster" href="data:image/png;base64,{data}"/>'
    )


def png(pixels: np.ndarray) -> bytes:
    """Encode ``[rows, columns, 4]`` bytes (red, green, blue, opacity) as a PNG file."""
    rows, columns, _ = pixels.shape
    lines = np.zeros((rows, 1 + 4 * columns), dtype=np.uint8)
    lines[:, 1:] = pixels.reshape(rows, 4 * columns)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _n(value: float) -> str:
    """Write a coordinate briefly."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
