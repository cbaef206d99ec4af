"""Draw a definition as Mermaid text or as SVG.

In: a definition. Out: text. Idle states, final states and the failed state are drawn differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from bullpen.errors import word
from bullpen.workflow.definition import Definition

__all__ = ["Box", "Layout", "Path", "layout", "mermaid", "svg"]

AnyDefinition = Definition[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class _Arrow:
    source: Any
    target: Any
    label: str


def mermaid(definition: AnyDefinition) -> str:
    """A `stateDiagram-v2`."""
    ids = {state: _identifier(state, number) for number, state in enumerate(definition.all_states())}
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{_plain(word(state))}" as {name}' for state, name in ids.items() if name != word(state)]
    if definition.states.initial is not None:
        lines.append(f"    [*] --> {ids[definition.states.initial]}")
    lines += [f"    {ids[each.source]} --> {ids[each.target]}: {_plain(each.label)}" for each in _arrows(definition)]
    lines += [f"    {ids[state]} --> [*]" for state in definition.states.finals]
    lines.append("    classDef idle fill:#e8f1fb,stroke:#3b6ea5")
    lines.append("    classDef failed fill:#fbe8e8,stroke:#a53b3b")
    lines += [f"    class {ids[state]} idle" for state in definition.states.idles]
    lines.append(f"    class {ids[definition.states.failed]} failed")
    return "\n".join(lines) + "\n"


def _arrows(definition: AnyDefinition) -> list[_Arrow]:
    arrows = []
    for transition in definition.transitions:
        asked = ", ".join(getattr(one, "__name__", "condition").strip("<>") for one in transition.conditions)
        label = " or ".join(map(word, transition.events)) + (f" [{asked}]" if asked else "")
        arrows += [_Arrow(source, transition.to, label) for source in transition.sources]
    return arrows


def _identifier(state: Any, number: int) -> str:
    text = word(state)
    return text if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) and text != "end" else f"s{number}"


def _plain(text: str) -> str:
    """Without what would end a label."""
    return re.sub(r'[":;\n#]', " ", text)


# SVG ----------------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 130, 40, 60, 80, 40
_TIP: Final = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#444"/></marker></defs>'
)
_COLOURS: Final = {
    "idle": ("#e8f1fb", "#3b6ea5"),
    "final": ("#e9f5e9", "#3f7d3f"),
    "failed": ("#fbe8e8", "#a53b3b"),
    "passing": ("#ffffff", "#666666"),
}


@dataclass(frozen=True, slots=True)
class Box:
    """A state and its place."""

    state: str
    kind: str
    """`idle`, `final`, `failed` or `passing`."""
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Path:
    """A transition: the line, and the place of its label."""

    line: str
    label: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A diagram before it is drawn."""

    width: int
    height: int
    box_width: int
    box_height: int
    boxes: tuple[Box, ...]
    paths: tuple[Path, ...]


def layout(definition: AnyDefinition) -> Layout:
    """The layout: one row per number of events from the start."""
    rows = _rows(definition)
    places = {
        state: (_MARGIN + at * (_WIDTH + _GAP_X), _MARGIN + level * (_HEIGHT + _GAP_Y))
        for level, row in enumerate(rows)
        for at, state in enumerate(row)
    }
    paths = []
    parallel: dict[frozenset[Any], int] = {}
    for arrow in _arrows(definition):
        pair = frozenset((arrow.source, arrow.target))
        parallel[pair] = parallel.get(pair, 0) + 1
        paths.append(_path(places[arrow.source], places[arrow.target], arrow.label, parallel[pair] - 1))
    return Layout(
        width=2 * _MARGIN + max(len(row) for row in rows) * (_WIDTH + _GAP_X) + _GAP_X,
        height=2 * _MARGIN + len(rows) * (_HEIGHT + _GAP_Y),
        box_width=_WIDTH,
        box_height=_HEIGHT,
        boxes=tuple(Box(word(state), _kind(definition, state), *place) for state, place in places.items()),
        paths=tuple(paths),
    )


def svg(definition: AnyDefinition) -> str:
    """A diagram: one row per number of events from the start."""
    made = layout(definition)
    name = quoteattr(f"states of {definition.name or 'workflow'}")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{made.width}" height="{made.height}" '
        f'viewBox="0 0 {made.width} {made.height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label={name}>'
    )
    parts = [opening, _TIP, *map(_line, made.paths), *map(_box, made.boxes)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(definition: AnyDefinition) -> list[list[Any]]:
    """States by their distance from the beginning; what is not reached stands in the last row with the failed one."""
    states = definition.states
    start = states.initial if states.initial is not None else definition.all_states()[0]
    levels, waiting = {start: 0}, [start]
    while waiting:
        state = waiting.pop(0)
        for transition in definition.transitions:
            if state in transition.sources and transition.to not in levels and transition.to != states.failed:
                levels[transition.to] = levels[state] + 1
                waiting.append(transition.to)
    last = max(levels.values()) + 1
    rows: list[list[Any]] = [[] for _ in range(last + 1)]
    for state in definition.all_states():
        rows[levels.get(state, last)].append(state)
    return [row for row in rows if row]


def _kind(definition: AnyDefinition, state: Any) -> str:
    states = definition.states
    if state == states.failed:
        return "failed"
    return "final" if state in states.finals else "idle" if state in states.idles else "passing"


def _box(box: Box) -> str:
    fill, stroke = _COLOURS[box.kind]
    middle = f'x="{box.x + _WIDTH // 2}" y="{box.y + _HEIGHT // 2 + 4}"'
    rim = 3 if box.kind == "final" else 1
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="{rim}"/><text {middle} text-anchor="middle">{escape(box.state)}</text>'
    )


def _line(path: Path) -> str:
    return (
        f'<path d="{path.line}" fill="none" stroke="#444" marker-end="url(#tip)"/>'
        f'<text x="{path.x}" y="{path.y}" fill="#444" font-size="11">{escape(path.label)}</text>'
    )


def _path(source: tuple[int, int], target: tuple[int, int], label: str, nth: int) -> Path:
    half = _WIDTH // 2
    (x1, y1), (x2, y2) = source, target
    shift = 24 * nth  # arrows between the same two states stand beside each other
    if source == target:
        x, y = x1 + _WIDTH, y1 + _HEIGHT // 2
        path = f"M{x} {y - 8} C{x + 45} {y - 30 - shift} {x + 45} {y + 30 + shift} {x} {y + 8}"
        at = (x + 38, y + 4 + shift)
    elif y2 > y1:
        begin, end = (x1 + half + shift, y1 + _HEIGHT), (x2 + half + shift, y2)
        path = f"M{begin[0]} {begin[1]} L{end[0]} {end[1]}"
        # Near the end of a slanting line: its beginning is where the lines of other events are.
        part = 5 if x1 == x2 else 7
        at = (begin[0] + (end[0] - begin[0]) * part // 10 + 4, begin[1] + (end[1] - begin[1]) * part // 10)
    else:
        # Back, or along a row: around the side, so that it does not run through boxes.
        begin, end = (x1 + _WIDTH, y1 + _HEIGHT // 2), (x2 + _WIDTH, y2 + _HEIGHT // 2)
        bow = max(begin[0], end[0]) + 40 + shift
        path = f"M{begin[0]} {begin[1]} C{bow} {begin[1]} {bow} {end[1]} {end[0]} {end[1]}"
        at = (bow - 6, (begin[1] + end[1]) // 2 - 6)
    return Path(path, label, *at)
