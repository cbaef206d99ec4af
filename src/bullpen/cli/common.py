"""What all commands share: options, how to reach queues, how to print.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 not done, for the reason printed; 2 the command
was wrong; 3 the server cannot be reached; 4 the time given by --timeout is up; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from bullpen import embedded
from bullpen._kernel.duration import written_ms
from bullpen._kernel.log_formats import PrintableFormatter
from bullpen._kernel.printable import printable, printable_json
from bullpen.app import Bullpen
from bullpen.ops.actions import Actions, Actor
from bullpen.ops.logs import configure
from bullpen.queue.actor import who
from bullpen.queue.browse import find_queues
from bullpen.wire.envelope import seal_words

T = TypeVar("T")

RedisOption = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="Server to use; else what is configured.")
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", metavar="TEXT", help="First part of all keys; else what is configured.")
]
LogLevelOption = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")]
LogFormatOption = Annotated[str, typer.Option(metavar="FORMAT", help="console, or json: one object per line.")]
HttpPublicOption = Annotated[
    bool, typer.Option("--http-public", help="The address may be one that other machines can reach.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


class SafeConsole(Console):
    """Prints nothing that a terminal would obey, except what we wrote ourselves: colours and movements of the cursor
    are no text of a segment, and all else is."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


out = SafeConsole(soft_wrap=True, highlight=False)
err = SafeConsole(stderr=True, soft_wrap=True, highlight=False)

_MOST_NAMED: Final = 10
WIDE: Final = 10_000
"""Columns of a table that nobody looks at directly: a pipe must get all of the text."""


class Done(Exception):
    """Ends a command with exit code 1 and one line: it was understood, and could not be done."""


class TimeUp(Exception):
    """Ends a command with exit code 4 and one line: what was waited for has not happened in the time given."""


class WrongCommand(Exception):
    """Ends a command with exit code 2 and one line: it makes no sense as it stands."""


# Reaching queues ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(redis: str | None, prefix: str | None) -> AsyncIterator[Bullpen]:
    """The configured app, or one for the server that was named. Raises ConnectionLost at once if nobody answers."""
    async with Bullpen(redis, prefix=prefix) as app:
        # A queue would try again for a minute, which is right for a program and wrong for a person at a prompt.
        wire = await app.connection.open()
        wire.close()
        yield app


async def acting(app: Bullpen) -> Actions:
    """What this person does to queues and jobs: written to the audit trail before it is done."""
    return await app.actions(Actor(who()))


async def must_exist(app: Bullpen, queue: str) -> None:
    """A misspelt name must not look like an empty queue, nor make one."""
    keys = app.queue(queue).keys
    if not await app.connection.shared_door(keys.base).call("EXISTS", keys.meta):
        names = await find_queues(app.connection, app.prefix)
        raise Done(f"there is no queue {queue!r} under the prefix {app.prefix!r}; {_what_there_is(queue, names)}")


def _what_there_is(queue: str, names: list[str]) -> str:
    if not names:
        return "there is none at all: check --redis and --prefix"
    near = difflib.get_close_matches(queue, names, 3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}? `bullpen queues` lists all"
    some = ", ".join(names[:_MOST_NAMED])
    return f"there is {some}" + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run the asynchronous part of a command."""
    return asyncio.run(work)


def speak_plainly(*, as_json: bool) -> None:
    """Log lines of a short command: errors, and which embedded server is used, when that is new. Advice is for programs
    that stay."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("bullpen: %(message)s"))
    logging.getLogger("bullpen.embedded").setLevel(logging.ERROR if as_json else logging.INFO)
    logging.getLogger("bullpen.embedded").addFilter(_only_first_use)


def speak_fully(level: int, *, as_json: bool = False) -> None:
    """Log lines of a program that stays: everything, with time, process and fields."""
    configure(sys.stderr, level=level, as_json=as_json)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # tells of every plug-in it loads
    logging.getLogger("bullpen.embedded").setLevel(logging.NOTSET)
    logging.getLogger("bullpen.embedded").removeFilter(_only_first_use)


def _only_first_use(record: logging.LogRecord) -> bool:
    """Whoever types ten commands knows after the first one where the jobs are."""
    if record.msg not in (embedded.USED, embedded.NEARBY) or not isinstance(record.args, tuple):
        return record.levelno >= logging.WARNING
    return not embedded.was_used(str(record.args[-1]))


def speak_as_told(log_level: str, log_format: str) -> None:
    """As `speak_fully`, by the options --log-level and --log-format."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise WrongCommand(f"{log_level!r} is no log level; write debug, info, warning or error")
    if log_format not in ("console", "json"):
        raise WrongCommand(f"{log_format!r} is no log format; write console or json")
    speak_fully(level, as_json=log_format == "json")


YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str, *, yes: bool, as_json: bool) -> None:
    """Ask before something is deleted that nobody named one by one. Where nobody can be asked, `--yes` must say it."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise WrongCommand("this deletes for good and needs --yes where nobody can be asked")
    ask(question)


def ask(question: str, *, default: bool = False) -> None:
    """Ask a person, and end the command unless the answer is yes."""
    typer.confirm(printable(question), default=default, abort=True, err=True)


class QueueFirst(TyperGroup):
    """A group whose commands take a queue, which may stand first: `jobs emails` lists, `jobs emails show 5` shows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        match args:
            case [] | ["--help", *_]:
                pass
            case [word, *_] if word in self.commands:
                pass
            case [word, *_] if word.startswith("-"):
                args = ["list", *args]
            case [queue, action, *rest] if action in self.commands:
                args = [action, queue, *rest]
            case [word, another, *_] if not another.startswith("-"):
                raise WrongCommand(f"no such action {word!r}; there is {', '.join(self.commands)}")
            case _:
                args = ["list", *args]
        return super().parse_args(ctx, args)


# Reading arguments --------------------------------------------------------------------------------------------------


def duration(option: str, text: str) -> timedelta:
    """`1500` or `1500ms`, `90s`, `15m`, `2h`, `1d`."""
    ms = written_ms(text)
    if ms is None:
        raise typer.BadParameter(
            f"{text!r} is no duration; write 1500 (milliseconds), 90s, 15m, 2h or 1d", param_hint=f"'{option}'"
        )
    return timedelta(milliseconds=ms)


def parse_json(option: str, text: str) -> Any:
    """JSON from the command line; `-` reads it from stdin."""
    try:
        return json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise typer.BadParameter(f"{short(text)} is no JSON: {error}", param_hint=f"'{option}'") from None


def read_json(option: str, text: str) -> Any:
    """As `parse_json`; `@FILE` reads a file."""
    if not text.startswith("@"):
        return parse_json(option, text)
    try:
        return json.loads(Path(text[1:]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text[1:]!r} cannot be read as JSON: {error}", param_hint=f"'{option}'") from None


# Printing -----------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    print(printable_json(value, indent=2 if sys.stdout.isatty() else None, default=str))


def print_line(value: Any) -> None:
    """One JSON document on one line, at once: of those that come as things happen."""
    print(printable_json(value, default=str), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[str] = ()) -> None:
    """A table without lines; columns named in `numbers` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    right = set(numbers)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))  # as Text: brackets in data are no markup
    if out.is_terminal:
        SafeConsole(highlight=False).print(table)
    else:
        SafeConsole(width=WIDE, highlight=False).print(table)


def when(epoch_ms: int) -> str:
    """An instant for people, in UTC; empty for 0, which means unset."""
    if not epoch_ms:
        return ""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def short(value: Any, limit: int = 80) -> str:
    """JSON on one line, cut to what fits beside other columns; of a sealed payload only how it is sealed."""
    if (words := seal_words(value)) is not None:
        return printable(words)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = printable(" ".join(text.split()))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
