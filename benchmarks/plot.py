"""Draw the results as one SVG: a panel of bars per metric. Text in, text out; no library."""

from collections.abc import Sequence
from html import escape

from benchmarks.results import Results
from benchmarks.workloads import Metric

_COLOURS = {"ours": "#2f6f4f", "node": "#b08a2e", "python": "#8a94a6"}
_PANELS_PER_ROW = 2
_PANEL_WIDTH, _BAR_HEIGHT, _GAP = 460, 16, 28
_NAME_WIDTH, _VALUE_WIDTH = 130, 70


def draw(results: Results, metrics: Sequence[Metric]) -> str:
    """The panels of all metrics that were measured, each sorted from best to worst."""
    shown = [metric for metric in metrics if results.medians.get(metric.name)]
    height_of = {metric.name: 30 + _BAR_HEIGHT * len(results.medians[metric.name]) + _GAP for metric in shown}
    parts: list[str] = []
    top = 0
    for start in range(0, len(shown), _PANELS_PER_ROW):
        row = shown[start : start + _PANELS_PER_ROW]
        parts += [_panel(results, metric, column * _PANEL_WIDTH, top) for column, metric in enumerate(row)]
        top += max(height_of[metric.name] for metric in row)
    width = _PANELS_PER_ROW * _PANEL_WIDTH
    style = "text{font:12px sans-serif;fill:#24292f}.title{font-weight:600}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">',
            f'<style>{style}</style><rect width="{width}" height="{top}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _panel(results: Results, metric: Metric, left: int, top: int) -> str:
    camps = {entrant.name: entrant.camp for entrant in results.entrants}
    measured = sorted(
        results.medians[metric.name].items(), key=lambda pair: -pair[1] if metric.more_is_better else pair[1]
    )
    longest = max(value for _, value in measured) or 1.0
    room = _PANEL_WIDTH - _NAME_WIDTH - _VALUE_WIDTH
    hint = "" if metric.more_is_better else ", less is better"
    lines = [f'<text class="title" x="{left + 8}" y="{top + 20}">{escape(metric.title)} ({metric.unit}{hint})</text>']
    for index, (name, value) in enumerate(measured):
        y = top + 30 + index * _BAR_HEIGHT
        bar = max(1, round(room * max(value, 0.0) / longest))
        colour = _COLOURS[camps.get(name, "python")]
        lines += [
            f'<text x="{left + _NAME_WIDTH - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left + _NAME_WIDTH}" y="{y + 2}" width="{bar}" height="{_BAR_HEIGHT - 4}" fill="{colour}"/>',
            f'<text x="{left + _NAME_WIDTH + bar + 5}" y="{y + 12}">{show(value, metric.unit)}</text>',
        ]
    return "\n".join(lines)


def show(value: float, unit: str) -> str:
    """A value with as many digits as its unit deserves."""
    if unit in ("jobs/s", "bytes"):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
