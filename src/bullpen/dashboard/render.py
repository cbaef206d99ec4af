"""Draw pages: Jinja templates that escape everything, and the few pictures that are made here.

In: a view and the name of a template. Out: HTML. Every text of a store goes through `shown`, which makes control
characters visible; Jinja escapes the rest. No template has a script, a handler or a style of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from bullpen._kernel.command_line import command_line
from bullpen._kernel.printable import printable
from bullpen.dashboard._web import segment
from bullpen.errors import MissingExtra
from bullpen.ops.words import duration_text, size_text

try:
    import jinja2
    from markupsafe import Markup, escape
except ImportError:  # the extra is asked for where the dashboard is made
    raise MissingExtra("dashboard", "the dashboard") from None

__all__ = [
    "STATIC",
    "Static",
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
]

ICONS: Final = {
    "waiting": "○",
    "delayed": "◷",
    "active": "▶",
    "blocked": "⧉",
    "retrying": "↻",
    "done": "✓",
    "dead": "✕",
    "unknown": "?",
    "cancelled": "⊘",
    "paused": "‖",
}
VERDICT_ICONS: Final = {"well": "✓", "attention": "▲", "broken": "✕", "unknown": "?"}
_OPEN_NODES: Final = 200
_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


class Static:
    """Files that browsers keep: their address changes with their content."""

    def __init__(self) -> None:
        folder = resources.files("bullpen.dashboard") / "static"
        self.files = {
            entry.name: (entry.read_bytes(), _TYPES[f".{entry.name.rpartition('.')[2]}"])
            for entry in folder.iterdir()
            if f".{entry.name.rpartition('.')[2]}" in _TYPES
        }
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(name.encode() + b"\0" + self.files[name][0])
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
        "iso": iso,
        "json_tree": json_tree,
        "json_text": json_text,
    }
    environment.globals |= {
        "icons": ICONS,
        "verdict_icons": VERDICT_ICONS,
        "spark": spark,
        "command_line": command_line,
    }
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
    """Thousands are separated by thin spaces."""
    return "–" if value is None else f"{value:,}".replace(",", "\u202f")


def rate(value: float | None) -> str:
    """Per second."""
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else number(round(value))


def iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def clock(ms: int, zone: Any) -> str:
    return datetime.fromtimestamp(ms / 1000, zone).strftime("%Y-%m-%d %H:%M:%S")


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


def json_tree(value: Any) -> Markup:
    """JSON that can be folded without a script; deeper parts are folded once two hundred nodes are open."""
    left = _OPEN_NODES

    def node(item: Any, depth: int) -> Markup:
        nonlocal left
        left -= 1
        match item:
            case dict() if item and depth < 60:
                parts = [
                    Markup('<li><span class="json-key">{}</span>: {}</li>').format(
                        json_string(key), node(each, depth + 1)
                    )
                    for key, each in item.items()
                ]
                return fold("{", "}", len(item), parts, depth)
            case list() if item and depth < 60:
                parts = [Markup("<li>{}</li>").format(node(each, depth + 1)) for each in item]
                return fold("[", "]", len(item), parts, depth)
            case str():
                return Markup('<span class="json-text">{}</span>').format(json_string(item))
        return Markup('<span class="json-value">{}</span>').format(json_text(item))

    def fold(begin: str, end: str, count: int, parts: list[Markup], depth: int) -> Markup:
        is_open = Markup(" open") if depth < 2 and left > 0 else Markup("")
        return Markup(
            '<details class="json"{}><summary>{}<span class="json-more"> {} {} </span></summary><ul>{}</ul>{}</details>'
        ).format(is_open, begin, count, "item" if count == 1 else "items", Markup("").join(parts), end)

    return node(value, 0)


def spark(values: Sequence[int]) -> Markup:
    """A line of bars, with the numbers as its title."""
    most, width = max([*values, 1]), 4
    bars = [
        Markup('<rect x="{}" y="{}" width="3" height="{}"/>').format(place * width, 20 - height, height)
        for place, value in enumerate(values)
        if (height := round(20 * value / most) or (1 if value else 0))
    ]
    told = f"{sum(values)} in {len(values)} hours, at most {max([*values, 0])} in one"
    return Markup(
        '<svg class="spark" role="img" viewBox="0 0 {} 20" width="{}" height="20"><title>{}</title>{}</svg>'
    ).format(len(values) * width, len(values) * width, told, Markup("").join(bars))


def json_string(text: str) -> Markup:
    import json

    return escape(printable(json.dumps(text, ensure_ascii=False)))


Url = Callable[..., str]
