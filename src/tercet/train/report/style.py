"""Colours, type and the few lines of script of a report; light and dark follow the reader's system."""

from __future__ import annotations

LIGHT = {
    "page": "#f6f6f3",
    "card": "#ffffff",
    "ink": "#1b1e23",
    "soft": "#666c76",
    "line": "#d9dad6",
    "grid": "#ecece8",
    "c0": "#2563d9",
    "c1": "#d9660a",
    "c2": "#0b8a7c",
    "c3": "#8a46c4",
    "c4": "#cc2f62",
    "c5": "#6f7d00",
}
DARK = {
    "page": "#101317",
    "card": "#181c22",
    "ink": "#e8eaed",
    "soft": "#9aa2ad",
    "line": "#343a44",
    "grid": "#262b33",
    "c0": "#78a5ff",
    "c1": "#ff9d4d",
    "c2": "#46cdb9",
    "c3": "#c392f5",
    "c4": "#ff7fa3",
    "c5": "#c0cb48",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


COLOURS = f""":root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
"""

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

DRAWING = f"""text {{ font: 11px {SANS}; fill: var(--ink) }}
.tick, .label {{ fill: var(--soft); font-size: 10.5px }}
.title {{ font-weight: 600 }}
.value {{ font-weight: 600 }}
.halo {{ paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round }}
.end {{ text-anchor: end }}
.middle {{ text-anchor: middle }}
.grid {{ stroke: var(--grid); fill: none }}
.axis {{ stroke: var(--line); fill: none }}
.rule {{ stroke: var(--soft); stroke-dasharray: 5 4; fill: none }}
.line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }}
.faint {{ opacity: .28; stroke-width: 1 }}
.dashed {{ stroke-dasharray: 4 3 }}
.frame {{ fill: none; stroke: var(--line) }}
.strip {{ fill: transparent }}
.quiet {{ fill: var(--soft); fill-opacity: .35 }}
.raster {{ image-rendering: pixelated }}
.cell {{ fill: var(--c0) }}
.cellvalue {{ font-size: 10.5px; pointer-events: none }}
.strong {{ fill: var(--card) }}
.ridge {{ fill-opacity: .55; stroke: var(--card); stroke-width: 1.2 }}
.before {{ fill: none; stroke: var(--ink); stroke-opacity: .55; stroke-width: .9 }}
.headline {{ font-size: 22px; font-weight: 650 }}
.subline {{ font-size: 13px; fill: var(--soft) }}
.panel {{ font-size: 13px; font-weight: 600 }}
""" + "".join(f".s{n} {{ stroke: var(--c{n}) }} .f{n} {{ fill: var(--c{n}) }}\n" for n in range(6))

PAGE = f"""* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 {SANS} }}
main {{ max-width: 1140px; margin: 0 auto; padding: 36px 20px 60px }}
h1 {{ font-size: 30px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em }}
h2 {{ font-size: 17px; margin: 0 0 10px }}
h3 {{ font-size: 13px; margin: 14px 0 4px }}
.status {{ color: var(--soft); margin: 0 0 22px }}
.status b {{ color: var(--ink); font-weight: 600 }}
.remark {{ border-left: 3px solid var(--c1); padding: 2px 0 2px 12px; margin: 0 0 10px }}
.outcome {{ display: grid; grid-template-columns: minmax(0, 1.25fr) minmax(0, 1fr); gap: 16px; margin-bottom: 16px }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px }}
.card {{ min-width: 0 }}
.tiles {{ display: grid; grid-template-columns: 1fr 1fr; gap: 16px }}
.tile .n {{ font-size: 25px; font-weight: 650; line-height: 1.2; font-variant-numeric: tabular-nums }}
.tile .w {{ color: var(--soft); font-size: 13px }}
.figures {{ display: grid; grid-template-columns: 1fr 1fr; gap: 16px }}
.wide {{ grid-column: 1 / -1 }}
figure {{ margin: 0 }}
figcaption {{ color: var(--soft); font-size: 13px; margin-top: 8px; max-width: 92ch }}
svg {{ display: block; width: 100%; height: auto }}
.none {{ color: var(--soft); border: 1px dashed var(--line); border-radius: 8px }}
.none {{ padding: 34px 12px; text-align: center }}
.sample {{ display: grid; grid-template-columns: 92px minmax(0, 1fr); gap: 14px; padding: 12px 0 }}
.sample {{ border-top: 1px solid var(--grid) }}
.sample .at {{ color: var(--soft); font-variant-numeric: tabular-nums }}
pre {{ margin: 0; font: 13px/1.5 {MONO}; white-space: pre-wrap; overflow-wrap: anywhere }}
pre .p {{ color: var(--soft) }}
table {{ border-collapse: collapse; font-size: 13px; width: 100% }}
td, th {{ text-align: left; padding: 3px 14px 3px 0; border-top: 1px solid var(--grid); vertical-align: top }}
th {{ color: var(--soft); font-weight: 500; width: 240px }}
td {{ font-family: {MONO}; overflow-wrap: anywhere }}
details {{ margin-top: 12px }}
summary {{ cursor: pointer; color: var(--soft) }}
section.below {{ margin-top: 16px }}
footer {{ color: var(--soft); font-size: 13px; margin-top: 28px }}
#tip {{ position: fixed; pointer-events: none; z-index: 9; max-width: 320px; padding: 6px 9px; border-radius: 7px }}
#tip {{ background: var(--ink); color: var(--page); font-size: 12px; line-height: 1.4; white-space: pre-line }}
.strip[data-tip]:hover {{ fill: var(--ink); fill-opacity: .1 }}
.cell[data-tip]:hover {{ stroke: var(--ink) }}
@media (max-width: 760px) {{
  .outcome, .figures, .tiles, .sample {{ grid-template-columns: minmax(0, 1fr) }}
}}
"""

SCRIPT = """const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const target = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const width = tip.offsetWidth, height = tip.offsetHeight, below = event.clientY + 16;
  tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6)) + "px";
  tip.style.top = (below + height > innerHeight ? event.clientY - height - 12 : below) + "px";
});
"""
