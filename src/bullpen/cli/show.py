"""How everything is printed: lines, tables, fields, JSON, times, progress.

In: values. Out: text that fits the terminal, or all of it in a pipe, and nothing that a terminal
would obey. Times are UTC unless the local zone is asked for. Without rich, which takes as long to import as the rest of
a short command; only what moves on the screen needs it (`bar`, `bullpen.cli.top`).
Elsewhere: what each record shows (beside its commands), `--json` and `--local` (`context`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TextIO

from bullpen._kernel.instants import as_utc
from bullpen._kernel.printable import printable, printable_json

_GAP: Final = 2
_WIDE: Final = 10_000
"""Columns of a table in a pipe, which must get all of the text."""
_WHOLE: Final = 10_000
_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
_STATES: Final = {
    "green": ("completed", "sent", "healthy", "ok", "good", "enabled"),
    "red": ("failed", "dead", "broken", "parked", "expired", "retries-exhausted"),
    "yellow": ("paused", "delayed", "warning", "stalled", "retry", "disabled", "cancelled", "skipped"),
    "cyan": ("active", "running", "sending", "claimed", "unknown"),
}
_STYLES: Final = {word: style for style, words in _STATES.items() for word in words}
_STATE_COLUMNS: Final = frozenset({"state", "status", "answers", ""})


# Lines --------------------------------------------------------------------------------------------------------------


def say(*lines: object) -> None:
    """Results, for people, on stdout."""
    _write(sys.stdout, lines)


def warn(*lines: object) -> None:
    """Everything else, on stderr."""
    _write(sys.stderr, lines)


def _write(stream: TextIO, lines: Sequence[object]) -> None:
    print(*(printable(str(line)) for line in lines), sep="\n", file=stream, flush=True)


def say_styled(*pieces: tuple[str, str]) -> None:
    """One line of several styles: pairs of text and style."""
    print("".join(style(printable(text), how) for text, how in pieces).rstrip(), flush=True)


def style(text: str, how: str, stream: TextIO | None = None) -> str:
    """The text in colours, where the stream shows any. It must be printable already."""
    if not how or not has_colours(stream or sys.stdout):
        return text
    return f"\x1b[{';'.join(_CODES[word] for word in how.split())}m{text}\x1b[0m"


def style_of(state: str) -> str:
    """The colour of a state, as everywhere."""
    return _STYLES.get(state.lower(), "")


def has_colours(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def print_json(value: Any) -> None:
    """One document."""
    print(printable_json(value, indent=2 if sys.stdout.isatty() else None, default=_json_value))


def print_line(value: Any) -> None:
    """One JSON document on one line, at once: of those that come as things happen."""
    print(printable_json(value, default=_json_value), flush=True)


def _json_value(value: Any) -> str:
    return when(value) if isinstance(value, datetime) else str(value)


# Values -------------------------------------------------------------------------------------------------------------


def instant(epoch_ms: int | float | None) -> datetime | None:
    """None for 0, which means unset, and for values that are not instants."""
    return as_utc(epoch_ms) if epoch_ms else None


def read_instant(written: str | None) -> datetime | None:
    """An instant written by another program; None for other text."""
    try:
        found = datetime.fromisoformat(written or "")
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def when(at: datetime | None, *, local: bool = False) -> str:
    """The one way in which times are written: in UTC, or in the zone of this machine."""
    if at is None:
        return ""
    shown = at.astimezone(None if local else UTC)
    zone = f"{shown:%z}" if local else "Z"
    return f"{shown:%Y-%m-%d %H:%M:%S}.{shown.microsecond // 1000:03}{zone}"


def short(value: Any, limit: int = 80) -> str:
    """JSON on one line, cut to what fits beside other columns; of a sealed payload only how it is sealed."""
    if isinstance(value, dict):
        from bullpen.wire.envelope import seal_words

        if (words := seal_words(value)) is not None:
            return printable(words)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_json_value)
    return cut(printable(" ".join(text.split())), limit)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A document without what is not set."""
    return {name: value for name, value in fields.items() if value is not None}


def text_of(value: Any, *, local: bool = False) -> str:
    """A value in a cell."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return when(value, local=local)
    return printable(" ".join(value.split())) if isinstance(value, str) else short(value, _WHOLE)


def width_of(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, width: int) -> str:
    """At most so many columns; between two words, if that leaves most of it."""
    if width_of(text) <= width:
        return text
    kept = text[: max(0, width - 1)]
    while width_of(kept) > max(0, width - 1):
        kept = kept[:-1]
    space = kept.rfind(" ")
    if text[len(kept)] != " " and space > width // 2:
        kept = kept[:space]
    return f"{kept.rstrip()}…"[: max(0, width)]


# Tables -------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One column of a table."""

    title: str
    source: str | Callable[[Any], Any] = ""
    """The field of the record, if it is not called as the column, or what makes the cell of a record."""
    worth: int = 0
    """On a narrow terminal the columns with the highest number are left out first; 0: never."""
    least: int = 0
    """A long text may be cut to this width, before any column is left out; 0: never."""
    is_number: bool = False

    def cell(self, record: Any) -> Any:
        return self.source(record) if callable(self.source) else record.get(self.source or self.title)


class Record(NamedTuple):
    """How one kind of thing is shown: the same fields for programs, in a table and one by one."""

    to_json: Callable[[Any], Any]
    columns: tuple[Column, ...]


class Table:
    """Rows that fit a width: long texts are cut, then columns of little worth are left out."""

    def __init__(
        self, columns: Sequence[Column], records: Iterable[Any], *, width: int = _WIDE, local: bool = False
    ) -> None:
        values = [[column.cell(record) for column in columns] for record in records]
        self._right = [
            column.is_number
            or (
                any(isinstance(row[at], int | float) for row in values)
                and all(row[at] in (None, "") or isinstance(row[at], int | float) for row in values)
            )
            for at, column in enumerate(columns)
        ]
        # An empty document says nothing in a table: the cell stays empty.
        self._cells = [["" if value in ({}, []) else text_of(value, local=local) for value in row] for row in values]
        self._columns = columns
        self._fit(width)

    @property
    def left_out(self) -> list[str]:
        return [column.title for at, column in enumerate(self._columns) if at not in self._widths and column.title]

    def _fit(self, width: int) -> None:
        natural = {
            at: max(width_of(text) for text in (column.title, *(row[at] for row in self._cells)))
            for at, column in enumerate(self._columns)
            if column.title or any(row[at] for row in self._cells)
        }
        least = {at: min(full, self._columns[at].least or full) for at, full in natural.items()}
        while _total(least) > width:
            candidates = [at for at in least if self._columns[at].worth]
            if not candidates:
                break
            del least[max(candidates, key=lambda at: self._columns[at].worth)]
        room = width - _total(least)
        for at, narrow in least.items():  # what is left goes to long texts, the first of them first
            more = max(0, min(room, natural[at] - narrow))
            least[at], room = narrow + more, room - more
        if room < 0 and least:  # nothing more can be left out: the first column is cut
            first = min(least)
            least[first] = max(1, least[first] + room)
        self._widths = least

    def lines(self, row_style: Callable[[int], str] | None = None) -> Iterator[str]:
        """The heading and the rows."""
        yield style(self._line([column.title for column in self._columns]), "bold")
        for number, row in enumerate(self._cells):
            if row_style is not None:
                yield style(self._line(row), row_style(number))
            else:
                yield self._line(row, coloured=True)

    def _line(self, cells: Sequence[str], *, coloured: bool = False) -> str:
        parts = []
        for at, width in self._widths.items():
            text = cut(cells[at], width)
            pad = " " * (width - width_of(text))
            if coloured and self._columns[at].title in _STATE_COLUMNS:
                text = style(text, style_of(text))
            parts.append(f"{pad}{text}" if self._right[at] else f"{text}{pad}")
        return (" " * _GAP).join(parts).rstrip()


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * max(0, len(widths) - 1)


def window_width() -> int:
    """Columns of the terminal; very many where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE


def print_table(columns: Sequence[Column], records: Iterable[Any], *, local: bool = False) -> None:
    table = Table(columns, records, width=window_width(), local=local)
    print(*table.lines(), sep="\n")
    if table.left_out:
        hint = f"not shown here: {', '.join(table.left_out)}; a wider window or --json has them"
        print(style(hint, "dim", sys.stderr), file=sys.stderr)


def print_fields(fields: Mapping[str, Any], *, local: bool = False) -> None:
    """One field a line; long values go on below themselves, between two words."""
    left = max(map(len, fields), default=0) + _GAP
    for name, value in fields.items():
        text = text_of(value, local=local)
        room = max(20, window_width() - left)
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        print(f"{style(f'{name:<{left}}', 'bold')}{f'{chr(10)}{chr(32) * left}'.join(lines)}".rstrip())


# While it takes long ------------------------------------------------------------------------------------------------


@contextmanager
def bar(description: str, total: int | None, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr while there is somebody to see it; yields what moves it: `move(done, total=…, description=…)`."""
    if hidden or not sys.stderr.isatty():
        yield lambda *_, **__: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done, **more: progress.update(task, completed=done, **more)
