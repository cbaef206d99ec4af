"""A queue with PyPI's names, over `bullpen.Queue`.

In: option dictionaries. Out: jobs and numbers as PyPI's client gives them. `native_queue` is the queue of bullpen
behind it, with all that this face does not have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, cast

from bullpen._kernel.duration import check_texts
from bullpen._kernel.json import NULL
from bullpen.compat.bullmq._connection import connection_of, prefix_of, raw_client
from bullpen.compat.bullmq._errors import as_json, as_pypi
from bullpen.compat.bullmq._names import BULK_ENTRY, QUEUE, SETTINGS, check_backend, check_event, check_names, state_of
from bullpen.compat.bullmq._options import check_job_options, instant, job_arguments, native_name
from bullpen.compat.bullmq.event_emitter import EventEmitter
from bullpen.compat.bullmq.job import Job, remove_job
from bullpen.compat.bullmq.job_scheduler import JobScheduler
from bullpen.errors import JobStateConflict
from bullpen.queue.administration import JobCounts
from bullpen.queue.job import NewJob
from bullpen.queue.queue import Queue as NativeQueue
from bullpen.queue.states import JobState

if TYPE_CHECKING:
    from bullpen.queue.arguments import NewJobArguments

__all__ = ["Queue"]

_ALL_TYPES: Final = ("active", "completed", "delayed", "failed", "prioritized", "waiting", "waiting-children")


class Queue(EventEmitter):
    """Adds jobs, and looks after them."""

    def __init__(self, name: str, opts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.name = name
        self.opts: Mapping[str, Any] = opts or {}
        check_names(self.opts, QUEUE, "an option of Queue")
        check_backend(self.opts)
        check_names(self.opts.get("settings"), SETTINGS, "a setting", "settings")
        check_job_options(self.opts.get("defaultJobOptions"), "defaultJobOptions")
        self.jobsOpts: Mapping[str, Any] = self.opts.get("defaultJobOptions") or {}
        self.prefix = prefix_of(self.opts)
        self.qualifiedName = f"{self.prefix}:{name}"
        self._connection, self._owns_connection = connection_of(self.opts)
        self.native_queue = NativeQueue(native_name(name), connection=self._connection, prefix=self.prefix, attempts=1)
        self._scheduler: JobScheduler | None = None
        self._client: Any = None

    @property
    def client(self) -> Any:
        """A redis-py client for the same server; needs redis-py."""
        if self._client is None:
            self._client = raw_client(self.opts)
        return self._client

    def toKey(self, type: str) -> str:
        """The key of this name in Redis."""
        return f"{self.qualifiedName}:{type}"

    def on(self, event_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Taken for `error` alone, as programs do; what happens to jobs is heard by QueueEvents."""
        check_event(event_name, ("error",), "Queue; QueueEvents hears of jobs")
        return super().on(event_name, function)

    # ---- adding -----------------------------------------------------------------------------------------------

    async def add(self, name: str, data: Any, opts: Mapping[str, Any] | None = None) -> Job:
        """Store one job and return it."""
        check_job_options(opts)
        merged = {**self.jobsOpts, **(opts or {})}
        job = Job(self, name, data, merged)
        with as_pypi("addJob", job.id, parent=job.parentKey), as_json(data):
            job.id = (await self.native_queue.add(name, NULL if data is None else data, **job_arguments(merged))).id
        return job

    async def addBulk(self, jobs: Iterable[Mapping[str, Any]]) -> list[Job]:
        """Store many; each has `name`, `data` and `opts`."""
        listed = list(jobs)
        for position, one in enumerate(listed):
            check_names(one, BULK_ENTRY, "a part of a job", f"jobs[{position}]")
            check_job_options(one.get("opts"), f"jobs[{position}].opts")
        made = [
            Job(self, one.get("name", ""), one.get("data"), {**self.jobsOpts, **(one.get("opts") or {})})
            for one in listed
        ]
        parent = next((job.parentKey for job in made if job.parentKey), None)
        with as_pypi("addJob", parent=parent), as_json([job.data for job in made]):
            new = [
                NewJob(
                    job.name,
                    NULL if job.data is None else job.data,
                    cast("NewJobArguments", job_arguments(job.opts)),
                )
                for job in made
            ]
            for job, native in zip(made, await self.native_queue.add_many(new), strict=True):
                job.id = native.id
        return made

    # ---- the queue as a whole ---------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Let no worker take jobs."""
        await self.native_queue.pause()

    async def resume(self) -> None:
        """Let workers take jobs again."""
        await self.native_queue.resume()

    async def isPaused(self) -> bool:
        """Whether it is paused for all workers."""
        return await self.native_queue.is_paused()

    async def getRateLimitTtl(self) -> int:
        """For how many ms nothing may start; -2 when something may."""
        return await self.native_queue.rate_limit_ttl(most=1) or -2

    async def rateLimit(self, expire_time_ms: int) -> None:
        """Let no job start for so long."""
        await self.native_queue.rate_limit(expire_time_ms)

    async def removeRateLimitKey(self) -> int:
        """End that. 1 when there was something to end."""
        was_limited = await self.native_queue.rate_limit_ttl(most=1) > 0
        await self.native_queue.lift_rate_limit()
        return int(was_limited)

    async def setGlobalConcurrency(self, concurrency: int) -> int:
        """At most so many jobs at once over all workers. 1 when there was no limit before, else 0."""
        before = await self.native_queue.global_concurrency()
        await self.native_queue.set_global_concurrency(concurrency)
        return int(before is None)

    async def getGlobalConcurrency(self) -> int | None:
        """That limit."""
        return await self.native_queue.global_concurrency()

    async def removeGlobalConcurrency(self) -> int:
        """End that limit. 1 when there was one."""
        before = await self.native_queue.global_concurrency()
        await self.native_queue.remove_global_concurrency()
        return int(before is not None)

    async def setGlobalRateLimit(self, max_jobs: int, duration_ms: int) -> int:
        """At most so many jobs per time over all workers. How many of the two numbers are new."""
        before = await self.native_queue.global_rate_limit()
        await self.native_queue.set_global_rate_limit(max_jobs, duration_ms)
        return 2 if before is None else 0

    async def getGlobalRateLimit(self) -> dict[str, int] | None:
        """That limit, as `max` and `duration`."""
        limit = await self.native_queue.global_rate_limit()
        return None if limit is None else {"max": limit.max, "duration": limit.duration_ms}

    async def removeGlobalRateLimit(self) -> int:
        """End that limit. 2 when there was one."""
        before = await self.native_queue.global_rate_limit()
        await self.native_queue.remove_global_rate_limit()
        return 0 if before is None else 2

    async def get_workers(self) -> list[dict[str, str]]:
        """The workers that are connected now."""
        workers = await self.native_queue.workers()
        if workers is None:
            return [{"name": "CLIENT LIST not supported"}]
        return [{**one.fields, "rawname": one.fields.get("name", ""), "name": self.name} for one in workers]

    async def get_workers_count(self) -> int:
        """How many workers are connected now."""
        return len(await self.get_workers())

    async def obliterate(self, force: bool = False) -> None:
        """Delete the queue with all that is in it; with `force` also while jobs run."""
        await self.native_queue.pause()
        try:
            await self.native_queue.obliterate(force=force)
        except JobStateConflict as error:
            raise RuntimeError("Cannot obliterate queue with active jobs") from error

    async def drain(self, delayed: bool = False) -> None:
        """Delete what waits; with `delayed` what is delayed too."""
        await self.native_queue.drain(delayed=delayed)

    async def retryJobs(self, opts: Mapping[str, Any] | None = None) -> None:
        """Let all failed jobs run again, or all that completed."""
        given = opts or {}
        check_names(given, ("state", "count", "timestamp"), "an option of retryJobs")
        until = instant("timestamp", given.get("timestamp"))
        await self.native_queue.retry_all(state_of("state", given.get("state") or "failed"), until=until)

    async def promoteJobs(self, opts: Mapping[str, Any] | None = None) -> None:
        """Let all delayed jobs run now. `count` is the size of a step of PyPI's; here there is one step."""
        check_names(opts, ("count",), "an option of promoteJobs")
        await self.native_queue.promote_all()

    async def trimEvents(self, maxLength: int) -> int:
        """Keep about so many events; returns how many went."""
        return await self.native_queue.trim_events(maxLength)

    async def removeDeprecatedPriorityKey(self) -> int:
        """Nothing: that key is of BullMQ 3, and no queue that this client can read has it."""
        return 0

    async def clean(self, grace: int, limit: int, type: str) -> list[str]:
        """Delete jobs of a state that are older than `grace` ms, at most `limit` (0: all); returns their ids."""
        return await self.native_queue.clean(grace, state=state_of("type", type), limit=limit or None)

    async def remove(self, job_id: str, opts: Mapping[str, Any] | None = None) -> int:
        """Delete one job. 1 when it is gone, 0 when it runs."""
        return await remove_job(self.native_queue, job_id, opts)

    async def close(self) -> None:
        """Send what still waits, and let go of the connection."""
        await self.native_queue.close()
        if self._owns_connection:
            await self._connection.aclose()
        if self._client is not None and self._client is not self.opts.get("connection"):
            await self._client.aclose()

    # ---- reading ----------------------------------------------------------------------------------------------

    async def getJob(self, job_id: str) -> Job | None:
        """One job, or None."""
        return await Job.fromId(self, job_id)

    async def getJobs(self, types: Iterable[str], start: int = 0, end: int = -1, asc: bool = False) -> list[Job]:
        """The jobs from position `start` to `end` of each of these states."""
        found: dict[str, Job] = {}
        for state in dict.fromkeys(state_of("types", each) for each in self.sanitizeJobTypes(types)):
            async with aclosing(self._walk(state, start, end, asc)) as jobs:
                async for job in jobs:
                    found.setdefault(job.id or "", job)
        return list(found.values())

    async def _walk(self, state: JobState, start: int, end: int, asc: bool) -> AsyncGenerator[Job, None]:
        """Ids without a job are passed over, and what follows them is read instead."""
        position, wanted = start, end - start + 1 if end >= 0 else None
        while wanted is None or wanted > 0:
            count = 200 if wanted is None else min(wanted, 200)
            jobs = await self.native_queue.jobs(state, start=position, count=count, newest_first=not asc)
            for job in jobs:
                yield Job.of(self, job)
            position += count
            wanted = None if wanted is None else wanted - len(jobs)
            if len(jobs) < count and not await self.native_queue.job_ids(state, start=position, count=1):
                return

    def sanitizeJobTypes(self, types: Iterable[str]) -> list[str]:
        """Each once; all when none is given."""
        return list(dict.fromkeys(check_texts("types", types))) or list(_ALL_TYPES)

    async def getJobCounts(self, *types: str) -> dict[str, int]:
        """How many jobs there are, by state."""
        states = {each: state_of("types", each) for each in self.sanitizeJobTypes(types)}
        counts = await self.native_queue.counts()
        return {each: _count(counts, each, state) for each, state in states.items()}

    async def getJobCountByTypes(self, *types: str) -> int:
        """How many jobs there are in these states together."""
        return sum((await self.getJobCounts(*types)).values())

    async def getCountsPerPriority(self, priorities: Iterable[int]) -> dict[str, int]:
        """How many jobs wait, by priority."""
        counts = await self.native_queue.counts_per_priority(list(priorities))
        return {str(priority): count for priority, count in counts.items()}

    async def getJobState(self, job_id: str) -> str:
        """`waiting`, `active` and so on; `unknown` when it is gone."""
        return (await self.native_queue.state_of(job_id)).value

    async def getJobLogs(self, job_id: str, start: int = 0, end: int = -1, asc: bool = True) -> dict[str, Any]:
        """Lines of a job's log, and how many there are."""
        count = end - start + 1 if end >= 0 else 2**31 - 1
        page = await self.native_queue.logs(job_id, start=start, count=count, newest_first=not asc)
        return {"logs": list(page.lines), "count": page.total}

    async def getDeduplicationJobId(self, id: str) -> str | None:
        """The job that owns a deduplication id."""
        return await self.native_queue.deduplication_owner(id)

    async def getCompletedCount(self) -> int:
        return await self.getJobCountByTypes("completed")

    async def getDelayedCount(self) -> int:
        return await self.getJobCountByTypes("delayed")

    async def getFailedCount(self) -> int:
        return await self.getJobCountByTypes("failed")

    async def getWaitingCount(self) -> int:
        return await self.getJobCountByTypes("waiting")

    async def getActive(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["active"], start, end, True)

    async def getCompleted(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["completed"], start, end, False)

    async def getDelayed(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["delayed"], start, end, True)

    async def getFailed(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["failed"], start, end, False)

    async def getPrioritized(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["prioritized"], start, end, True)

    async def getWaiting(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["waiting"], start, end, True)

    async def getWaitingChildren(self, start: int = 0, end: int = -1) -> list[Job]:
        return await self.getJobs(["waiting-children"], start, end, True)

    # ---- schedulers -------------------------------------------------------------------------------------------

    @property
    def jobScheduler(self) -> JobScheduler:
        """The schedulers of this queue."""
        if self._scheduler is None:
            self._scheduler = JobScheduler(self)
        return self._scheduler

    async def upsertJobScheduler(
        self,
        job_scheduler_id: str,
        repeat_opts: Mapping[str, Any],
        job_name: str | None = None,
        job_data: Any = None,
        opts: Mapping[str, Any] | None = None,
        override: bool = True,
        producer_id: str | None = None,
    ) -> Job | None:
        """Make a scheduler, or change it; returns its next job."""
        return await self.jobScheduler.upsertJobScheduler(
            job_scheduler_id,
            repeat_opts,
            job_name or job_scheduler_id,
            job_data,
            opts,
            override=override,
            producer_id=producer_id,
        )

    async def removeJobScheduler(self, job_scheduler_id: str) -> int:
        """0 when it was removed, 1 when there was none."""
        return await self.jobScheduler.removeJobScheduler(job_scheduler_id)

    async def isJobScheduler(self, job_scheduler_id: str) -> bool:
        """Whether there is a scheduler with this id."""
        return await self.jobScheduler.isJobScheduler(job_scheduler_id)

    async def getJobScheduler(self, job_scheduler_id: str) -> dict[str, Any] | None:
        """One scheduler, or None."""
        return await self.jobScheduler.getScheduler(job_scheduler_id)

    async def getJobSchedulers(self, start: int = 0, end: int = -1, asc: bool = False) -> list[dict[str, Any]]:
        """Schedulers from position `start` to `end`, by their next time."""
        return await self.jobScheduler.getJobSchedulers(start, end, asc)

    async def getJobSchedulersCount(self) -> int:
        """How many schedulers there are."""
        return await self.jobScheduler.getSchedulersCount()


def _count(counts: JobCounts, type: str, state: JobState) -> int:
    if type == "paused":
        return 0  # what waits in a paused queue is counted as waiting
    number: int = getattr(counts, state.value.replace("-", "_"))
    return number
