"""What to do when work fails: one policy object, and the presets of the features built on it.

Elsewhere: applying it to one attempt (`bullpen._kernel.outcome`), the pause between tries (`bullpen._kernel.backoff`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from bullpen._kernel.backoff import BUILT_IN, ONE_HOUR_MS, Backoff, BackoffStrategy, CustomBackoff
from bullpen._kernel.duration import MAX_MS, check_int, is_text
from bullpen._kernel.remote import RemoteError, qualified
from bullpen._kernel.signatures import check_takes
from bullpen.errors import InvalidOption, PermanentError, require

logger = logging.getLogger("bullpen.worker")

RetryOwner = Literal["queue", "broker", "ledger"]
DeadLetterStore = Literal["none", "failed_set", "queue", "row"]
IdRule = Literal["counter", "random", "key", "given"]

DEFAULT_ATTEMPTS: Final = 3
DEFAULT_BACKOFF: Final = Backoff.exponential(1_000)
DEFAULT_LOCK_MS: Final = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """Where finally failed work goes."""

    store: DeadLetterStore = "failed_set"
    """none; failed_set: the queue's own failed set; queue: another queue; row: the ledger row itself."""
    suffix: str = "-dlq"
    """With store queue: what follows the queue's name."""
    name: str | None = None
    """With store queue: a fixed name instead of the suffix rule."""
    cancelled: bool = False
    """With store queue: also for jobs that somebody cancelled."""

    def __post_init__(self) -> None:
        if self.store not in ("none", "failed_set", "queue", "row"):
            raise InvalidOption("dead_letters.store", "'none', 'failed_set', 'queue' or 'row'", self.store)
        suffix_fits = is_text(self.suffix) and ":" not in self.suffix
        require("dead_letters.suffix", suffix_fits, "non-empty text without ':'", self.suffix)
        require("dead_letters.cancelled", isinstance(self.cancelled, bool), "True or False", self.cancelled)
        require("dead_letters.name", self.name is None or is_text(self.name), "non-empty text or None", self.name)

    def queue_for(self, queue: str) -> str | None:
        """Name of the dead-letter queue of `queue`, None when dead letters are kept elsewhere."""
        return (self.name or queue + self.suffix) if self.store == "queue" else None


_UNNAMED: Final[Any] = object()
_DEFAULTS: Final[dict[str, Any]] = {
    "attempts": DEFAULT_ATTEMPTS,
    "backoff": DEFAULT_BACKOFF,
    "strategies": MappingProxyType({}),
    "permanent_errors": (),
    "is_permanent": None,
    "retry_owner": "queue",
    "dead_letters": DeadLetterPolicy(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Attempts, pauses, which errors end it all, who owns the retry, where dead letters go.

    A policy changes only what it names: the rest is as it would be without a policy (`over`).
    """

    attempts: int = _UNNAMED
    """All tries, the first included; 1 means no retry. Not named: 3."""
    backoff: Backoff | None = _UNNAMED
    """Pause between tries, of a worker: for jobs that name a strategy which `strategies` has not. None is only possible
    with one attempt. Not named: 1 s, doubling."""
    strategies: Mapping[str, BackoffStrategy | Backoff] = field(default=_UNNAMED, compare=False)
    """How long to wait, by the type of a job's backoff that is no built-in one. A strategy that raises, or returns no
    time, is logged and `backoff` takes its place."""
    permanent_errors: tuple[type[BaseException], ...] = _UNNAMED
    """Errors (with their subclasses) after which trying again is pointless. PermanentError always is one."""
    is_permanent: Callable[[BaseException], bool] | None = field(default=_UNNAMED, compare=False)
    """A further test, for errors that differ by a field such as an HTTP status. Must not raise."""
    retry_owner: RetryOwner = _UNNAMED
    """queue: the job is retried; broker: the message is; ledger: the row is, its job runs once. Not named: queue."""
    dead_letters: DeadLetterPolicy = _UNNAMED
    """Not named: they stay in the queue's failed set."""
    named: frozenset[str] = field(init=False, repr=False, compare=False)
    """The fields that were given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", frozenset(name for name in _DEFAULTS if getattr(self, name) is not _UNNAMED))
        for name in _DEFAULTS.keys() - self.named:
            object.__setattr__(self, name, _DEFAULTS[name])
        check_int("attempts", self.attempts, minimum=1)
        if self.backoff is None and self.attempts > 1:
            object.__setattr__(self, "backoff", DEFAULT_BACKOFF)
        require("backoff", isinstance(self.backoff, Backoff | None), "a Backoff", self.backoff)
        check_strategies("strategies", self.strategies)
        are_errors = _are_error_classes(self.permanent_errors)
        require("permanent_errors", are_errors, "a tuple of exception classes", self.permanent_errors)
        if self.retry_owner not in ("queue", "broker", "ledger"):
            raise InvalidOption("retry_owner", "'queue', 'broker' or 'ledger'", self.retry_owner)

    def over(self, base: RetryPolicy) -> RetryPolicy:
        """What this policy names, and for the rest what `base` says."""
        return replace(base, **{name: getattr(self, name) for name in self.named})

    @property
    def job_attempts(self) -> int:
        """Attempts to write into a job. When a row owns the retry, its job runs once and reports."""
        return 1 if self.retry_owner == "ledger" else self.attempts

    def pause_ms(
        self,
        backoff: Backoff | CustomBackoff,
        failures: int,
        error: BaseException,
        subject: Any,
        random: Callable[[], float],
    ) -> int | None:
        """How long to wait after the `failures`-th failure of `subject`; None: it shall not be tried again."""
        name = backoff.type if isinstance(backoff, CustomBackoff) else backoff.kind
        chosen: Any = self.strategies.get(name, backoff)
        if callable(chosen):
            try:
                chosen = chosen(failures, error, subject)
                if chosen is None or (pause_ms := _read_pause(chosen, failures, random)) < 0:
                    return None
                return pause_ms
            except Exception:  # user code: what it gets wrong must cost no job its retry
                logger.exception("backoff strategy %r failed; the worker's default takes its place", name)
        if not isinstance(chosen, Backoff):
            chosen = self.backoff or DEFAULT_BACKOFF
        return int(chosen.delay_for(failures, random))

    def is_final(self, error: BaseException) -> bool:
        """True when trying again is pointless, whatever attempts are left."""
        if isinstance(error, (PermanentError, *self.permanent_errors)):
            return True
        if isinstance(error, RemoteError) and any(
            qualified(kind) in error.class_names for kind in self.permanent_errors
        ):
            return True
        # Handlers moved from the official Python client raise its class; like Node, we know it by name.
        if any(kind.__name__ == "UnrecoverableError" for kind in type(error).__mro__):
            return True
        try:
            return self.is_permanent is not None and bool(self.is_permanent(error))
        except Exception:  # noqa: BLE001 - user code; a broken test must not make a retryable failure final
            return False


def check_strategies(option: str, value: object) -> None:
    """Strategies by name: functions, or a Backoff each."""
    expected = "a mapping from the type of a backoff to a function or a Backoff"
    require(option, isinstance(value, Mapping), expected, value)
    assert isinstance(value, Mapping)
    for name, strategy in value.items():
        require(option, is_text(name) and name not in BUILT_IN, "names other than 'fixed' and 'exponential'", name)
        is_plain = callable(strategy) and not inspect.iscoroutinefunction(strategy)
        require(
            f"{option}.{name}", is_plain or isinstance(strategy, Backoff), "a plain function or a Backoff", strategy
        )
        if not isinstance(strategy, Backoff):
            check_takes(f"{option}.{name}", strategy, "failures", "error", "job")


def _read_pause(value: Any, failures: int, random: Callable[[], float]) -> int:
    """Milliseconds of what a strategy returned, below zero for "not again". Raises for what is no time."""
    if isinstance(value, Backoff):
        return value.delay_for(failures, random)
    if isinstance(value, timedelta):
        value = value / timedelta(milliseconds=1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption("backoff", "milliseconds, a timedelta, a Backoff or None from the strategy", value)
    return int(max(-1.0, min(value, MAX_MS)) if value == value else -1)  # nan is no time: not again


def _are_error_classes(value: object) -> bool:
    kinds = value if isinstance(value, tuple) else (None,)
    return all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The defaults of one feature: a policy, and what goes with it on queue and worker."""

    policy: RetryPolicy
    keep_completed: int | None = None
    """How many completed jobs stay; None all, 0 none."""
    keep_failed: int | None = None
    lock_ms: int | None = DEFAULT_LOCK_MS
    """None: no job lock, the broker's acknowledgement takes its place."""
    concurrency: int | None = 1
    """None: set per channel."""
    job_id: IdRule = "counter"
    id_prefix: str = ""


def from_retries(retries: int) -> int:
    """Attempts for a setting that counts tries after the first: 5 retries are 6 attempts."""
    return check_int("retries", retries, minimum=0) + 1


PLAIN_JOB: Final = Preset(policy=RetryPolicy())

WORKFLOW_EVENT: Final = Preset(
    policy=RetryPolicy(backoff=Backoff.exponential(30_000), dead_letters=DeadLetterPolicy(store="queue")),
    keep_completed=1_000,
    keep_failed=5_000,
    job_id="key",
)

SCHEDULED_MESSAGE: Final = Preset(
    policy=RetryPolicy(
        attempts=from_retries(5),
        backoff=Backoff.exponential(2_000, maximum=32_000),
        retry_owner="broker",
        dead_letters=DeadLetterPolicy(store="queue", name="birthday.messages.dlq"),
    ),
    lock_ms=None,
    concurrency=5,
    job_id="given",
)

OUTBOX_DELIVERY: Final = Preset(
    policy=RetryPolicy(
        attempts=10,
        backoff=Backoff.exponential(60_000, maximum=900_000, spread=10_000),
        retry_owner="ledger",
        dead_letters=DeadLetterPolicy(store="row"),
    ),
    keep_completed=0,
    concurrency=None,
    job_id="given",
)

WORKFLOW_RUN: Final = Preset(
    policy=RetryPolicy(
        backoff=Backoff.exponential(5_000, maximum=ONE_HOUR_MS), dead_letters=DeadLetterPolicy(store="queue")
    ),
    keep_completed=100,
    lock_ms=300_000,
    concurrency=100,
    job_id="given",
)

INGESTION: Final = Preset(
    # Nothing is said about its retries: what BullMQ does without options is one attempt.
    policy=RetryPolicy(attempts=1, backoff=None, dead_letters=DeadLetterPolicy(store="none")),
    keep_failed=500,
    job_id="random",
    id_prefix="idx",
)
