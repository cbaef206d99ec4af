"""What becomes of one attempt: a closed set of outcomes, and the pure function that chooses.

In: what the handler did (Returned or Raised) and how often the job was tried. Out: one Outcome.
Elsewhere: running the handler (`execute`), making the outcome true (`bullpen.worker.exchange`).
"""

from __future__ import annotations

import random as _random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.backoff import Backoff, CustomBackoff
from bullpen._kernel.duration import to_ms
from bullpen._kernel.policy import RetryPolicy
from bullpen._kernel.remote import RemoteError
from bullpen._kernel.scrub import scrub_lines
from bullpen._kernel.stack import format_stack, text_of
from bullpen.errors import (
    DelayJob,
    InvalidOption,
    JobSignal,
    NotJson,
    PayloadTooLarge,
    PermanentError,
    RateLimited,
    ReturnToWait,
    WaitForChildren,
)

MAX_TEXT: Final = 5_000
"""Characters kept of an error's text and of its stack. Text of user code is never stored unbounded."""

_SCRUBBED: Final = 2 * MAX_TEXT
"""Characters that are looked at for secrets: more than are kept, so that none is cut in half unrecognised."""


class Cause(StrEnum):
    """Why a job failed finally."""

    EXHAUSTED = "exhausted"
    """All attempts are used up."""
    PERMANENT = "permanent"
    """The error, or the worker's own backoff strategy, says that trying again is pointless."""
    BAD_RESULT = "bad_result"
    """The handler worked, but its return value cannot be stored."""
    BAD_DATA = "bad_data"
    """The stored data cannot be read."""
    DEFERRED = "deferred"
    """Somebody else decided the failure before the job ran: a failed child, a stall limit."""
    POISON = "poison"
    """The job killed its worker while it ran alone."""
    CANCELLED = "cancelled"
    """Somebody cancelled it."""
    EXPIRED = "expired"
    """It waited longer than its ttl before it could start."""
    SECURITY = "security"
    """What the job says of itself is not what is stored: it may be forged."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler came back with a value."""

    value: Any


RETURNED_NOTHING: Final = Returned(None)
"""What most handlers do: made once."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised."""

    error: BaseException


Result = Returned | Raised


@dataclass(frozen=True, slots=True)
class Completed:
    """Done; `value_json` is the return value as it is stored."""

    value_json: bytes


@dataclass(frozen=True, slots=True)
class Retry:
    """Failed, to be tried again after `delay_ms` (0: at once). The attempt counts."""

    reason: str
    stack: str
    delay_ms: int
    keeps_turn: bool = False
    """With no delay: before everything that waits, so that nothing overtakes it."""
    error_type: str = field(default="", compare=False)
    """The class of what was raised, for the log line."""
    is_logged: bool = field(default=False, compare=False)
    """Whoever judged has written the log line already."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed finally. The attempt counts."""

    reason: str
    stack: str
    cause: Cause
    error: BaseException | None = field(default=None, compare=False, repr=False)
    """What was raised, for the log line. Not stored: it may hold secrets."""
    is_logged: bool = field(default=False, compare=False)
    """Whoever judged has written the log line already."""

    @property
    def error_type(self) -> str:
        """The class of what was raised; empty when the reason tells of something else."""
        return "" if self.error is None else type_name(self.error)


@dataclass(frozen=True, slots=True)
class Delayed:
    """To be run again after `delay_ms`, by the handler's wish. No attempt counts."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Back to the front of the line. No attempt counts. `pause_ms` > 0: nobody takes a job for so long."""

    pause_ms: int = 0


@dataclass(frozen=True, slots=True)
class WaitingChildren:
    """Parked until the job's children are done. No attempt counts."""


Outcome = Completed | Retry | Failed | Delayed | Waiting | WaitingChildren

Ended = Result | Outcome
"""How a run ended: with what its handler did, or with an outcome where whoever ran it has judged already."""


class Untrusted(Exception):
    """What a job says of itself is not what is stored. It fails for good, and whoever noticed has logged it."""


def failure_in(result: Ended) -> BaseException | str | None:
    """What went wrong, for whoever watches the run; None when nothing has, also if the handler asks to be called
    again."""
    if isinstance(result, Failed):
        return result.error or result.reason
    if isinstance(result, Retry):
        return result.reason
    if not isinstance(result, Raised):
        return None
    error = result.error
    return None if isinstance(error, JobSignal) and not isinstance(error, PermanentError) else error


DEFAULT_POLICY: Final = RetryPolicy()


def judge(
    result: Ended,
    *,
    attempts_made_before: int,
    attempts: int,
    backoff: Backoff | CustomBackoff | None,
    policy: RetryPolicy = DEFAULT_POLICY,
    subject: Any = None,
    random: Callable[[], float] = _random.random,
) -> Outcome:
    """Choose the outcome of one attempt. Never raises.

    `attempts` and `backoff` are the job's own (whoever made it decided them); `attempts_made_before` does not count the
    attempt that is judged. From `policy` come the errors that are final, and the pause where the job names a strategy
    of the worker's, which is called with `subject`.
    """
    match result:
        case Returned(value):
            return _complete(value)
        case Raised(error):
            try:
                outcome = _signalled(error)
            except InvalidOption as exc:  # DelayJob(-5) and the like: a mistake of the handler, an error like others
                outcome, error = None, exc
            if outcome is not None:
                return outcome
            return _failed(error, attempts_made_before + 1, attempts, backoff, policy, subject, random)
        case _:
            return result


def describe(error: BaseException) -> tuple[str, str]:
    """The text and the stack of an error, as they may be stored: bounded, scrubbed, never empty, always valid UTF-8."""
    text = text_of(error)
    stack, is_clean = stack_of(error, text)
    if text is None or not text.strip():
        return type(error).__name__, stack
    return cut(text if is_clean else scrub_lines(storable(text[:_SCRUBBED]))), stack


def type_name(error: BaseException) -> str:
    """The class of an error without its module, also of one that was raised in another process."""
    return error.kind.rpartition(".")[2] if isinstance(error, RemoteError) else type(error).__name__


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Bound a text, keeping its beginning."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


_COMPLETED_WITH_NOTHING: Final = Completed(b"null")


def _complete(value: Any) -> Outcome:
    if value is None:  # what most handlers return
        return _COMPLETED_WITH_NOTHING
    try:
        value_json = json.encode(value, what="return value")
        json.check_result_size(len(value_json))
    except (NotJson, PayloadTooLarge) as exc:
        # Final although attempts may be left: the work is done, and running it again would end here again.
        return Failed(*describe(exc), Cause.BAD_RESULT, exc)
    return Completed(value_json)


def _signalled(error: BaseException) -> Outcome | None:
    match error:
        case Untrusted():
            text = describe(error)[0]
            return Failed(text, text, Cause.SECURITY, is_logged=True)
        case DelayJob():
            return Delayed(to_ms("DelayJob.delay", error.delay))
        case RateLimited():
            return Waiting(to_ms("RateLimited.pause", error.pause))
        case ReturnToWait():
            return Waiting()
        case WaitForChildren():
            return WaitingChildren()
    return None


def _failed(
    error: BaseException,
    attempts_made: int,
    attempts: int,
    backoff: Backoff | CustomBackoff | None,
    policy: RetryPolicy,
    subject: Any,
    random: Callable[[], float],
) -> Retry | Failed:
    reason, stack = describe(error)
    if policy.is_final(error):
        return Failed(reason, stack, Cause.PERMANENT, error)
    if attempts_made >= attempts:
        return Failed(reason, stack, Cause.EXHAUSTED, error)
    pause_ms = 0 if backoff is None else policy.pause_ms(backoff, attempts_made, error, subject, random)
    if pause_ms is None:
        return Failed(reason, stack, Cause.PERMANENT, error)
    return Retry(reason, stack, pause_ms, error_type=type_name(error))


def stack_of(error: BaseException, text: str | None) -> tuple[str, bool]:
    """The stack of an error with this text as it may be stored. True: it was clean as it came, and so is the text."""
    is_clean = False
    try:
        stack, is_clean = (error.stack, False) if isinstance(error, RemoteError) else format_stack(error, text)
    except Exception:  # noqa: BLE001 - user code in __cause__ or __notes__, or an endless chain
        stack = type(error).__name__
    stack = stack[-_SCRUBBED:]
    is_clean = is_clean and "\0" not in stack and "\0" not in (text or "")
    if not is_clean:
        stack = scrub_lines(storable(stack))
    # The end of a Python traceback has the error and the line that raised it.
    return stack if len(stack) <= MAX_TEXT else "…" + stack[-(MAX_TEXT - 1) :], is_clean


def storable(text: str) -> str:
    """Without lone surrogates, which come from file names and broken decoders and which no UTF-8 field can hold, and
    without NUL, which PostgreSQL cannot."""
    text = text.replace("\0", " ")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
