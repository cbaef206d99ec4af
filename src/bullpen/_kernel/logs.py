"""Loggers whose records hold no secrets, whoever formats them.

In: records of our own parts, with the errors of user code in `exc_info`, in arguments and in fields. Out: the same
records, scrubbed before any handler sees them: a program's own formatter, Sentry and log shippers get no more than our
own files do. Elsewhere: our own formats (`bullpen.ops.logs`), what counts as a secret (`bullpen._kernel.scrub`).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from bullpen._kernel.outcome import stack_of
from bullpen._kernel.remote import RemoteError, qualified
from bullpen._kernel.scrub import is_clean, scrub_lines
from bullpen._kernel.stack import MAX_CHAIN, text_of

_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """The logger of this name; its records are scrubbed."""
    logger = logging.getLogger(name)
    # A filter of a parent does not see the records of its children, so each logger of ours has it.
    if _SCRUB not in logger.filters:
        logger.addFilter(_SCRUB)
    return logger


class ScrubFilter(logging.Filter):
    """Hides secrets in a record's error, arguments and fields. Lets every record pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        given = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        # All at once: nearly every line is clean, and to ask for each value took longer than all else about it.
        if not is_clean("\n".join([text for text in map(_text, (*args, *given.values())) if text is not None])):
            if args:
                record.args = tuple(map(_clean, args))
            vars(record).update({name: _clean(value) for name, value in given.items()})
        scrub_error(record)
        return True


_SCRUB: Final = ScrubFilter()


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
    shown = type(error).__name__ if text is None else scrub_lines(text)
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


def _clean(value: Any) -> Any:
    text = _text(value)
    return value if text is None else scrub_lines(text)
