"""The forms of the option dictionaries."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = [
    "BackoffOptions",
    "ConnectionOptions",
    "DeduplicationOptions",
    "JobOptions",
    "JobSchedulerJson",
    "JobSchedulerTemplateJson",
    "KeepJobs",
    "PromoteJobsOptions",
    "QueueBaseOptions",
    "QueueEventsOptions",
    "QueueEventsProducerOptions",
    "RepeatOptions",
    "RetryJobsOptions",
    "WorkerOptions",
]

ConnectionOptions = Any
"""A URL, a dictionary of host, port, password and so on, a redis-py client (whose address is taken), or a
`bullpen.Connection`."""


class BackoffOptions(TypedDict, total=False):
    """How long to wait before the job is tried again."""

    type: str
    delay: int
    jitter: float


class KeepJobs(TypedDict, total=False):
    """Which finished jobs stay."""

    age: int
    count: int
    limit: int


class DeduplicationOptions(TypedDict, total=False):
    """Which adds mean the same job."""

    id: str
    ttl: int
    extend: bool
    replace: bool
    keepLastIfActive: bool


class JobOptions(TypedDict, total=False):
    """Options of one job."""

    jobId: str
    timestamp: int
    delay: int
    attempts: int
    priority: int
    lifo: bool
    backoff: int | BackoffOptions
    removeOnComplete: bool | int | KeepJobs
    removeOnFail: bool | int | KeepJobs
    keepLogs: int
    stackTraceLimit: int
    deduplication: DeduplicationOptions
    parent: dict[str, str]
    failParentOnFailure: bool
    continueParentOnFailure: bool
    ignoreDependencyOnFailure: bool
    removeDependencyOnFailure: bool


class QueueBaseOptions(TypedDict, total=False):
    """Options of a queue and of a flow producer."""

    prefix: str
    connection: ConnectionOptions
    defaultJobOptions: JobOptions
    settings: dict[str, Any]
    backend: str
    skipVersionCheck: bool
    skipWaitingForReady: bool


class WorkerOptions(TypedDict, total=False):
    """Options of a worker."""

    name: str
    autorun: bool
    concurrency: int
    limiter: dict[str, int]
    metrics: dict[str, int]
    maxStalledCount: int
    maxStartedAttempts: int
    stalledInterval: int
    lockDuration: int
    lockRenewTime: int
    drainDelay: float
    runRetryDelay: int
    removeOnComplete: bool | int | KeepJobs
    removeOnFail: bool | int | KeepJobs
    settings: dict[str, Any]
    prefix: str
    connection: ConnectionOptions
    backend: str
    skipVersionCheck: bool
    skipWaitingForReady: bool


class QueueEventsOptions(TypedDict, total=False):
    """Options of a reader of events."""

    prefix: str
    connection: ConnectionOptions
    autorun: bool
    blockingTimeout: int
    lastEventId: str
    backend: str
    skipVersionCheck: bool
    skipWaitingForReady: bool


class QueueEventsProducerOptions(TypedDict, total=False):
    """Options of a writer of events."""

    prefix: str
    connection: ConnectionOptions
    backend: str
    skipVersionCheck: bool
    skipWaitingForReady: bool


class RetryJobsOptions(TypedDict, total=False):
    """Which finished jobs run again."""

    state: str
    count: int
    timestamp: int


class PromoteJobsOptions(TypedDict, total=False):
    """How many jobs one step promotes; all are, as with PyPI's."""

    count: int


class RepeatOptions(TypedDict, total=False):
    """When a scheduler makes jobs."""

    pattern: str
    every: int
    limit: int
    startDate: int | str | float
    endDate: int | str | float
    tz: str
    offset: int
    immediately: bool
    count: int


class JobSchedulerTemplateJson(TypedDict, total=False):
    """What a scheduler makes its jobs of."""

    data: object
    opts: dict[str, Any]


class JobSchedulerJson(TypedDict, total=False):
    """A scheduler as it is stored."""

    key: str
    name: str
    next: int | None
    id: str | None
    iterationCount: int
    limit: int
    startDate: int
    endDate: int
    tz: str
    pattern: str
    every: int
    offset: int
    template: JobSchedulerTemplateJson
