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
    from bullpen._kernel.injection import Depends
    from bullpen._kernel.keep import KeepJobs
    from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
    from bullpen.app import Bullpen
    from bullpen.errors import (
        BullpenError,
        ConnectionLost,
        CorruptJob,
        DatabaseUnavailable,
        DeadLetterChanged,
        DeadLetterNotEditable,
        DeadLetterNotFound,
        DelayJob,
        DeliveryLost,
        DoubtfulDefinition,
        DurabilityUnknown,
        EmbeddedError,
        EmitsToItself,
        EndlessSteps,
        EntityBusy,
        EntityChanged,
        EntityFailed,
        EntityNotFound,
        EventIdTaken,
        EventsLost,
        HandlerTimeout,
        InsufficientCredits,
        InvalidOption,
        JobCancelled,
        JobFailed,
        JobLockLost,
        JobNotFound,
        JobSignal,
        JobStateConflict,
        LaneFull,
        LedgerError,
        LedgerNotReady,
        MessageNotSent,
        MissingExtra,
        MissingValue,
        NotConfigured,
        NotInTransaction,
        NotJson,
        NoTransition,
        NotTakenNow,
        ObjectStoreFailed,
        OutcomeUnknown,
        OutOfMemory,
        Overtaken,
        PayloadMissing,
        PayloadTampered,
        PayloadTooLarge,
        PayloadUnavailable,
        PermanentError,
        PublishFailed,
        QueueClosed,
        QueueError,
        QueueFull,
        RateLimited,
        ResultTimeout,
        ReturnToWait,
        RowNotFound,
        RowStateConflict,
        RunFailed,
        SchedulerNotFound,
        ServerRefused,
        SourceUnavailable,
        TooFewReplicas,
        TwoTransports,
        UnknownEvent,
        UnreadableEvent,
        UnsafeDatabaseRole,
        WaitForChildren,
        WrongVersion,
    )
    from bullpen.http.endpoints import endpoints_api
    from bullpen.http.ops import OpsApp
    from bullpen.http.runs import Principal, Tokens, runs_api
    from bullpen.http.serve import HttpLimits
    from bullpen.ops.alerts import Target
    from bullpen.ops.dead_letters import DeadLetterConsole
    from bullpen.ops.logs import JobFilter
    from bullpen.ops.meter import JobMeter, install_meter
    from bullpen.ops.tracing import install_tracing
    from bullpen.plugins.objects.files import FileStore
    from bullpen.plugins.objects.s3 import S3Store
    from bullpen.ports.dead_letters import (
        DeadLetter,
        DeadLetterFilter,
        DeadLetterGroup,
        DeadLetterStore,
        EditableDeadLetters,
        LetterPage,
        RedriveReport,
    )
    from bullpen.ports.edits import make_edit
    from bullpen.ports.objects import ObjectStore, StoredObject
    from bullpen.queue import (
        Added,
        Cancelled,
        Deduplication,
        Durability,
        Flow,
        FlowNode,
        Job,
        JobCounts,
        JobKey,
        JobState,
        LaneInfo,
        Lanes,
        LaneSettings,
        NewJob,
        Queue,
        QueueEvents,
        RateLimit,
        SchedulerRecord,
        WorkerInfo,
        find_queues,
        next_runs,
    )
    from bullpen.queue.arguments import AddArguments, JobDefaults, NewJobArguments, QueueArguments, TaskArguments
    from bullpen.queue.canvas import chain, chord, group
    from bullpen.queue.codec import Codec
    from bullpen.queue.dead_letters.store import dead_letter_store
    from bullpen.queue.payloads import PayloadReport, SweepReport
    from bullpen.queue.tasks import Task, TaskJob
    from bullpen.redis import Connection
    from bullpen.redis import Connection as _Connection
    from bullpen.redis.acl import acl_rule
    from bullpen.redis.checks import ServerFinding, ServerVerdict
    from bullpen.redis.inspection import inspect_server
    from bullpen.settings import Settings
    from bullpen.wire.events import QueueEvent
    from bullpen.wire.options import JobMeta
    from bullpen.worker import AutoConcurrency, BatchOptions, ChildLimits, JobBatch, Taker, Worker
    from bullpen.worker.options import WorkerArguments

__all__ = [
    "AddArguments",
    "Added",
    "AutoConcurrency",
    "Backoff",
    "BatchOptions",
    "Bullpen",
    "BullpenError",
    "Cancelled",
    "ChildLimits",
    "Codec",
    "Connection",
    "ConnectionLost",
    "CorruptJob",
    "DatabaseUnavailable",
    "DeadLetter",
    "DeadLetterChanged",
    "DeadLetterConsole",
    "DeadLetterFilter",
    "DeadLetterGroup",
    "DeadLetterNotEditable",
    "DeadLetterNotFound",
    "DeadLetterPolicy",
    "DeadLetterStore",
    "Deduplication",
    "DelayJob",
    "DeliveryLost",
    "Depends",
    "DoubtfulDefinition",
    "Durability",
    "DurabilityUnknown",
    "EditableDeadLetters",
    "EmbeddedError",
    "EmitsToItself",
    "EndlessSteps",
    "EntityBusy",
    "EntityChanged",
    "EntityFailed",
    "EntityNotFound",
    "EventIdTaken",
    "EventsLost",
    "FileStore",
    "Flow",
    "FlowNode",
    "HandlerTimeout",
    "HttpLimits",
    "InsufficientCredits",
    "InvalidOption",
    "Job",
    "JobBatch",
    "JobCancelled",
    "JobCounts",
    "JobDefaults",
    "JobFailed",
    "JobFilter",
    "JobKey",
    "JobLockLost",
    "JobMeta",
    "JobMeter",
    "JobNotFound",
    "JobSignal",
    "JobState",
    "JobStateConflict",
    "KeepJobs",
    "LaneFull",
    "LaneInfo",
    "LaneSettings",
    "Lanes",
    "LedgerError",
    "LedgerNotReady",
    "LetterPage",
    "MessageNotSent",
    "MissingExtra",
    "MissingValue",
    "NewJob",
    "NewJobArguments",
    "NoTransition",
    "NotConfigured",
    "NotInTransaction",
    "NotJson",
    "NotTakenNow",
    "ObjectStore",
    "ObjectStoreFailed",
    "OpsApp",
    "OutOfMemory",
    "OutcomeUnknown",
    "Overtaken",
    "PayloadMissing",
    "PayloadReport",
    "PayloadTampered",
    "PayloadTooLarge",
    "PayloadUnavailable",
    "PermanentError",
    "Principal",
    "PublishFailed",
    "Queue",
    "QueueArguments",
    "QueueClosed",
    "QueueError",
    "QueueEvent",
    "QueueEvents",
    "QueueFull",
    "RateLimit",
    "RateLimited",
    "RedriveReport",
    "ResultTimeout",
    "RetryPolicy",
    "ReturnToWait",
    "RowNotFound",
    "RowStateConflict",
    "RunFailed",
    "S3Store",
    "SchedulerNotFound",
    "SchedulerRecord",
    "ServerFinding",
    "ServerRefused",
    "ServerVerdict",
    "Settings",
    "SourceUnavailable",
    "StoredObject",
    "SweepReport",
    "Taker",
    "Target",
    "Task",
    "TaskArguments",
    "TaskJob",
    "Tokens",
    "TooFewReplicas",
    "TwoTransports",
    "UnknownEvent",
    "UnreadableEvent",
    "UnsafeDatabaseRole",
    "WaitForChildren",
    "Worker",
    "WorkerArguments",
    "WorkerInfo",
    "WrongVersion",
    "__version__",
    "acl_rule",
    "chain",
    "chord",
    "dead_letter_store",
    "endpoints_api",
    "find_queues",
    "group",
    "inspect_server",
    "install_meter",
    "install_tracing",
    "make_edit",
    "next_runs",
    "runs_api",
]

_HOMES: Final = {
    "bullpen._kernel.backoff": ("Backoff",),
    "bullpen._kernel.injection": ("Depends",),
    "bullpen._kernel.keep": ("KeepJobs",),
    "bullpen._kernel.policy": ("DeadLetterPolicy", "RetryPolicy"),
    "bullpen.app": ("Bullpen",),
    "bullpen.errors": (
        *("BullpenError", "ConnectionLost", "CorruptJob", "DatabaseUnavailable", "DeadLetterChanged"),
        *("DeadLetterNotEditable", "DeadLetterNotFound", "DelayJob", "DeliveryLost", "DoubtfulDefinition"),
        *("DurabilityUnknown", "EmbeddedError", "EmitsToItself", "EndlessSteps", "EntityBusy", "EntityChanged"),
        *("EntityFailed", "EntityNotFound", "EventIdTaken", "EventsLost", "HandlerTimeout", "InsufficientCredits"),
        *("InvalidOption", "JobCancelled", "JobFailed", "JobLockLost", "JobNotFound", "JobSignal", "JobStateConflict"),
        "LaneFull",
        *("LedgerError", "LedgerNotReady", "MessageNotSent", "MissingExtra", "MissingValue", "NoTransition"),
        *("NotConfigured", "NotInTransaction", "NotJson", "NotTakenNow", "ObjectStoreFailed", "OutOfMemory"),
        *("OutcomeUnknown", "Overtaken", "PayloadMissing", "PayloadTampered", "PayloadTooLarge", "PayloadUnavailable"),
        *("PermanentError", "PublishFailed", "QueueClosed", "QueueError"),
        *("QueueFull", "RateLimited", "ResultTimeout", "ReturnToWait", "RowNotFound", "RowStateConflict"),
        *(
            "RunFailed",
            "SchedulerNotFound",
            "ServerRefused",
            "SourceUnavailable",
            "TooFewReplicas",
            "TwoTransports",
            "UnknownEvent",
        ),
        *("UnreadableEvent", "UnsafeDatabaseRole", "WaitForChildren", "WrongVersion"),
    ),
    "bullpen.http.endpoints": ("endpoints_api",),
    "bullpen.http.ops": ("OpsApp",),
    "bullpen.http.runs": ("Principal", "Tokens", "runs_api"),
    "bullpen.http.serve": ("HttpLimits",),
    "bullpen.ops.alerts": ("Target",),
    "bullpen.ops.dead_letters": ("DeadLetterConsole",),
    "bullpen.ops.logs": ("JobFilter",),
    "bullpen.ops.meter": ("JobMeter", "install_meter"),
    "bullpen.ops.tracing": ("install_tracing",),
    "bullpen.plugins.objects.files": ("FileStore",),
    "bullpen.plugins.objects.s3": ("S3Store",),
    "bullpen.ports.dead_letters": (
        *("DeadLetter", "DeadLetterFilter", "DeadLetterGroup", "LetterPage", "DeadLetterStore"),
        *("EditableDeadLetters", "RedriveReport"),
    ),
    "bullpen.ports.edits": ("make_edit",),
    "bullpen.ports.objects": ("ObjectStore", "StoredObject"),
    "bullpen.queue": (
        *("Added", "Cancelled", "Deduplication", "Durability", "Flow", "FlowNode", "Job", "JobCounts"),
        *("JobKey", "JobState", "NewJob", "Queue", "QueueEvents", "RateLimit", "SchedulerRecord"),
        *("LaneInfo", "LaneSettings", "Lanes", "WorkerInfo", "find_queues", "next_runs"),
    ),
    "bullpen.queue.arguments": ("AddArguments", "JobDefaults", "NewJobArguments", "QueueArguments", "TaskArguments"),
    "bullpen.queue.codec": ("Codec",),
    "bullpen.queue.canvas": ("chain", "chord", "group"),
    "bullpen.queue.dead_letters.store": ("dead_letter_store",),
    "bullpen.queue.payloads": ("PayloadReport", "SweepReport"),
    "bullpen.queue.tasks": ("Task", "TaskJob"),
    "bullpen.redis": ("Connection",),
    "bullpen.redis.acl": ("acl_rule",),
    "bullpen.redis.checks": ("ServerFinding", "ServerVerdict"),
    "bullpen.redis.inspection": ("inspect_server",),
    "bullpen.settings": ("Settings",),
    "bullpen.wire.events": ("QueueEvent",),
    "bullpen.wire.options": ("JobMeta",),
    "bullpen.worker": ("AutoConcurrency", "BatchOptions", "ChildLimits", "JobBatch", "Taker", "Worker"),
    "bullpen.worker.options": ("WorkerArguments",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

# Hidden from the type checker, which would otherwise believe that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        if home in ("bullpen.queue", "bullpen.worker"):
            import_module("bullpen.redis").set_resolver(_default_connection, prefix=_default_prefix)
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
