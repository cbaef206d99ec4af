"""The two things that a scenario can do with a queue, on either implementation: add jobs and work on them.

Options and behaviours are written once, in BullMQ's own words; each side translates them. Elsewhere: the scenarios
(`_scenarios`), the processes behind the foreign sides (`_node`, `_pypi`).
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import redis

from bullpen._kernel.keep import KeepJobs
from bullpen.errors import DelayJob, PermanentError, RateLimited, ReturnToWait, WaitForChildren
from bullpen.queue import Flow, Job, JobKey, NewJob, Queue, RateLimit
from bullpen.wire.deduplication import Deduplication
from bullpen.worker import Worker

from ._dump import PREFIX
from ._peer import Message, Peer

Behaviour = Mapping[str, Any]
"""What a worker does with a job: `kind` and its values, as listed in `play` of node/driver.mjs."""


class Side(Protocol):
    """One implementation, connected to the server of the test."""

    name: str

    async def open_queue(self, queue: str) -> None:
        """Do what creating a queue object writes, and nothing more."""

    async def add(self, queue: str, name: str, data: Any = None, **opts: Any) -> str: ...

    async def add_bulk(self, queue: str, jobs: list[dict[str, Any]]) -> list[str]: ...

    async def add_flow(self, flow: Mapping[str, Any]) -> None:
        """Add a tree in the form that Node's FlowProducer takes."""

    async def pause(self, queue: str) -> None: ...

    async def resume(self, queue: str) -> None: ...

    async def upsert_scheduler(
        self, queue: str, scheduler_id: str, repeat: Mapping[str, Any], template: Mapping[str, Any] | None = None
    ) -> None: ...

    async def remove_scheduler(self, queue: str, scheduler_id: str) -> None: ...

    async def start_worker(self, worker: str, queue: str, behaviour: Behaviour, **opts: Any) -> None:
        """Start a worker and return when it takes jobs."""

    async def close_worker(self, worker: str) -> None: ...

    async def wait_held(self, worker: str, job_id: str) -> None:
        """Wait until the handler of a job with `hold` has come to rest."""

    async def release(self, worker: str, job_id: str | None = None) -> None: ...

    async def reset(self) -> None:
        """Close everything, as between two tests."""


class PeerSide:
    """Another implementation behind a `Peer`."""

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.peer = peer

    async def open_queue(self, queue: str) -> None:
        await self.peer.call("openQueue", queue=queue)

    async def add(self, queue: str, name: str, data: Any = None, **opts: Any) -> str:
        return str(await self.peer.call("add", queue=queue, name=name, data={} if data is None else data, opts=opts))

    async def add_bulk(self, queue: str, jobs: list[dict[str, Any]]) -> list[str]:
        return [str(job_id) for job_id in await self.peer.call("addBulk", queue=queue, jobs=jobs)]

    async def add_flow(self, flow: Mapping[str, Any]) -> None:
        await self.peer.call("addFlow", flow=flow)

    async def pause(self, queue: str) -> None:
        await self.peer.call("pause", queue=queue)

    async def resume(self, queue: str) -> None:
        await self.peer.call("resume", queue=queue)

    async def upsert_scheduler(
        self, queue: str, scheduler_id: str, repeat: Mapping[str, Any], template: Mapping[str, Any] | None = None
    ) -> None:
        await self.peer.call(
            "upsertJobScheduler", queue=queue, schedulerId=scheduler_id, repeat=dict(repeat), template=template or {}
        )

    async def remove_scheduler(self, queue: str, scheduler_id: str) -> None:
        await self.peer.call("removeJobScheduler", queue=queue, args=[scheduler_id])

    async def start_worker(self, worker: str, queue: str, behaviour: Behaviour, **opts: Any) -> None:
        await self.peer.call(
            "startWorker", worker=worker, queue=queue, behaviour=dict(behaviour), opts={"name": worker} | opts
        )

    async def close_worker(self, worker: str) -> None:
        await self.peer.call("closeWorker", worker=worker)

    async def wait_held(self, worker: str, job_id: str) -> None:
        def is_held(event: Message) -> bool:
            return event.get("type") == "held" and event["worker"] == worker and event["jobId"] == job_id

        await self.peer.wait_event(is_held)

    async def release(self, worker: str, job_id: str | None = None) -> None:
        await self.peer.call("release", worker=worker, jobId=job_id)

    async def reset(self) -> None:
        await self.peer.call("reset")
        self.peer.forget_events()


class OurSide:
    """bullpen itself, on the loop of the test."""

    name = "bullpen"

    def __init__(self, url: str, client: redis.Redis) -> None:
        self._url = url
        self._client = client
        self._queues: dict[str, Queue] = {}
        self._workers: dict[str, _OurWorker] = {}

    def queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self._url)
        return self._queues[name]

    async def open_queue(self, queue: str) -> None:
        self.queue(queue)

    async def add(self, queue: str, name: str, data: Any = None, **opts: Any) -> str:
        return (await self.queue(queue).add(name, data, **_our_job_options(opts))).id

    async def add_bulk(self, queue: str, jobs: list[dict[str, Any]]) -> list[str]:
        new = [NewJob(job["name"], job["data"], _our_job_options(job.get("opts", {}))) for job in jobs]
        return [job.id for job in await self.queue(queue).add_many(new)]

    async def add_flow(self, flow: Mapping[str, Any]) -> None:
        await self.queue(flow["queueName"]).add_flow(our_flow(flow))

    async def pause(self, queue: str) -> None:
        await self.queue(queue).pause()

    async def resume(self, queue: str) -> None:
        await self.queue(queue).resume()

    async def upsert_scheduler(
        self, queue: str, scheduler_id: str, repeat: Mapping[str, Any], template: Mapping[str, Any] | None = None
    ) -> None:
        names = {"pattern": "cron", "startDate": "start", "endDate": "end"}
        rule = {
            names.get(name, name): _our_instant(value) if name.endswith("Date") else value
            for name, value in repeat.items()
        }
        given = dict(template or {})
        options: Any = {**rule, **_our_job_options(given.get("opts", {}))}
        await self.queue(queue).upsert_scheduler(scheduler_id, given.get("name"), given.get("data"), **options)

    async def remove_scheduler(self, queue: str, scheduler_id: str) -> None:
        await self.queue(queue).remove_scheduler(scheduler_id)

    async def start_worker(self, worker: str, queue: str, behaviour: Behaviour, **opts: Any) -> None:
        started = _OurWorker(behaviour, self._client)
        self._workers[worker] = started
        await started.start(queue, connection=self._url, **_our_worker_options({"name": worker} | opts))

    async def close_worker(self, worker: str) -> None:
        await self._workers.pop(worker).worker.close()

    async def wait_held(self, worker: str, job_id: str) -> None:
        async with asyncio.timeout(10):
            await self._workers[worker].held(job_id).wait()

    async def release(self, worker: str, job_id: str | None = None) -> None:
        self._workers[worker].release(job_id)

    async def reset(self) -> None:
        for started in self._workers.values():
            started.release(None)
            await started.worker.close(timeout=0)
        for queue in self._queues.values():
            await queue.close()
        self._workers.clear()
        self._queues.clear()


class _OurWorker:
    """A worker of ours that plays behaviours."""

    worker: Worker

    def __init__(self, behaviour: Behaviour, client: redis.Redis) -> None:
        self._behaviour = behaviour
        self._client = client
        self._held: dict[str, asyncio.Event] = {}
        self._released: dict[str, asyncio.Event] = {}
        self._release_all = False

    async def start(self, queue: str, **options: Any) -> None:
        self.worker = Worker(queue, self._play, **options)
        await self.worker.start()

    def held(self, job_id: str) -> asyncio.Event:
        return self._held.setdefault(job_id, asyncio.Event())

    def release(self, job_id: str | None) -> None:
        self._release_all = self._release_all or job_id is None
        for event in self._released.values() if job_id is None else [self._released[job_id]]:
            event.set()

    async def _play(self, job: Job) -> Any:
        step = self._behaviour.get("byName", {}).get(job.name, self._behaviour)
        for value in step.get("progress", []):
            await job.progress(value)
        for line in step.get("logs", []):
            await job.log(line)
        await asyncio.sleep(step.get("sleep", 0) / 1000)
        if step.get("hold") and not self._release_all:
            self._released[job.id] = asyncio.Event()
            self.held(job.id).set()
            await self._released[job.id].wait()
        return self._end(job, step)

    def _end(self, job: Job, step: Behaviour) -> Any:
        message, value, is_first = step.get("message", "boom"), step.get("value"), job.attempts_started == 1
        match step.get("kind", "echo"):
            case "echo":
                return {"echo": job.data}
            case "fail_times" if job.attempts_made < step["times"]:
                raise RuntimeError(message)
            case "fail_times":
                return step.get("value", {"attemptsMade": job.attempts_made})
            case "always_fail":
                raise RuntimeError(message)
            case "unrecoverable":
                raise PermanentError(message)
            case "delay_once" if is_first:
                raise DelayJob(step["ms"])
            case "rate_limit_once" if is_first:
                raise RateLimited(step["ms"])
            case "wait_once" if is_first:
                raise ReturnToWait
            case "wait_children" if self._client.scard(self._part(job, "dependencies")):
                raise WaitForChildren
            case "wait_children" | "children":
                return {"children": self._children(job, "processed"), "ignored": self._children(job, "failed")}
            case "return" | "delay_once" | "rate_limit_once" | "wait_once":
                return value
            case unknown:
                raise PermanentError(f"unknown kind {unknown}")

    def _part(self, job: Job, part: str) -> str:
        return f"{PREFIX}:{job.queue_name}:{job.id}:{part}"

    def _children(self, job: Job, part: str) -> dict[str, Any]:
        found: Any = self._client.hgetall(self._part(job, part))
        read = json.loads if part == "processed" else bytes.decode
        return {key.decode(): read(value) for key, value in found.items()}


def our_flow(node: Mapping[str, Any], *, is_child: bool = False) -> Flow:
    """A tree of Node's form as ours."""
    options = _our_job_options(node.get("opts", {}))
    if is_child:
        options.setdefault("on_failure", "wait")
    children = [our_flow(child, is_child=True) for child in node.get("children", [])]
    queue, prefix = node["queueName"], node.get("prefix")
    return Flow(node["name"], node.get("data"), queue=queue, prefix=prefix, children=children, **options)


_POLICIES = {
    "failParentOnFailure": "fail_parent",
    "continueParentOnFailure": "continue_parent",
    "ignoreDependencyOnFailure": "ignore",
    "removeDependencyOnFailure": "remove",
}


def _our_job_options(opts: Mapping[str, Any]) -> Any:
    names = {
        "jobId": "job_id",
        "removeOnComplete": "remove_on_complete",
        "removeOnFail": "remove_on_fail",
        "keepLogs": "keep_logs",
        "stackTraceLimit": "stack_trace_limit",
    }
    ours = {names.get(name, name): _our_retention(value) for name, value in opts.items()}
    for theirs, name in _POLICIES.items():
        if ours.pop(theirs, False):
            ours["on_failure"] = name
    if "parent" in ours:
        ours["parent"] = JobKey(ours["parent"]["id"], ours["parent"]["queue"])
        ours.setdefault("on_failure", "wait")
    if "deduplication" in ours:
        rule = dict(ours["deduplication"])
        rule["keep_last_if_active"] = rule.pop("keepLastIfActive", False)
        ours["deduplication"] = Deduplication(**rule)
    if "telemetry" in ours:
        ours["tm"] = ours.pop("telemetry")["metadata"]
    return ours


def _our_instant(epoch_ms: int) -> datetime:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def _our_worker_options(opts: Mapping[str, Any]) -> dict[str, Any]:
    ours = {name: opts[name] for name in ("name", "concurrency") if name in opts}
    renamed = {"lockDuration": "lock", "stalledInterval": "stalled_interval"}
    ours |= {renamed[name]: value for name, value in opts.items() if name in renamed}
    if "drainDelay" in opts:
        ours["drain_delay"] = opts["drainDelay"] * 1000
    if "metrics" in opts:
        ours["metrics_minutes"] = opts["metrics"]["maxDataPoints"]
    if "limiter" in opts:
        ours["limit"] = RateLimit(opts["limiter"]["max"], opts["limiter"]["duration"])
    for theirs, name in (("removeOnComplete", "remove_on_complete"), ("removeOnFail", "remove_on_fail")):
        with contextlib.suppress(KeyError):
            ours[name] = _our_retention(opts[theirs])
    return ours


def _our_retention(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() <= {"count", "age", "limit"}:
        return KeepJobs(count=value.get("count"), age_s=value.get("age"), limit=value.get("limit"))
    return value
