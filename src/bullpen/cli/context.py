"""What commands share: their common options, declared once, and what follows from them.

A command names the context that it needs as its first parameter (`tree` makes options of its fields) and gets: the app,
queue or ledger that the options name, opened; and methods that print for people or, with `--json`, for programs.
Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 not done, for the reason printed; 2 the command
was wrong; 3 the server cannot be reached; 4 the time given by --timeout is up; 130 interrupted.
"""

from __future__ import annotations

import difflib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import click

from bullpen._kernel.printable import printable
from bullpen.cli import show
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Option, OptionGroup

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ledger import Ledger
    from bullpen.ops.actions import Actions
    from bullpen.queue import Queue
    from bullpen.settings import Settings

_MOST_NAMED: Final = 10
_LONG_S: Final = 1.0
NO_QUEUES: Final = (
    "no queues yet; `bullpen jobs add QUEUE NAME` creates one; --redis and --prefix select another server or prefix"
)


class Done(Exception):
    """Ends a command with exit code 1 and one line: it was understood, and could not be done."""


class TimeUp(Exception):
    """Ends a command with exit code 4 and one line: what was waited for has not happened in the time given."""


class WrongCommand(Exception):
    """Ends a command with exit code 2 and one line: a wrong command or option."""


# Options ------------------------------------------------------------------------------------------------------------

RedisOption = Annotated[str | None, Option("--redis", metavar="URL", help="Redis server; default: the configured one.")]
PrefixOption = Annotated[
    str | None, Option("--prefix", metavar="TEXT", help="Prefix of all keys; default: the configured one.")
]
DatabaseOption = Annotated[
    str | None, Option("--database", metavar="URL", help="Database; default: the configured one.")
]
ProgramOption = Annotated[
    str | None,
    Option("--app", metavar="MODULE:APP", help="Program whose workflows have dead letters on RabbitMQ or Kafka."),
]
JsonOption = Annotated[bool, Option("--json", help="Print only JSON; one document per line for lists.")]
LocalOption = Annotated[bool, Option("--local", help="Show times in this machine's time zone instead of UTC.")]
LogLevelOption = Annotated[str, Option(metavar="LEVEL", help="debug, info, warning or error.")]
LogFormatOption = Annotated[str, Option(metavar="FORMAT", help="console, or json: one object per line.")]
HttpPublicOption = Annotated[bool, Option("--http-public", help="Allow an address that other machines can reach.")]


@dataclass(frozen=True, kw_only=True)
class Output(OptionGroup):
    """A command that only prints."""

    as_json: JsonOption = False
    local: LocalOption = False

    def say(self, document: Any, *lines: object) -> None:
        """The document for programs, the lines for people."""
        if self.as_json:
            show.print_json(document)
        else:
            show.say(*lines)

    def line(self, document: Any, *pieces: tuple[str, str]) -> None:
        """The same while things happen: one line each, at once. Pieces are texts with their styles."""
        if self.as_json:
            show.print_line(document)
        else:
            show.say_styled(*pieces)

    def warn(self, *lines: object) -> None:
        """For people; programs read the data."""
        if not self.as_json:
            show.warn(*lines)

    def hint(self, line: str) -> None:
        """For a person at the screen."""
        if not self.as_json and sys.stderr.isatty():
            show.warn(line)

    def list(self, record: Record, found: Iterable[Any], *, empty: str) -> None:
        """Many: a table, or `empty` on stderr, which says what to do next."""
        shown = [record.to_json(each) for each in found]
        if self.as_json:
            show.print_json(shown)
        elif shown:
            self.table(record.columns, shown)
        else:
            show.warn(empty)

    def one(self, record: Record, found: Any) -> None:
        """One that is short enough for a row."""
        if self.as_json:
            show.print_json(record.to_json(found))
        else:
            self.table(record.columns, [record.to_json(found)])

    def fields(self, document: Mapping[str, Any], *, without: Sequence[str] = ()) -> None:
        """One: all of its fields; people are spared those that are shown in another way."""
        if self.as_json:
            show.print_json(document)
        else:
            show.print_fields({name: each for name, each in document.items() if name not in without}, local=self.local)

    def table(self, columns: Sequence[Column], rows: Iterable[Any]) -> None:
        show.print_table(columns, rows, local=self.local)

    def when(self, at: Any) -> str:
        """An instant for people."""
        return show.when(at, local=self.local)

    def done(self, verb: str, done: Sequence[Any] | int, problems: Mapping[str, str] | None = None) -> None:
        """What was done to several things, and what not; raises Done when that is not all."""
        count = done if isinstance(done, int) else len(done)
        self.say({verb: done, **({} if problems is None else {"skipped": problems})}, f"{verb}: {count}")
        if problems:
            self.warn(*problems.values())
            raise self.failed(f"not {verb}: {len(problems)}")

    def counted(self, verb: str, count: int, *, dry_run: bool) -> None:
        """How many it were, or would be."""
        document = {"matched" if dry_run else verb: count, "dryRun": dry_run}
        self.say(document, f"{'would be ' if dry_run else ''}{verb}: {count}")

    def failed(self, line: str) -> Done:
        """What ends the command; programs know already."""
        return Done("" if self.as_json else line)

    def confirm(self, question: str, *, yes: bool, refusal: str = "this deletes for good and needs --yes") -> None:
        """Ask before a bulk change. Without a terminal to ask on, `--yes` is needed."""
        if yes:
            return
        if self.as_json or not sys.stdin.isatty():
            raise WrongCommand(f"{refusal} without a terminal to confirm on")
        ask(question)

    @contextmanager
    def patience(self, doing: str) -> Iterator[None]:
        """Say to a person what takes long, if it does."""
        import asyncio

        waiting = asyncio.get_running_loop().call_later(_LONG_S, self.hint, f"{doing} …")
        try:
            yield
        finally:
            waiting.cancel()

    def bar(self, description: str, total: int | None) -> Any:
        return show.bar(description, total, hidden=self.as_json)


@dataclass(frozen=True, kw_only=True)
class OnServer(Output):
    """A command about queues."""

    redis: RedisOption = None
    prefix: PrefixOption = None

    @asynccontextmanager
    async def app(self) -> AsyncIterator[Bullpen]:
        """The configured app, or one for the named server. Raises ConnectionLost at once if no server answers."""
        from bullpen.app import Bullpen

        async with Bullpen(self.redis, prefix=self.prefix) as app:
            await answers(app)
            yield app

    @asynccontextmanager
    async def queue(self, name: str) -> AsyncIterator[tuple[Bullpen, Queue]]:
        """A queue that exists."""
        async with self.app() as app:
            await must_exist(app, name)
            yield app, app.queue(name)

    @asynccontextmanager
    async def new_queue(self, name: str, *, is_meant: bool) -> AsyncIterator[tuple[Bullpen, Queue]]:
        """A queue that may be new: the first add creates it, unless the name is similar to another."""
        async with self.app() as app:
            if not is_meant:
                await require_known_queue(app, name)
            yield app, app.queue(name)

    @asynccontextmanager
    async def acting(self, name: str) -> AsyncIterator[tuple[Queue, Actions]]:
        """A queue, and what this person does to it: written to the audit trail before it is done."""
        async with self.queue(name) as (app, queue):
            yield queue, await actions_of(app)


@dataclass(frozen=True, kw_only=True)
class OnLedger(Output):
    """A command about what the database holds."""

    database: DatabaseOption = None

    def settings(self) -> Settings:
        from bullpen.settings import Settings

        return Settings.load(ledger_url=self.database)

    def ledger(self) -> Ledger:
        """The configured ledger, to be entered."""
        return open_ledger(self.settings())


@dataclass(frozen=True, kw_only=True)
class OnBoth(OnServer, OnLedger):
    """A command about both."""

    def settings(self) -> Settings:
        from bullpen.settings import Settings

        return Settings.load(ledger_url=self.database, redis_url=self.redis, redis_prefix=self.prefix)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(OptionGroup):
    """A program that stays, and logs."""

    http_public: HttpPublicOption = False
    log_level: LogLevelOption = "info"
    log_format: LogFormatOption = "console"

    def start_logging(self) -> None:
        """Log lines as the options say: with time, process and fields."""
        level = logging.getLevelNamesMapping().get(self.log_level.upper())
        if level is None:
            raise WrongCommand(f"{self.log_level!r} is not a log level; write debug, info, warning or error")
        if self.log_format not in ("console", "json"):
            raise WrongCommand(f"{self.log_format!r} is not a log format; write console or json")
        log_fully(level, as_json=self.log_format == "json")


@dataclass(frozen=True, kw_only=True)
class ServiceOnServer(ServiceOptions):
    """The same, on a server of queues."""

    redis: RedisOption = None
    prefix: PrefixOption = None


# Reaching queues and the ledger -------------------------------------------------------------------------------------


async def answers(app: Bullpen) -> None:
    """A queue would try again for a minute, which is right for a program and wrong for a person at a prompt."""
    wire = await app.connection.open()
    wire.close()


async def must_exist(app: Bullpen, queue: str) -> None:
    """A misspelt name must not look like an empty queue, nor make one."""
    if not await _exists(app, queue):
        names = await _names(app)
        raise Done(f"there is no queue {queue!r} under the prefix {app.prefix!r}; {_what_there_is(queue, names)}")


async def require_known_queue(app: Bullpen, queue: str) -> None:
    """A new queue is made by its first job; one that is called nearly as another is taken for a misspelling."""
    if await _exists(app, queue):
        return
    near = difflib.get_close_matches(queue, await _names(app), 3, cutoff=0.8)
    if near:
        raise Done(
            f"there is no queue {queue!r}; did you mean {' or '.join(map(repr, near))}? --new-queue makes a new one"
        )


async def _exists(app: Bullpen, queue: str) -> bool:
    keys = app.queue(queue).keys
    return bool(await app.connection.shared_door(keys.base).call("EXISTS", keys.meta))


async def _names(app: Bullpen) -> list[str]:
    from bullpen.queue import find_queues

    return await find_queues(app.connection, app.prefix)


async def server_time(queue: Queue) -> datetime:
    """The server's clock: what is older than now there."""
    seconds, micros = await queue.connection.shared_door(queue.keys.base).call("TIME")
    return datetime.fromtimestamp(int(seconds) + int(micros) / 1e6, UTC)


async def queue_names(app: Bullpen) -> list[str]:
    """All queues, without those that hold the dead letters of another one."""
    names = await _names(app)
    return [name for name in names if not (name.endswith("-dlq") and name.removesuffix("-dlq") in names)]


def _what_there_is(queue: str, names: list[str]) -> str:
    if not names:
        return "there are no queues: check --redis and --prefix"
    near = difflib.get_close_matches(queue, names, 3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}? `bullpen queues list` shows all"
    some = ", ".join(names[:_MOST_NAMED])
    return f"there is {some}" + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


async def actions_of(app: Bullpen) -> Actions:
    from bullpen.ops.actions import Actor
    from bullpen.queue.actor import who

    return await app.actions(Actor(who()))


def brokers_of(app: Bullpen) -> list[str]:
    """Where events and orders travel besides Redis, as far as settings say."""
    named = (app.settings.workflows.transport, app.settings.messages.transport)
    return sorted({each for each in named if each in ("rabbitmq", "kafka")})


def open_ledger(settings: Settings) -> Ledger:
    from bullpen.wiring.ledger import make_ledger

    return make_ledger(settings)


def whoami() -> str:
    """Who asked, for the audit table."""
    import getpass

    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name, as in some containers
        return "cli"


async def each(things: Iterable[str], act: Callable[[str], Awaitable[Any]]) -> tuple[list[str], dict[str, str]]:
    """Do it to one after the other: those it was done to, and why not to the others; none keeps another from it."""
    from bullpen.errors import BullpenError

    done: list[str] = []
    problems: dict[str, str] = {}
    for thing in things:
        try:
            await act(thing)
            done.append(thing)
        except BullpenError as error:
            problems[thing] = str(error)
    return done, problems


# Asking -------------------------------------------------------------------------------------------------------------


def ask(question: str, *, default: bool = False) -> None:
    """Ask a person, and end the command unless the answer is yes."""
    with interruptible():
        click.confirm(printable(question), default=default, abort=True, err=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end a question: a running event loop would only note it, and the question would stay."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Logging ------------------------------------------------------------------------------------------------------------


def log_plainly(*, as_json: bool) -> None:
    """Log lines of a short command: errors, and which embedded server is used, when that is new. Advice is for programs
    that stay."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Plain())
    logging.getLogger("bullpen.embedded").setLevel(logging.ERROR if as_json else logging.INFO)
    logging.getLogger("bullpen.embedded").addFilter(_only_first_use)


def log_fully(level: int, *, as_json: bool = False) -> None:
    """Log lines of a program that stays: everything, with time, process and fields."""
    from bullpen.ops.logs import configure

    configure(sys.stderr, level=level, as_json=as_json)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # tells of every plug-in it loads
    logging.getLogger("bullpen.embedded").setLevel(logging.NOTSET)
    logging.getLogger("bullpen.embedded").removeFilter(_only_first_use)


class _Plain(logging.Formatter):
    """Imports what it needs when there is a line: most commands log none."""

    def format(self, record: logging.LogRecord) -> str:
        from bullpen._kernel.log_formats import PrintableFormatter

        return PrintableFormatter("bullpen: %(message)s").format(record)


def _only_first_use(record: logging.LogRecord) -> bool:
    """Of ten commands in a row, only the first reports where the jobs are."""
    from bullpen import embedded

    if record.msg != embedded.USED or not isinstance(record.args, tuple):
        return record.levelno >= logging.WARNING
    return not embedded.was_used(str(record.args[-1]))
