"""Drive PyPI `bullmq` for the interop tests: line protocol and behaviours of `node/driver.mjs`, as far as it can.

Runs in its own virtual environment (`_pypi` makes it), as `python pypi_driver.py <redis url>`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

# Installed only in the environment this file runs in: its pins clash with ours.
import bullmq  # type: ignore[import-not-found]
from bullmq import (
    FlowProducer,
    Job,
    Queue,
    QueueEvents,
    UnrecoverableError,
    WaitingChildrenError,
    Worker,
)

URL = sys.argv[1]
DelayedError = getattr(bullmq, "DelayedError", RuntimeError)  # 2.x has none
_QUEUE_METHODS = {
    *("clean", "drain", "getCountsPerPriority", "getDeduplicationJobId", "getGlobalConcurrency", "getJobCounts"),
    *("getJobLogs", "getJobScheduler", "getJobSchedulers", "getJobState", "isPaused", "obliterate", "pause"),
    *("promoteJobs", "rateLimit", "removeGlobalConcurrency", "removeGlobalRateLimit", "removeJobScheduler", "resume"),
    *("retryJobs", "setGlobalConcurrency", "setGlobalRateLimit", "trimEvents"),
}
"""Ops that are one call of a Queue method with the positional arguments `args`."""
_JOB_METHODS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "changePriority": lambda job, r: job.changePriority(r["opts"]),
    "getChildrenValues": lambda job, _: job.getChildrenValues(),
    "log": lambda job, r: job.log(r["line"]),
    "promote": lambda job, _: job.promote(),
    "retryJob": lambda job, r: job.retry(r["state"], r.get("opts") or {}),
    "updateData": lambda job, r: job.updateData(r["data"]),
}

queues: dict[str, Any] = {}
listeners: dict[str, Any] = {}
workers: dict[str, "WorkerSlot"] = {}


def connection() -> dict[str, Any]:
    # redis-py would give up a blocking read after its default of 5 s, which is shorter than bullmq's own wait.
    parts = urlsplit(URL)
    if parts.scheme == "unix":
        return {"unix_socket_path": parts.path, "socket_timeout": None}
    return {"host": parts.hostname, "port": parts.port, "password": parts.password, "socket_timeout": None}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def describe(error: BaseException) -> dict[str, str]:
    return {"name": type(error).__name__, "message": str(error)}


def report_error(source: str, error: BaseException) -> None:
    say({"event": "error", "source": source, **describe(error)})


class WorkerSlot:
    """A running worker, what it does with jobs, and the jobs it holds until told to go on."""

    def __init__(self, name: str, behaviour: dict[str, Any]) -> None:
        self.name = name
        self.behaviour = behaviour
        self.holds: dict[str, asyncio.Event] = {}
        self.release_all = False
        self.worker: Any = None

    def start(self, queue: str, prefix: str, opts: dict[str, Any]) -> None:
        backoff_ms = opts.pop(
            "backoffMs", None
        )  # a function cannot be sent: this one answers the same pause for every type
        settings = {} if backoff_ms is None else {"settings": {"backoffStrategy": lambda *_: backoff_ms}}
        self.worker = Worker(queue, self.play, {"connection": connection(), "prefix": prefix, **opts, **settings})
        self.worker.on("active", lambda job, _prev: self.tell("active", jobId=job.id, attemptsMade=job.attemptsMade))
        self.worker.on("completed", lambda job, value: self.tell("completed", jobId=job.id, value=value))
        self.worker.on("failed", lambda job, error: self.tell("failed", jobId=job.id, message=str(error)))
        self.worker.on("error", lambda error, *_: report_error(f"worker {self.name}", error))

    def tell(self, event_type: str, **fields: Any) -> None:
        say({"event": "worker", "worker": self.name, "type": event_type, **fields})

    async def play(self, job: Job, token: str) -> Any:
        step = self.behaviour.get("byName", {}).get(job.name, self.behaviour)
        for value in step.get("progress", []):
            await job.updateProgress(value)
        for line in step.get("logs", []):
            await job.log(line)
        await asyncio.sleep(step.get("sleep", 0) / 1000)
        if step.get("hold"):
            await self.hold(job.id)
        message = step.get("message", "boom")
        match step.get("kind", "echo"):
            case "echo":
                return {"echo": job.data}
            case "return":
                return step.get("value")
            case "fail_times":
                if job.attemptsMade < step["times"]:
                    raise RuntimeError(message)
                return step.get("value", {"attemptsMade": job.attemptsMade})
            case "always_fail":
                raise RuntimeError(message)
            case "unrecoverable":
                raise UnrecoverableError(message)
            case "delay_once":
                if job.attemptsStarted > 1:
                    return step.get("value")
                await job.moveToDelayed(round(time.time() * 1000) + step["ms"], token)
                raise DelayedError("bullmq:movedToDelayed")
            case "wait_children":
                if await job.moveToWaitingChildren(token, {}):
                    raise WaitingChildrenError("bullmq:movedToWaitingChildren")
                return {"children": await job.getChildrenValues()}
            case "children":
                return {"children": await job.getChildrenValues()}
            case unknown:
                raise UnrecoverableError(f"unknown kind {unknown}")

    async def hold(self, job_id: str) -> None:
        if self.release_all:
            return
        self.holds[job_id] = asyncio.Event()
        self.tell("held", jobId=job_id)
        await self.holds[job_id].wait()

    def release(self, job_id: str | None) -> None:
        if job_id is None:
            self.release_all = True
        for held in list(self.holds) if job_id is None else [job_id]:
            self.holds.pop(held).set()


def queue_of(request: dict[str, Any]) -> Any:
    prefix, name = request.get("prefix", "bull"), request["queue"]
    key = f"{prefix}:{name}"
    if key not in queues:
        queues[key] = Queue(name, {"connection": connection(), "prefix": prefix})
    return queues[key]


async def get_job(request: dict[str, Any]) -> dict[str, Any] | None:
    queue = queue_of(request)
    job = await queue.getJob(request["jobId"])
    return None if job is None else {**plain(job), "state": await queue.getJobState(job.id)}


async def on_job(request: dict[str, Any]) -> Any:
    job = await queue_of(request).getJob(request["jobId"])
    if job is None:
        raise LookupError(f"no job {request['jobId']} in queue {request['queue']}")
    return await _JOB_METHODS[request["op"]](job, request)


def plain(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": job.name,
        "data": job.data,
        "opts": job.opts,
        "progress": job.progress,
        "delay": job.delay,
        "priority": job.priority,
        "timestamp": job.timestamp,
        "attemptsMade": job.attemptsMade,
        "attemptsStarted": job.attemptsStarted,
        "returnvalue": job.returnvalue,
        "failedReason": job.failedReason,
        "stacktrace": job.stacktrace,
        "finishedOn": job.finishedOn or None,
        "processedOn": job.processedOn or None,
    }


async def add_flow(request: dict[str, Any]) -> str:
    flow = FlowProducer(connection(), {"prefix": request.get("prefix", "bull")})
    try:
        return str((await flow.add(request["flow"]))["job"].id)
    finally:
        await flow.close()


async def start_queue_events(request: dict[str, Any]) -> None:
    prefix, name = request.get("prefix", "bull"), request["queue"]
    stream = f"{prefix}:{name}:events"
    entries = await queue_of(request).client.xrevrange(stream, count=1)
    listener = QueueEvents(
        name, {"connection": connection(), "prefix": prefix, "lastEventId": entries[0][0] if entries else "0-0"}
    )

    def forward(event_type: str, *args: Any) -> None:
        if event_type == "error":
            report_error(f"queueEvents {name}", args[0])
        elif ":" not in event_type:
            say({"event": "queueEvents", "queue": name, "type": event_type, "args": args[0] if args else None})

    listener.emit = forward
    listeners[stream] = listener


async def close_worker(name: str, *, force: bool) -> None:
    slot = workers.pop(name, None)
    if slot is not None:
        await slot.worker.close(force=force)


async def reset() -> None:
    for name in list(workers):
        workers[name].release(None)
        await close_worker(name, force=True)
    for kept in (listeners, queues):
        for one in kept.values():
            await one.close()
        kept.clear()


async def run(request: dict[str, Any]) -> Any:
    match request["op"]:
        case "ping":
            return "pong"
        case "reset":
            return await reset()
        case "add":
            return (await queue_of(request).add(request["name"], request["data"], request.get("opts") or {})).id
        case "addBulk":
            return [job.id for job in await queue_of(request).addBulk(request["jobs"])]
        case "addFlow":
            return await add_flow(request)
        case "getJob":
            return await get_job(request)
        case "getJobs":
            order = [request.get("start", 0), request.get("end", -1), request.get("asc", False)]
            return [plain(job) for job in await queue_of(request).getJobs(request["types"], *order)]
        case "getState":
            return await queue_of(request).getJobState(request["jobId"])
        case "getWorkers":
            return await queue_of(request).get_workers()
        case "offers":
            kinds: dict[str, type] = {"Job": Job, "Queue": Queue, "Worker": Worker}
            return [name for name in request["names"] if hasattr(kinds[request["kind"]], name)]
        case "openQueue":
            return await queue_of(request).client.ping() and None  # its Queue object writes nothing by itself
        case "remove":
            return await queue_of(request).remove(request["jobId"], request.get("opts") or {})
        case "upsertJobScheduler":
            template = request.get("template") or {}
            job = await queue_of(request).upsertJobScheduler(
                *(request["schedulerId"], request["repeat"]),
                *(template.get("name"), template.get("data"), template.get("opts")),
            )
            return job.id if job else None
        case "startQueueEvents":
            return await start_queue_events(request)
        case "startWorker":
            slot = workers[request["worker"]] = WorkerSlot(request["worker"], request.get("behaviour", {}))
            return slot.start(request["queue"], request.get("prefix", "bull"), request.get("opts", {}))
        case "release":
            return workers[request["worker"]].release(request.get("jobId"))
        case "closeWorker":
            return await close_worker(request["worker"], force=request.get("force", False))
        case method if method in _JOB_METHODS:
            return await on_job(request)
        case method if method in _QUEUE_METHODS:
            return await getattr(queue_of(request), method)(*request.get("args", []))
        case unknown:
            raise ValueError(f"unknown op {unknown}")


async def answer(request: dict[str, Any]) -> None:
    try:
        say({"id": request["id"], "ok": await run(request)})
    except Exception as error:  # a failing op must not end the driver: whatever it is, the test gets to see it
        say({"id": request["id"], "error": describe(error)})


async def main() -> None:
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"event": "ready", "version": sys.version})
    async with asyncio.TaskGroup() as answers:
        async for line in reader:
            answers.create_task(answer(json.loads(line)))
    await reset()


if __name__ == "__main__":
    asyncio.run(main())
