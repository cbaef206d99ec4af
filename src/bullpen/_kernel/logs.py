"""Log records that say whose they are and hold no secrets, whoever formats them.

In: records of our own parts, with the errors of user code in `exc_info`, in arguments and in fields. Out: the same
records, scrubbed before any handler sees them: a program's own formatter, Sentry and log shippers get no more than our
own files do. And, through `JobFilter`, the fields of the job that runs on every record of whoever logs meanwhile.
Elsewhere: our own formats (`bullpen._kernel.log_formats`), what counts as a secret (`bullpen._kernel.scrub`).
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, Protocol

from bullpen._kernel import tracing
from bullpen._kernel.outcome import cut, stack_of
from bullpen._kernel.remote import RemoteError, qualified
from bullpen._kernel.scrub import is_clean, scrub_around, scrub_lines
from bullpen._kernel.stack import MAX_CHAIN, text_of

_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Subject(Protocol):
    """What is being handled: a job, a delivery of a broker, a row of the outbox."""

    def log_fields(self) -> Mapping[str, Any]:
        """Its fields under the names of log records; absent ones are None. Never raises."""
        ...


ID_FIELDS: Final = frozenset(
    (
        *("jobId", "jobName", "queue", "urn", "runId", "tenantId", "correlationId", "traceId", "attempt"),
        *("outboxId", "integrationType", "eventType", "worker"),
    )
)
"""Fields that say whose a line is."""
MOST_LOGGED: Final = 20_000
"""Characters of one text. Scrubbing takes time for each: seconds for a million that somebody chose for it."""
_NAME_LIKE: Final = re.compile(r"[\w.:{}/#-]{1,300}").fullmatch
_CONVERSION: Final = re.compile(r"%[-#0 +]*(?:\d+|\*)?(?:\.\d+)?([a-zA-Z%])")
_handled: ContextVar[Subject | None] = ContextVar("bullpen_handled", default=None)
set_handled: Final = _handled.set
"""Called where user code begins, in a context of its own. Bound once: it is called for every job."""


@contextmanager
def handling(subject: Subject) -> Iterator[None]:
    """The same where the context is shared with others, or where a job handles something of its own."""
    outer = _handled.get()
    before = _handled.set(subject if outer is None else _Within(outer, subject))
    try:
        yield
    finally:
        _handled.reset(before)


class _Within:
    def __init__(self, outer: Subject, inner: Subject) -> None:
        self._outer, self._inner = outer, inner

    def log_fields(self) -> Mapping[str, Any]:
        inner = {name: value for name, value in self._inner.log_fields().items() if value is not None}
        return {**self._outer.log_fields(), **inner}


def get_logger(name: str) -> logging.Logger:
    """The logger of this name; its records are scrubbed."""
    logger = logging.getLogger(name)
    # A filter of a parent does not see the records of its children, so each logger of ours has it.
    if _SCRUB not in logger.filters:
        logger.addFilter(_SCRUB)
    return logger


class ScrubFilter(logging.Filter):
    """Hides secrets in a record's error, text, arguments and fields. Lets every record pass.

    Ids and names are no secrets, and a random one may look like a card's number or a key: the fields of `ID_FIELDS`
    pass as they are, wherever their values stand. So does a text that our own lines show with `%r`, which they do with
    names and ids only.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        given = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        values = (*args, *given.values()) if args else (record.msg, *given.values())
        # All at once: nearly every line is clean, and to ask for each value took longer than all else about it.
        if not is_clean("\n".join([text for text in map(_text, values) if text is not None])):
            self._hide(record, args, given)
        scrub_error(record)
        return True

    def _hide(self, record: logging.LogRecord, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        ids = id_values(given)
        vars(record).update({name: _clean(value, ids) for name, value in given.items() if not is_id(name, value)})
        if not args:
            record.msg = _clean(record.msg, ids)
            return
        shown = [found[1] for found in _CONVERSION.finditer(str(record.msg)) if found[1] != "%"]
        shown += [""] * (len(args) - len(shown))
        ids += [value for value, how in zip(args, shown, strict=False) if how == "r" and isinstance(value, str)]
        record.args = tuple(_clean(value, ids) for value in args)


_SCRUB: Final = ScrubFilter()


class JobFilter(logging.Filter):
    """Puts the fields of the job that is being handled on every record: `jobId`, `jobName`, `queue`, `attempt`,
    `tenantId`, `correlationId`, `traceId`, as far as they are known. Fields that a record has already stay.

    Also hides secrets in the error of a record. Lets every record pass. Add it to the handlers of a program's own
    logging; the handlers of `bullpen run` have it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        given = vars(record)
        if tracing.tracer is not None and (trace_id := tracing.trace_id(tracing.carrier())):
            given.setdefault("traceId", trace_id)  # of the span that is open now; the job came with its producer's
        subject = _handled.get()
        if subject is not None:
            for name, value in subject.log_fields().items():
                if value is not None:
                    given.setdefault(name, value)
        scrub_error(record)
        return True


def scrub_error(record: logging.LogRecord) -> None:
    """Hide secrets in the error of a record and in the text that formatters show of it."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if error is None or isinstance(error, _StandIn):
        return
    # The text too: a line of source, which is printed with each frame, may hold a secret as well. Formatters of the
    # standard library take this text and make none of their own.
    record.exc_text, is_clean_error = stack_of(error, text_of(error))
    if not is_clean_error:
        error = showable(error)
        record.exc_info = (type(error), error, error.__traceback__)


def showable(error: BaseException, depth: int = 0) -> BaseException:
    """The error itself if it says nothing secret, else one of the same name, place and history with a scrubbed text."""
    if isinstance(error, RemoteError):
        return _stand_in(error, error.kind, scrub_lines(str(error)), RemoteTraceback(scrub_lines(error.stack)))
    text = text_of(error)
    shown = type(error).__name__ if text is None else scrub_lines(cut(text, MOST_LOGGED))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    clean_notes = [scrub_lines(note) for note in notes]
    is_deep = depth >= MAX_CHAIN
    cause = None if error.__cause__ is None or is_deep else showable(error.__cause__, depth + 1)
    context = cause
    if error.__context__ is not error.__cause__:
        context = None if error.__context__ is None or is_deep else showable(error.__context__, depth + 1)
    parts = error.exceptions[:MAX_CHAIN] if isinstance(error, BaseExceptionGroup) and not is_deep else ()
    clean_parts = [showable(part, depth + 1) for part in parts]
    if (
        (shown, clean_notes) == (text, notes)
        and (cause is error.__cause__ and context is error.__context__)
        and all(clean is part for clean, part in zip(clean_parts, parts, strict=True))
    ):
        return error
    made = _stand_in(error, qualified(type(error)), shown, cause)
    made.__context__, made.__suppress_context__ = context, error.__suppress_context__
    for number, part in enumerate(clean_parts, 1):
        clean_notes.append(f"part {number}: {type(part).__name__}: {part}")
    for note in clean_notes:
        made.add_note(note)
    return made


class _Noise(Enum):
    DROPPED = "dropped"
    LIMITED = "limited"


_noise: ContextVar[_Noise | None] = ContextVar("bullpen_noise", default=None)
_SAME_AGAIN_S: Final = 60.0


@contextmanager
def calming(driver: str, *, drop: bool = False) -> Iterator[None]:
    """What a driver warns of while it works for us here, or in tasks that it starts here, is passed on once a minute,
    or not at all if we get it as an error anyway. A broker that is away gets hundreds of lines a second otherwise.

    Only of work for us: whoever uses the same driver beside us sees all of its lines. Its level is left alone.
    """
    for name in list(logging.root.manager.loggerDict):
        if name == driver or name.startswith(f"{driver}."):
            logger = logging.getLogger(name)
            if _CALM not in logger.filters:
                logger.addFilter(_CALM)
    before = _noise.set(_Noise.DROPPED if drop else _Noise.LIMITED)
    try:
        yield
    finally:
        _noise.reset(before)


class _CalmFilter(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        noise = _noise.get()
        if noise is None or not logging.WARNING <= record.levelno < logging.CRITICAL:
            return True
        if noise is _Noise.DROPPED:
            return False
        key, now = (record.name, str(record.msg)), time.monotonic()
        if now - self._passed.get(key, -math.inf) < _SAME_AGAIN_S:
            return False
        self._passed[key] = now
        return True


_CALM: Final = _CalmFilter()


class RemoteTraceback(Exception):
    """Where an error was raised in another process: the text of its stack."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _StandIn(Exception):
    """An error whose own text must not be shown. Made only in classes that bear the name of the original."""


def _stand_in(error: BaseException, name: str, text: str, cause: BaseException | None) -> BaseException:
    module, _, qualname = name.rpartition(".")
    kind = type(qualname, (_StandIn,), {"__module__": module or "builtins", "__qualname__": qualname})
    made: BaseException = kind(text)
    made.__traceback__ = error.__traceback__
    made.__cause__ = cause
    return made


def _text(value: Any) -> str | None:
    if isinstance(value, BaseException):
        text = text_of(value)
        return type(value).__name__ if text is None else text
    return value if isinstance(value, str) else None


def _clean(value: Any, ids: Sequence[str]) -> Any:
    text = _text(value)
    return value if text is None else scrub_around(cut(text, MOST_LOGGED), ids)


def is_id(name: str, value: Any) -> bool:
    """Whether this field holds an id or a name, in which nothing is hidden. A job's id is whatever it is; in the place
    of another name somebody may have put a whole text, or a mail address."""
    if name == "jobId":
        return True
    return name in ID_FIELDS and (not isinstance(value, str) or _NAME_LIKE(value) is not None)


def id_values(fields: Mapping[str, Any]) -> list[str]:
    """What stands in the fields that are ids and names."""
    return [value for name, value in fields.items() if isinstance(value, str) and is_id(name, value)]


def is_scrubbed(record: logging.LogRecord) -> bool:
    """Whether the filter has seen this record: then whoever formats it need not look again, and must not. Text in which
    one of our queues is called `password` would look like a secret that a known id only follows."""
    logger = logging.root.manager.loggerDict.get(record.name)
    return isinstance(logger, logging.Logger) and _SCRUB in logger.filters
