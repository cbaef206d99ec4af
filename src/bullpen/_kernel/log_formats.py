"""Log records for machines and for people.

In: records of any logger, with fields in `extra` under their wire names. Out: one JSON object per line, or one line to
read. All our parts use the names in `FIELDS`; absent ones are left out, further ones are kept. Secrets and personal
data in texts are hidden, whoever wrote them. Below the queue, because its child processes write the same. Elsewhere:
the fields of the job that runs (`bullpen._kernel.logs`), what is logged, at each part.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from bullpen._kernel.logs import ID_FIELDS, MOST_LOGGED, JobFilter, id_values, is_id, is_scrubbed
from bullpen._kernel.outcome import cut
from bullpen._kernel.printable import printable, printable_json
from bullpen._kernel.scrub import scrub_around, scrub_lines

FIELDS: Final = (
    *("message", "jobId", "jobName", "queue", "urn", "runId", "tenantId", "userId", "correlationId", "traceId"),
    *("source", "operation", "phase", "error", "attempt", "attemptsMade"),
)
"""Names that every part uses in the same sense, in the order in which they are written."""

# `color_message` is what uvicorn says once more, with escape codes.
_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName", "color_message"),
}
_COLOURS: Final = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`, our own names first; texts scrubbed, absent ones left out."""
    given = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD and value is not None}
    ordered = [name for name in FIELDS if name in given] + [name for name in given if name not in FIELDS]
    ids = id_values(given)
    return {name: given[name] if is_id(name, given[name]) else _clean(given[name], ids) for name in ordered}


def _clean(value: Any, ids: Sequence[str]) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return scrub_around(cut(str(value), MOST_LOGGED), ids)


def _message(record: logging.LogRecord) -> str:
    """The text, scrubbed whoever wrote it. The ids that the line has as fields stay in it."""
    text = record.getMessage()
    return text if is_scrubbed(record) else scrub_around(cut(text, MOST_LOGGED), id_values(vars(record)))


def _stack(record: logging.LogRecord) -> str | None:
    if not record.exc_info or record.exc_info[0] is None:
        return None
    if record.exc_text:
        return record.exc_text  # scrubbed by the filter
    return scrub_lines(cut("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"), MOST_LOGGED))


class JsonFormatter(logging.Formatter):
    """One object per line: `timestamp`, `level`, `logger`, `pid`, `message`, then the fields, then `stack`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": _message(record),
            **_fields_of(record),
        }
        if (stack := _stack(record)) is not None:
            line["stack"] = stack
        return printable_json(line)


class PrintableFormatter(logging.Formatter):
    """What the standard formatter writes, without what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return _indented(printable(super().format(record)))


class ConsoleFormatter(logging.Formatter):
    """One line for a person: time, level, part, text, then the fields: always those that say whose the line is, of the
    others those that the text does not tell already."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")[:-6]
        text = _message(record)
        told = [
            f"{name}={value}"
            for name, value in _fields_of(record).items()
            if not _contains_value(text, f"{name}={value}" if name in ID_FIELDS else str(value))
        ]
        line = " ".join((f"{time} {record.levelname} [{record.process}] {record.name}: {text}", *told))
        line = printable(line)
        if self._colour and (code := _COLOURS.get(record.levelno)):
            line = f"\x1b[{code}m{line}\x1b[0m"
        stack = _stack(record)
        return _indented(line if stack is None else f"{line}\n{printable(stack)}")


def _indented(text: str) -> str:
    """A job's name or an error may have line breaks. Only the first line of a record begins at the edge, so that nobody
    writes a record of his own making into the log."""
    return text.replace("\n", "\n    ")


def _contains_value(text: str, value: str) -> bool:
    """Whether the value stands there by itself: the 7 of "17 s" is not the one of `tries=7`."""
    return value in text and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


TELLS_PAYLOADS: Final = ("aiokafka", "aiosqlite", "httpcore2")
"""At DEBUG these write whole records, rows, and headers with credentials. Whoever wants that asks for them by name."""
_chosen: dict[str, Any] | None = None
_STREAMS: Final = ("stdout", "stderr")


def configure(stream: TextIO, *, level: int, as_json: bool) -> None:
    """Let the root logger write to `stream`; what was set up before is replaced. Child processes that run handlers do
    the same, if it is one that they share."""
    global _chosen
    handler = logging.StreamHandler(stream)
    handler.addFilter(JobFilter())
    handler.setFormatter(JsonFormatter() if as_json else ConsoleFormatter(colour=stream.isatty()))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in TELLS_PAYLOADS:
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.INFO)
    shared = next((name for name in _STREAMS if getattr(sys, name) is stream), None)
    _chosen = None if shared is None else {"stream": shared, "level": level, "as_json": as_json}


def chosen() -> dict[str, Any] | None:
    """What a child process has to know; None when the program set up its logging itself."""
    return _chosen


def configure_child(choice: dict[str, Any] | None) -> None:
    """In a child process: as in its parent."""
    if choice is not None:
        configure(getattr(sys, choice["stream"]), level=choice["level"], as_json=choice["as_json"])
