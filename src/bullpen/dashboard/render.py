"""Draw pages: Jinja templates that escape everything, and the few pictures that are made here.

In: a view and the name of a template. Out: HTML. Every text of a store goes through `shown`, which makes control
characters visible; Jinja escapes the rest. No template has a script, a handler or a style of its own.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from bullpen._kernel.command_line import command_line
from bullpen._kernel.instants import as_utc
from bullpen._kernel.printable import printable
from bullpen.dashboard._web import segment
from bullpen.errors import MissingExtra
from bullpen.ops.status import duration_text, size_text

try:
    import jinja2
    from markupsafe import Markup, escape
except ImportError:  # the extra is asked for where the dashboard is made
    raise MissingExtra("dashboard", "the dashboard") from None

__all__ = [
    "STATIC",
    "Static",
    "StaticFile",
    "age",
    "clock",
    "find_zone",
    "iso",
    "json_string",
    "json_text",
    "json_tree",
    "number",
    "rate",
    "render",
    "shown",
    "spark",
    "state_diagram",
    "to_ms",
]

_OPEN_NODES: Final = 200
_MOST_NODES: Final = 1_000
_MOST_CHILDREN: Final = 200
_DEEPEST: Final = 60
_LONGEST_TEXT: Final = 2_000
_TYPES: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    content_type: str
    packed: bytes
    """The content, compressed."""


class Static:
    """Files that browsers keep: their address changes with their content. The style sheets of all subjects are one
    file, because a browser shows nothing before it has them all; scripts stay apart."""

    def __init__(self) -> None:
        folder = resources.files("bullpen.dashboard") / "static"
        found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
        sheets = {entry.name: entry.read_bytes() for entry in (folder / "css").iterdir()}
        found["app.css"] = b"".join(sheets[name] for name in sorted(sheets))
        self.files = {
            name: StaticFile(content, _TYPES[name.rpartition(".")[2]], gzip.compress(content, 9, mtime=0))
            for name, content in found.items()
            if name.rpartition(".")[2] in _TYPES
        }
        self.scripts = tuple(sorted(name for name in self.files if name.endswith(".js") and name != "main.js"))
        """What the first script loads: browsers may fetch them at once."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(name.encode() + b"\0" + self.files[name].content)
        self.version = digest.hexdigest()[:12]


STATIC: Final = Static()


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bullpen.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": shown,
        "segment": segment,
        "number": number,
        "rate": rate,
        "duration": duration_text,
        "size": size_text,
        "age": age,
        "iso": iso,
        "to_ms": to_ms,
        "json_tree": json_tree,
        "json_text": json_text,
    }
    environment.globals |= {"spark": spark, "command_line": command_line}
    return environment


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """One page or a part of one."""
    zone = values.get("zone") or UTC
    return (
        _environment()
        .get_template(template)
        .render({**values, "clock": lambda ms: clock(ms, zone)})
        .encode("utf-8", "backslashreplace")
    )


def shown(text: object) -> str:
    """Text that somebody else wrote, with what is not printable as escapes; an empty one has a name."""
    return printable(str(text)) or "(empty)"


def number(value: float | None) -> str:
    """As texts of other places write it: 1,404."""
    return "–" if value is None else f"{value:,}"


def rate(value: float | None) -> str:
    """Per second."""
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else number(round(value))


def age(ms: int, now_ms: int, bare: bool = False) -> str:
    """How long ago an instant was, or in how long it comes; bare: the duration alone."""
    passed = now_ms - ms
    if abs(passed) < 1_000:
        return "0 s" if bare else "now"
    if bare:
        return duration_text(abs(passed))
    return f"{duration_text(passed)} ago" if passed > 0 else f"in {duration_text(-passed)}"


def to_ms(text: str) -> int:
    """The instant of an ISO 8601 text; 0 for what is none."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        return 0


_NO_INSTANT: Final = datetime.fromtimestamp(0, UTC)


def iso(ms: int) -> str:
    return (as_utc(ms) or _NO_INSTANT).isoformat(timespec="milliseconds")


def clock(ms: int, zone: Any) -> str:
    found = as_utc(ms)
    return "no instant" if found is None else found.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S")


def find_zone(name: str) -> Any:
    """A time zone by its name, UTC when there is none of it."""
    if not name or len(name) > 60:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC


def json_text(value: Any) -> str:
    """JSON with line breaks, in the order of its keys."""
    import json

    return printable(json.dumps(value, ensure_ascii=False, indent=2))


@dataclass(slots=True)
class _DiagramNode:
    """A part of JSON that is drawn."""

    value: Any
    key: str | None = None
    """Its name in an object; None: it stands in a list."""
    place: int = 0
    depth: int = 0
    children: list[_DiagramNode] = field(default_factory=list)
    left_out: int = 0
    is_open: bool = False


def json_tree(value: Any) -> Markup:
    """JSON that can be folded without a script. About two hundred nodes are open, the outer ones first; a page gets at
    most a thousand, and says how many are left out."""
    root = _DiagramNode(value)
    nodes, queue = 1, deque([root])
    in_order = [root]
    while queue:
        node = queue.popleft()
        found = _children(node)
        room = min(_MOST_CHILDREN, _MOST_NODES - nodes) if node.depth < _DEEPEST else 0
        node.children, node.left_out = found[:room], max(0, _size(node.value) - room)
        nodes += len(node.children)
        in_order += node.children
        queue += node.children
    shown = 1
    for node in in_order:
        if node.children and (node is root or shown + len(node.children) <= _OPEN_NODES):
            node.is_open, shown = True, shown + len(node.children)
    return _draw_json(root, "")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _children(node: _DiagramNode) -> list[_DiagramNode]:
    match node.value:
        case dict():
            pairs = enumerate(islice(node.value.items(), _MOST_CHILDREN))
            return [_DiagramNode(each, str(key), place, node.depth + 1) for place, (key, each) in pairs]
        case list():
            return [
                _DiagramNode(each, None, place, node.depth + 1)
                for place, each in enumerate(node.value[:_MOST_CHILDREN])
            ]
    return []


def _draw_json(node: _DiagramNode, comma: str) -> Markup:
    """Without its folds the text is JSON again: it can be copied."""
    value = node.value
    if not isinstance(value, dict | list) or not value:
        return Markup("{}{}").format(_draw_value(value), comma)
    begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    items = [
        Markup('<li data-key="{}">{}{}</li>').format(
            each.place if each.key is None else each.key,
            "" if each.key is None else Markup('<span class="json-key">{}</span>: ').format(json_string(each.key)),
            _draw_json(each, "," if each is not node.children[-1] else ""),
        )
        for each in node.children
    ]
    if node.left_out:
        items.append(Markup('<li class="json-cut json-more">… {} more</li>').format(number(node.left_out)))
    count = f" {number(len(value))} {'item' if len(value) == 1 else 'items'} "
    return Markup(
        '<details class="json"{}><summary>{}<span class="json-more">{}{}</span></summary><ul>{}</ul>{}{}</details>'
    ).format(Markup(" open") if node.is_open else "", begin, count, end, Markup("").join(items), end, comma)


def _draw_value(value: Any) -> Markup:
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            told = f"… {number(len(value) - _LONGEST_TEXT)} more characters"
            return Markup('<span class="json-text">{}</span><span class="json-cut json-more">{}</span>').format(
                json_string(value[:_LONGEST_TEXT]), told
            )
        return Markup('<span class="json-text">{}</span>').format(json_string(value))
    return Markup('<span class="json-value">{}</span>').format(json_text(value))


def spark(values: Sequence[float], unit: str = "hours", kind: str = "dead") -> Markup:
    """A line of bars, with the numbers as its title."""
    most, width = max([*values, 1e-9]), 4 if len(values) <= 30 else 2
    bars = [
        Markup('<rect x="{}" y="{}" width="{}" height="{}"/>').format(place * width, 20 - height, width - 1, height)
        for place, value in enumerate(values)
        if (height := round(20 * value / most) or (1 if value else 0))
    ]
    told = f"{number(round(sum(values)))} in {len(values)} {unit}, at most {number(round(max([*values, 0])))} in one"
    return Markup(
        '<svg class="spark spark-{}" role="img" viewBox="0 0 {} 20" width="{}" height="20"><title>{}</title>{}</svg>'
    ).format(kind, len(values) * width, len(values) * width, told, Markup("").join(bars))


def state_diagram(
    definition: Any,
    name: str,
    counts: Mapping[str, int] | None,
    *,
    now: str = "",
    links: Mapping[str, str] | None = None,
) -> Markup:
    """The states of a workflow with how many entities are in each, or with the one that an entity is in."""
    from bullpen.workflow.diagram import layout

    made, links = layout(definition), links or {}
    kinds = {"idle": "waiting", "final": "done", "failed": "dead", "passing": "plain"}
    parts = [Markup('<path class="arrow" d="{}" marker-end="url(#tip)"/>').format(each.line) for each in made.paths]
    parts += [
        Markup('<text class="label" x="{}" y="{}">{}</text>').format(each.x, each.y, shown(each.label))
        for each in made.paths
    ]
    for box in made.boxes:
        middle = box.x + made.box_width // 2
        count = None if counts is None else counts.get(box.state, 0)
        told = f"{box.state}, {box.kind}" + ("" if count is None else f": {number(count)}")
        drawn = Markup(
            '<g class="w-{}{}"><title>{}</title><rect class="box" x="{}" y="{}" width="{}" height="{}" rx="8"/>'
            '<text x="{}" y="{}" text-anchor="middle">{}</text>{}</g>'
        ).format(
            *(kinds[box.kind], " now" if box.state == now else "", shown(told)),
            *(box.x, box.y, made.box_width, made.box_height),
            *(middle, box.y + (24 if count is None else 17), shown(box.state)),
            Markup('<text class="number" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                middle, box.y + 33, number(count)
            )
            if count is not None
            else "",
        )
        parts.append(Markup('<a href="{}">{}</a>').format(links[box.state], drawn) if box.state in links else drawn)
    return Markup(
        '<svg role="group" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}"><defs><marker id="tip" '
        'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path class="tip" d="M0 0L10 5L0 10z"/></marker></defs>{}</svg>'
    ).format(f"states of {shown(name)}", made.width, made.height, made.width, made.height, Markup("").join(parts))


def json_string(text: str) -> Markup:
    import json

    return escape(printable(json.dumps(text, ensure_ascii=False)))


Url = Callable[..., str]
