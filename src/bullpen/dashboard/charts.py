"""Lines over time, drawn on the server: they print, need no script, and say their numbers as titles and in a table.

In: series of values, one per step, and marks. Out: SVG whose width is that of the page; texts stand around it in HTML,
so that they do not shrink with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bullpen._kernel.duration import check_texts
from bullpen._kernel.printable import printable

_HEIGHT = 100
_ROUND = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    label: str
    kind: str
    """What it looks like: a class of the style sheet."""
    values: Sequence[float | None]
    """One per step; None where nothing is known."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What a template puts together."""

    title: str
    svg: Markup
    series: Sequence[Series]
    top: str
    middle: str
    is_empty: bool


def make_chart(
    title: str,
    series: Sequence[Series],
    titles: Sequence[str],
    *,
    text_of: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
    least: float = 1.0,
) -> Chart:
    """`titles` name the steps; `marks` stand at parts of the width, from 0 to 1; the scale ends at `least` or above."""
    titles = check_texts("titles", titles)
    steps = max(1, len(titles))
    most = max([least, *(value for each in series for value in each.values if value is not None)])
    top = _rounded(most)
    parts = [
        Markup('<line class="chart-mark" x1="{0}" x2="{0}" y1="0" y2="{1}"><title>{2}</title></line>').format(
            round(part * steps, 2), _HEIGHT, printable(text)
        )
        for part, text in marks
    ]
    parts += [Markup('<path class="chart-line {}" d="{}"/>').format(each.kind, _path(each, top)) for each in series]
    for place, name in enumerate(titles):
        told = ", ".join(
            f"{each.label} {text_of(value)}" for each in series if (value := each.values[place]) is not None
        )
        parts.append(
            Markup('<rect class="chart-step" x="{}" y="0" width="1" height="{}"><title>{}: {}</title></rect>').format(
                place, _HEIGHT, name, told or "nothing"
            )
        )
    svg = Markup(
        '<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}" preserveAspectRatio="none">'
        '<line class="chart-grid" x1="0" x2="{}" y1="50" y2="50"/>{}</svg>'
    ).format(title, steps, _HEIGHT, steps, Markup("").join(parts))
    is_empty = all(not value for each in series for value in each.values)
    return Chart(title, svg, series, text_of(top), text_of(top / 2), is_empty)


def _path(series: Series, top: float) -> str:
    """A line through the middles of the steps; it breaks where nothing is known, and one value alone is a dash."""
    parts, values = [], series.values
    for place, value in enumerate(values):
        if value is None:
            continue
        height = round(_HEIGHT - 1 - (_HEIGHT - 2) * value / top, 2)
        is_first = place == 0 or values[place - 1] is None
        is_last = place + 1 == len(values) or values[place + 1] is None
        if is_first and is_last:
            parts.append(f"M{place + 0.1:g} {height}H{place + 0.9:g}")
        else:
            parts.append(f"{'M' if is_first else 'L'}{place + 0.5:g} {height}")
    return "".join(parts)


def _rounded(most: float) -> float:
    """A number that people like, at least as large."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(each * power for each in _ROUND if each * power >= most * 0.999)
