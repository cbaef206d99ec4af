"""A program written for PyPI `bullmq`. It runs with whichever library is named, and prints what it saw.

    python program.py bullmq redis://localhost:6379
    python program.py bullpen.compat.bullmq redis://localhost:6379

Elsewhere: the comparison of the two (`test_program`).
"""

import asyncio
import importlib
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

library: Any = importlib.import_module(sys.argv[1])
_where = urlsplit(sys.argv[2])
OPTS: dict[str, Any] = {
    # redis-py gives up a blocked read after five seconds of its own.
    "connection": {"unix_socket_path": _where.path, "socket_timeout": None}
    if _where.scheme == "unix"
    else {"host": _where.hostname, "port": _where.port, "password": _where.password, "socket_timeout": None}
}
seen: dict[str, Any] = {}


def shown(job: Any) -> dict[str, Any]:
    """What both must show of a job, without times."""
    names: tuple[str, ...] = (
        "id",
        "name",
        "data",
        "progress",
        "attemptsMade",
        "attemptsStarted",
        "returnvalue",
        "failedReason",
    )
    names += ("delay", "priority", "stalledCounter", "parentKey", "repeatJobKey", "deduplication_id")
    return {name: getattr(job, name) for name in names}


def text(error: BaseException) -> list[Any]:
    return [type(error).__name__, str(error)]


async def adding() -> None:
    queue = library.Queue("adding", {**OPTS, "defaultJobOptions": {"removeOnFail": 5}})
    plain = await queue.add("plain", {"n": 1})
    late = await queue.add("late", {"n": 2}, {"delay": 60_000, "jobId": "own-id", "attempts": 4})
    await queue.add("first", {"n": 3}, {"priority": 7})
    bulk = await queue.addBulk(
        [{"name": "a", "data": {"n": 4}}, {"name": "b", "data": {"n": 5}, "opts": {"lifo": True}}]
    )
    again = await queue.add("late", {"n": 9}, {"jobId": "own-id"})
    one = await queue.add("once", {}, {"deduplication": {"id": "same"}})
    two = await queue.add("once", {}, {"deduplication": {"id": "same"}})
    seen["ids"] = [plain.id, late.id, [job.id for job in bulk], again.id, one.id == two.id]
    seen["owner"] = await queue.getDeduplicationJobId("same") == one.id
    seen["counts"] = await queue.getJobCounts()
    seen["per priority"] = await queue.getCountsPerPriority([0, 7])
    seen["states"] = [await queue.getJobState(job) for job in (plain.id, late.id, "nobody")]
    seen["waiting"] = [job.data for job in await queue.getWaiting()]
    seen["newest"] = [job.data for job in await queue.getJobs(["waiting"], 0, 1)]
    seen["stored"] = shown(await queue.getJob(late.id))
    seen["absent"] = await queue.getJob("nobody")
    stored = await library.Job.fromId(queue, late.id)
    seen["stored opts"] = {name: stored.opts[name] for name in ("attempts", "delay", "jobId", "removeOnFail")}
    await late.promote()
    seen["promoted"] = [late.delay, await late.getState(), await late.isWaiting(), await late.isDelayed()]
    await plain.changePriority({"priority": 3})
    await plain.updateData({"n": 10})
    await plain.updateProgress({"half": True})
    seen["logs"] = [await plain.log("one"), await plain.log("two"), await queue.getJobLogs(plain.id)]
    seen["newest log"] = await queue.getJobLogs(plain.id, 0, 0, False)
    seen["changed"] = shown(await queue.getJob(plain.id))
    seen["removed"] = [await queue.remove(plain.id), await queue.getJobState(plain.id)]
    await queue.pause()
    seen["paused"] = await queue.isPaused()
    await queue.resume()
    seen["limits"] = [
        await queue.setGlobalConcurrency(3),
        await queue.getGlobalConcurrency(),
        await queue.setGlobalRateLimit(5, 1000),
        await queue.getGlobalRateLimit(),
        await queue.removeGlobalRateLimit(),
        await queue.removeGlobalRateLimit(),
        await queue.removeGlobalConcurrency(),
        await queue.getGlobalConcurrency(),
        await queue.getRateLimitTtl() < 0,
        await queue.rateLimit(60_000),
        await queue.getRateLimitTtl() > 50_000,
        await queue.removeRateLimitKey(),
        await queue.removeRateLimitKey(),
    ]
    await queue.drain()
    seen["drained"] = await queue.getJobCountByTypes("waiting", "prioritized", "delayed")
    await queue.obliterate(True)
    await queue.close()


async def refusing() -> None:
    queue = library.Queue("refusing", OPTS)
    job = await queue.add("job", {})
    attempts = {
        "gone": lambda: library.Job(queue, "gone", {}, {}, "gone").updateProgress(1),
        "not delayed": job.promote,
        "not failed": job.retry,
        "no parent": lambda: queue.add("child", {}, {"parent": {"id": "none", "queue": "bull:refusing"}}),
        "no number": lambda: queue.add("nan", {"value": float("nan")}),
        "two rules": lambda: queue.add("rules", {}, {"failParentOnFailure": True, "removeDependencyOnFailure": True}),
        "two times": lambda: queue.upsertJobScheduler("s", {"every": 1000, "pattern": "* * * * *"}),
        "no time": lambda: queue.upsertJobScheduler("s", {}),
    }
    for name, attempt in attempts.items():
        try:
            await attempt()
            seen[f"refused {name}"] = "no"
        except Exception as error:
            seen[f"refused {name}"] = text(error)
    await queue.close()


async def working() -> None:
    queue = library.Queue("working", OPTS)
    ended: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def work(job: Any, token: str) -> Any:
        match job.name:
            case "value":
                await job.updateProgress(50)
                await job.log(f"a line, {bool(token)}")
                return {"sum": sum(job.data)}
            case "again" if job.attemptsMade == 0:
                raise ValueError("not yet")
            case "never":
                raise library.UnrecoverableError("not ever")
            case "later" if job.attemptsStarted < 2:
                await job.moveToDelayed(round(time.time() * 1000) + 50, token)
                raise library.DelayedError
        return job.attemptsMade

    worker = library.Worker("working", work, {**OPTS, "concurrency": 3, "removeOnComplete": {"count": 100}})
    worker.on("completed", lambda job, value: ended.put_nowait(("completed", [job.name, job.attemptsMade, value])))
    worker.on("failed", lambda job, error: ended.put_nowait(("failed", [job.name, job.attemptsMade, text(error)])))
    events = library.QueueEvents("working", {**OPTS, "lastEventId": "0-0"})
    told: list[Any] = []
    heard = asyncio.Event()
    events.on("completed", lambda fields, _: told.append([fields["jobId"], fields["returnvalue"]]))
    events.on("mine", lambda fields, _: told.append(fields))
    for name in ("completed", "mine"):
        events.on(name, lambda *_: heard.set())
    jobs = [
        await queue.add("value", [1, 2, 3]),
        await queue.add("again", {}, {"attempts": 2, "backoff": {"type": "fixed", "delay": 20}}),
        await queue.add("never", {}, {"attempts": 5}),
        await queue.add("later", {}),
    ]
    seen["ended"] = sorted([await ended.get() for _ in range(5)], key=repr)
    seen["worked"] = [shown(await queue.getJob(job.id)) for job in jobs]
    seen["its log"] = await queue.getJobLogs(jobs[0].id)
    seen["completed"] = [await queue.getCompletedCount(), await queue.getFailedCount(), await jobs[0].isCompleted()]
    await worker.pause()
    await queue.retryJobs({"state": "failed"})
    seen["retried"] = await queue.getJobState(jobs[2].id)
    worker.resume()
    seen["ended again"] = await ended.get()
    producer = library.QueueEventsProducer("working", OPTS)
    await producer.publishEvent({"eventName": "mine", "colour": "red"})
    while len(told) < 4:
        await heard.wait()
        heard.clear()
    seen["told"] = sorted(told, key=repr)
    seen["cleaned"] = sorted(await queue.clean(0, 10, "completed")) == sorted(
        job.id for job in (jobs[0], jobs[1], jobs[3])
    )
    for each in (events, producer, worker, queue):
        await each.close()


async def cancelling() -> None:
    queue = library.Queue("cancelling", OPTS)
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    started = asyncio.Event()

    async def work(job: Any, token: str, signal: Any) -> None:
        started.set()
        await signal.wait()
        signal.throw_if_aborted()

    worker = library.Worker("cancelling", work, OPTS)
    worker.on("failed", lambda job, error: ended.set_result(text(error)))
    job = await queue.add("long", {})
    await started.wait()
    seen["cancelled"] = [worker.cancelJob("nobody"), worker.cancelJob(job.id, "too long"), await ended]
    await worker.close()
    await queue.close()


async def flowing() -> None:
    flows = library.FlowProducer(OPTS)
    children, parents = library.Queue("children", OPTS), library.Queue("parents", OPTS)
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    options = {"ignoreDependencyOnFailure": True}
    tree = await flows.add(
        {
            "name": "sum",
            "queueName": "parents",
            "data": {},
            "children": [
                {"name": "part", "queueName": "children", "data": {"n": n}, "opts": options if n == 3 else {}}
                for n in range(4)
            ],
        },
        {"queuesOptions": {"children": {"defaultJobOptions": {"attempts": 2}}}},
    )
    parent = tree["job"]
    seen["tree"] = [
        parent.name,
        [child["job"].data for child in tree["children"]],
        sorted(tree),
        sorted(tree["children"][0]),
    ]
    seen["child"] = [
        tree["children"][0]["job"].parentKey == f"bull:parents:{parent.id}",
        tree["children"][0]["job"].opts["attempts"],
    ]
    seen["waits"] = [await parent.isWaitingChildren(), await parents.getJobState(parent.id)]

    async def part(job: Any, token: str) -> int:
        if job.data["n"] == 3:
            raise library.UnrecoverableError("no three")
        return int(job.data["n"]) * 10

    async def add_up(job: Any, token: str) -> int:
        return sum((await job.getChildrenValues()).values())

    workers = [library.Worker("children", part, OPTS), library.Worker("parents", add_up, OPTS)]
    workers[1].on("completed", lambda job, value: ended.set_result(value))
    seen["sum"] = await ended
    seen["values"] = sorted((await parent.getChildrenValues()).values())
    bare = await flows.add({"name": "no-data", "queueName": "bare"})
    nothing = library.Queue("bare", OPTS)
    jobs = [bare["job"], await nothing.add("none", None), *await nothing.addBulk([{"name": "bulk"}])]
    seen["no data"] = [[job.data, (await nothing.getJob(job.id)).data] for job in (jobs[0], jobs[1])]
    seen["no data in bulk"] = [jobs[2].data, sorted(repr(job.data) for job in await nothing.getWaiting())]
    await nothing.close()
    for each in (*workers, children, parents, flows):
        await each.close()


async def by_hand() -> None:
    queue = library.Queue("by-hand", OPTS)
    worker = library.Worker("by-hand", None, OPTS)
    active: list[str] = []
    worker.on("active", lambda job, before: active.append(job.name))
    for name in ("done", "undone"):
        await queue.add(name, {"name": name})
    first = await worker.getNextJob("one")
    seen["taken"] = [first.data, first.attemptsStarted, await first.isActive(), active]
    await first.moveToCompleted({"all": "right"}, "one")
    second = await worker.getNextJob("two")
    await second.moveToFailed(ValueError("not right"), "two")
    seen["by hand"] = [await first.isCompleted(), await second.isFailed()]
    seen["shown"] = [[job.attemptsMade, job.returnvalue, job.failedReason] for job in (first, second)]
    seen["kept"] = [shown(await queue.getJob(job.id)) for job in (first, second)]
    await worker.close(force=True)
    await queue.close()


async def fetching() -> None:
    """What `fetchNext` brings is a job that is taken already."""
    queue = library.Queue("fetching", OPTS)
    worker = library.Worker("fetching", None, OPTS)
    for number in range(3):
        await queue.add("job", {"n": number}, {"attempts": 2, "backoff": 60_000})
    first = await worker.getNextJob("one")
    data, job_id, *rest = await first.moveToFailed(ValueError("later"), "one", True)
    second = await worker.nextJobFromJobData(data, job_id, *rest, "one")
    seen["fetched"] = [second.data, data["name"], rest, await second.isActive(), await first.isDelayed()]
    data, job_id, *rest = await second.moveToCompleted("done", "one", True)
    third = await worker.nextJobFromJobData(data, job_id, *rest, "one")
    seen["fetched after"] = [third.data, await second.isCompleted()]
    seen["not fetched"] = await third.moveToFailed(ValueError("later"), "one", True)
    await worker.close()
    await queue.close()


async def scheduling() -> None:
    queue = library.Queue("scheduling", OPTS)
    first = await queue.upsertJobScheduler("tick", {"every": 3_600_000}, "ticks", {"a": 1}, {"priority": 2})
    await queue.upsertJobScheduler("nine", {"pattern": "0 9 * * *", "tz": "Europe/Berlin", "limit": 9}, "nines")
    seen["next job"] = [first.name, first.data, first.id.startswith("repeat:tick:"), await queue.getJobState(first.id)]
    bare = await queue.upsertJobScheduler("bare", {"every": 3_600_000}, "bares")
    seen["templates"] = [
        [each["key"], sorted(each.get("template", {}).items(), key=repr)]
        for each in (await queue.getJobScheduler("bare"), await queue.getJobScheduler("tick"))
    ]
    seen["bare"] = bare.data
    await queue.removeJobScheduler("bare")
    await queue.upsertJobScheduler("child", {"every": 3_600_000}, "children", None, {"failParentOnFailure": True})
    seen["policy"] = (await queue.getJobScheduler("child"))["template"]["opts"]["failParentOnFailure"]
    await queue.removeJobScheduler("child")
    stored = await queue.getJobScheduler("nine")
    seen["scheduler"] = {name: stored[name] for name in ("key", "name", "pattern", "tz", "limit", "iterationCount")}
    seen["its next"] = stored["next"] > time.time() * 1000
    every = await queue.getJobScheduler("tick")
    seen["every"] = [every["every"], every["template"]["data"], every["template"]["opts"]["priority"]]
    seen["keys"] = [each["key"] for each in await queue.getJobSchedulers(0, -1, True)] == sorted(
        ("tick", "nine"), key=lambda key: {"tick": every, "nine": stored}[key]["next"]
    )
    seen["how many"] = await queue.getJobSchedulersCount()
    seen["is one"] = [await queue.isJobScheduler("tick"), await queue.isJobScheduler("tock")]
    seen["ended"] = await queue.upsertJobScheduler("over", {"every": 1000, "endDate": 1})
    seen["gone"] = [await queue.removeJobScheduler("tick"), await queue.removeJobScheduler("tick")]
    await queue.close()


async def without_a_name() -> None:
    """A queue whose name is empty works there."""
    queue = library.Queue("", OPTS)
    done = asyncio.Event()

    async def process(job: Any, token: str) -> Any:
        return job.data

    flows = library.FlowProducer(OPTS)
    added = await flows.add({"name": "unnamed", "queueName": "", "data": {"n": 1}})
    worker = library.Worker("", process, OPTS)
    worker.on("completed", lambda job, value: done.set())
    await asyncio.wait_for(done.wait(), 30)
    stored = await library.Job.fromId(queue, added["job"].id)
    seen["unnamed"] = [stored.returnvalue, await queue.getJobCounts("completed"), queue.toKey("meta")]
    await worker.close()
    await queue.close()
    await flows.close()


async def main() -> None:
    for part in (adding, refusing, working, cancelling, flowing, by_hand, fetching, scheduling, without_a_name):
        await asyncio.wait_for(part(), 60)
    print(json.dumps(seen, indent=1, sort_keys=True))


asyncio.run(main())
