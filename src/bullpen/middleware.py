"""Middleware that most programs need: times, errors that are final or come too early, tenants, sessions of SQLAlchemy.

In: what differs between programs. Out: something for `app.middleware`, or for `app.provide`. Elsewhere: how middleware
runs (`bullpen.worker.around`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar, overload

from bullpen._kernel.duration import to_ms
from bullpen._kernel.logs import get_logger
from bullpen.errors import DelayJob, InvalidOption, JobSignal, PermanentError, require
from bullpen.queue.job import Job

__all__ = ["classify_errors", "current_tenant", "sql_sessions", "tenants", "timing"]

logger = get_logger("bullpen.middleware")

Wait = int | timedelta
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
_tenant: Final[ContextVar[str | None]] = ContextVar("bullpen_tenant", default=None)


def timing(
    *, slow: int | timedelta | None = None, report: Callable[[Job, float], object] | None = None
) -> Callable[[Job], AbstractContextManager[None]]:
    """Measure how long handlers take, with the middleware inside of this one.

    `slow` (ms or timedelta): warn of jobs that take longer. `report(job, seconds)` is called for each job, also for one
    that fails.
    """
    limit_s = None if slow is None else to_ms("slow", slow, minimum=1) / 1000
    require("report", report is None or callable(report), "a function of the job and its seconds", report)

    @contextmanager
    def measure(job: Job) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            if limit_s is not None and seconds > limit_s:
                logger.warning("job %r (%s) of queue %r took %.1f s", job.id, job.name, job.queue_name, seconds)
            if report is not None:
                report(job, seconds)

    return measure


def classify_errors(
    *,
    permanent: tuple[type[Exception], ...] = (),
    retry_after: Mapping[type[Exception], Wait | Callable[[Any], Wait | None]] | None = None,
) -> Callable[[Job], AbstractContextManager[None]]:
    """Say once for all handlers what their errors mean.

    `permanent`: trying again is pointless, the job fails for good. `retry_after`: the job comes again after so long (ms
    or timedelta, or what a function of the error returns), and no attempt is counted, as a provider asks for that
    limits its callers. None from that function: an error like others. The nearest class of an error decides.
    """
    waits = dict(retry_after or {})
    for kind in (*permanent, *waits):
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        require("permanent" if kind in permanent else "retry_after", is_error, "classes of errors", kind)
    for kind, wait in waits.items():
        if kind in permanent:
            raise InvalidOption("retry_after", "no class that is permanent too", kind)
        if not callable(wait):
            to_ms(f"retry_after[{kind.__name__}]", wait, minimum=1)

    @contextmanager
    def classify(job: Job) -> Iterator[None]:
        try:
            yield
        except (JobSignal, PermanentError):
            raise
        except Exception as error:
            for kind in type(error).__mro__:
                if kind in permanent:
                    raise PermanentError(f"{type(error).__name__}: {error}") from error
                if kind in waits:
                    rule = waits[kind]
                    wait = rule(error) if callable(rule) else rule
                    if wait is None:
                        break
                    raise DelayJob(wait, f"{type(error).__name__}: {error}") from error
            raise

    return classify


def tenants(
    tenant_of: Callable[[Job], str | None] | None = None, *, required: bool = False
) -> Callable[[Job], AbstractContextManager[None]]:
    """Let `current_tenant()` tell whose job runs, in handlers and all that they call.

    The tenant is that of the job's metadata (`JobMeta.tenant_id`) unless `tenant_of` says otherwise. `required`: a job
    without one fails for good.
    """
    require("tenant_of", tenant_of is None or callable(tenant_of), "a function of the job", tenant_of)

    @contextmanager
    def within_tenant(job: Job) -> Iterator[None]:
        tenant = job.meta.tenant_id if tenant_of is None else tenant_of(job)
        if required and not tenant:
            raise PermanentError(f"job {job.id!r} names no tenant")
        before = _tenant.set(tenant)
        try:
            yield
        finally:
            _tenant.reset(before)

    return within_tenant


def current_tenant() -> str | None:
    """The tenant of the job that runs here, where the middleware `tenants` is."""
    return _tenant.get()


class _AsyncSessions(Protocol[S_co]):
    """SQLAlchemy's `async_sessionmaker`."""

    def begin(self) -> AbstractAsyncContextManager[S_co]: ...


class _Sessions(Protocol[S_co]):
    """SQLAlchemy's `sessionmaker`."""

    def begin(self) -> AbstractContextManager[S_co]: ...


@overload
def sql_sessions(sessions: _AsyncSessions[S]) -> Callable[[], AsyncIterator[S]]: ...


@overload
def sql_sessions(sessions: _Sessions[S]) -> Callable[[], Iterator[S]]: ...


def sql_sessions(sessions: Any) -> Callable[[], AsyncIterator[Any] | Iterator[Any]]:
    """A provider of SQLAlchemy sessions, one for each job that asks for it:

        app.provide(AsyncSession, sql_sessions(async_sessionmaker(engine)), scope="job")

    Its transaction commits when the handler has returned and rolls back when it raised. The job is settled afterwards:
    a process that dies in between runs the job again.
    """
    made = getattr(sessions, "class_", None)
    require("sessions", isinstance(made, type), "a sessionmaker or an async_sessionmaker", sessions)

    async def on_loop() -> AsyncIterator[Any]:
        async with sessions.begin() as session:
            yield session

    def plain() -> Iterator[Any]:
        with sessions.begin() as session:
            yield session

    return on_loop if hasattr(made, "__aenter__") else plain
