"""Durable jobs for Python on the BullMQ protocol.

    from bullpen import Queue, Worker

Every public name is here and is loaded when it is first used, so `import bullpen` costs next to nothing. A queue or
worker from here that is given no connection uses the settings, else the embedded server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from bullpen._version import __version__

if TYPE_CHECKING:
    from bullpen._kernel.backoff import Backoff
    from bullpen._kernel.policy import DeadLetters, RetryPolicy
    from bullpen.app import Bullpen
    from bullpen.errors import (
        BullpenError,
        ConnectionLost,
        DelayJob,
        DurabilityUnknown,
        EventsLost,
        InvalidOption,
        JobFailed,
        JobNotFound,
        JobStateConflict,
        NotConfigured,
        OutcomeUnknown,
        PayloadTooLarge,
        PermanentError,
        RateLimited,
        ResultTimeout,
        ReturnToWait,
        WaitForChildren,
    )
    from bullpen.queue import (
        Added,
        ChildLimits,
        Connection,
        DeadLetter,
        Durability,
        Job,
        JobCounts,
        JobState,
        NewJob,
        Queue,
        QueueEvents,
        RateLimit,
        Worker,
    )
    from bullpen.queue import Connection as _Connection
    from bullpen.queue.dead_letter import DeadLetterFilter
    from bullpen.queue.tasks import Task, TaskJob
    from bullpen.wire.events import Event
    from bullpen.wire.options import JobMeta, KeepJobs

__all__ = [
    "Added",
    "Backoff",
    "Bullpen",
    "BullpenError",
    "ChildLimits",
    "Connection",
    "ConnectionLost",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetters",
    "DelayJob",
    "Durability",
    "DurabilityUnknown",
    "Event",
    "EventsLost",
    "InvalidOption",
    "Job",
    "JobCounts",
    "JobFailed",
    "JobMeta",
    "JobNotFound",
    "JobState",
    "JobStateConflict",
    "KeepJobs",
    "NewJob",
    "NotConfigured",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "PermanentError",
    "Queue",
    "QueueEvents",
    "RateLimit",
    "RateLimited",
    "ResultTimeout",
    "RetryPolicy",
    "ReturnToWait",
    "Task",
    "TaskJob",
    "WaitForChildren",
    "Worker",
    "__version__",
]

_HOMES: Final = {
    "bullpen._kernel.backoff": ("Backoff",),
    "bullpen._kernel.policy": ("DeadLetters", "RetryPolicy"),
    "bullpen.app": ("Bullpen",),
    "bullpen.errors": (
        *("BullpenError", "ConnectionLost", "DelayJob", "DurabilityUnknown", "EventsLost", "InvalidOption"),
        *("JobFailed", "JobNotFound", "JobStateConflict", "NotConfigured", "OutcomeUnknown", "PayloadTooLarge"),
        *("PermanentError", "RateLimited", "ResultTimeout", "ReturnToWait", "WaitForChildren"),
    ),
    "bullpen.queue": (
        *("Added", "ChildLimits", "Connection", "DeadLetter", "Durability", "Job", "JobCounts", "JobState", "NewJob"),
        *("Queue", "QueueEvents", "RateLimit", "Worker"),
    ),
    "bullpen.queue.dead_letter": ("DeadLetterFilter",),
    "bullpen.queue.tasks": ("Task", "TaskJob"),
    "bullpen.wire.events": ("Event",),
    "bullpen.wire.options": ("JobMeta", "KeepJobs"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

# Hidden from the type checker, which would otherwise believe that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        if home == "bullpen.queue":
            import_module(home).set_resolver(_default_connection, prefix=_default_prefix)
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _default_connection(url: str | None) -> _Connection:
    """What a queue without a connection uses; loaded when the first of them is made."""
    from bullpen.app import connect

    return connect(url)


def _default_prefix() -> str:
    from bullpen.settings import Settings

    return Settings.load().redis.prefix
