"""The import shim refuses names that nobody knows, says where they stood and what was meant, and writes nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.compat.bullmq import FlowProducer, Job, Queue, QueueEvents, QueueEventsProducer, Worker
from bullpen.compat.bullmq._connection import raw_client
from bullpen.errors import ConnectionLost, InvalidOption
from bullpen.testing import free_port

SECRET = "hunter-2-hunter"
NOWHERE = {"connection": "redis://127.0.0.1:1"}
"""No call of these tests gets as far as a server."""


async def work(job: Job, token: str) -> None:
    raise AssertionError("never runs")


def refused(call: Callable[[], Any], place: str, meant: str | None) -> str:
    with pytest.raises(InvalidOption) as raised:
        call()
    return check(raised.value, place, meant)


async def refused_call(call: Awaitable[Any], place: str, meant: str | None) -> str:
    with pytest.raises(InvalidOption) as raised:
        await call
    return check(raised.value, place, meant)


def check(error: InvalidOption, place: str, meant: str | None) -> str:
    text = str(error)
    assert (error.option, error.suggestion) == (place, meant)
    assert text.startswith(f"{place}: expected ") and "\n" not in text
    assert len(text) < 400
    assert meant is None or text.endswith(f"; did you mean {meant!r}?")
    return text


@pytest.mark.parametrize(
    ("options", "place", "meant"),
    [
        ({"conection": f"redis://u:{SECRET}@db"}, "conection", "connection"),
        ({"prefx": "mine"}, "prefx", "prefix"),
        ({"Prefix": "mine"}, "Prefix", "prefix"),
        ({"connection": {"hst": "db"}}, "connection.hst", "host"),
        ({"connection": {"pasword": SECRET}}, "connection.pasword", "password"),
        ({"backend": "postgres"}, "backend", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Queue", "QueueEvents", "QueueEventsProducer", "Worker", "FlowProducer"])
async def test_what_makes_an_object(kind: str, options: dict[str, Any], place: str, meant: str | None) -> None:
    make: dict[str, Callable[[dict[str, Any]], Any]] = {
        "Queue": lambda given: Queue("q", given),
        "QueueEvents": lambda given: QueueEvents("q", given),
        "QueueEventsProducer": lambda given: QueueEventsProducer("q", given),
        "Worker": lambda given: Worker("q", work, given),
        "FlowProducer": lambda given: FlowProducer(None, given),
    }

    assert SECRET not in refused(lambda: make[kind](options), place, meant)


@pytest.mark.parametrize(
    ("options", "place", "meant"),
    [
        ({"concurency": 4}, "concurency", "concurrency"),
        ({"settings": {"backoffStrategi": print}}, "settings.backoffStrategi", "backoffStrategy"),
        ({"limiter": {"maxx": 1, "duration": 1}}, "limiter.maxx", "max"),
        ({"limiter": {"max": 1}}, "limiter", None),
        ({"limiter": 5}, "limiter", None),
        ({"metrics": {"maxDataPoint": 1}}, "metrics.maxDataPoint", "maxDataPoints"),
        ({"removeOnComplete": {"cont": 4}}, "removeOnComplete.cont", "count"),
        ({"removeOnFail": {"ages": 4}}, "removeOnFail.ages", "age"),
    ],
    ids=str,
)
async def test_a_worker(options: dict[str, Any], place: str, meant: str | None) -> None:
    refused(lambda: Worker("q", work, {**NOWHERE, **options}), place, meant)


async def test_the_other_dictionaries_of_queues_and_producers() -> None:
    refused(lambda: Queue("q", {"settings": {"backofStrategy": 1}}), "settings.backofStrategy", "backoffStrategy")
    defaults = {"backoff": {"type": "fixed", "dely": 4}}
    refused(lambda: Queue("q", {"defaultJobOptions": defaults}), "defaultJobOptions.backoff.dely", "delay")
    refused(lambda: QueueEvents("q", {"lastEventID": "0"}), "lastEventID", "lastEventId")
    refused(lambda: FlowProducer({"conection": "redis://db"}), "conection", "connection")
    refused(lambda: FlowProducer({"hots": "db"}), "hots", "host")


BAD_JOB_OPTIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"jobID": "a"}, "jobID", "jobId"),
    ({"backoff": {"type": "fixed", "dely": 400}}, "backoff.dely", "delay"),
    ({"backoff": "fixed"}, "backoff", None),
    ({"deduplication": {"id": "x", "tll": 4}}, "deduplication.tll", "ttl"),
    ({"removeOnComplete": {"cont": 4}}, "removeOnComplete.cont", "count"),
    ({"removeOnFail": {"cont": 4}}, "removeOnFail.cont", "count"),
    ({"parent": {"id": "1", "queu": "bull:q"}}, "parent.queu", "queue"),
    ({"repeat": {"every": 1000}}, "repeat", "queue.upsertJobScheduler(id, {…})"),
]


@pytest.mark.parametrize(("options", "place", "meant"), BAD_JOB_OPTIONS, ids=str)
async def test_the_options_of_a_job(options: dict[str, Any], place: str, meant: str | None) -> None:
    """However the job is stored; and before anything is sent."""
    queue, flows = Queue("q", NOWHERE), FlowProducer(NOWHERE)
    leaf = {"name": "a", "queueName": "q", "opts": options}
    tree = {"name": "p", "queueName": "q", "children": [{"name": "b", "queueName": "q"}, leaf]}
    defaults = {"queuesOptions": {"q": {"defaultJobOptions": options}}}

    await refused_call(queue.add("a", {}, options), place, meant)
    await refused_call(queue.addBulk([{"name": "b"}, {"name": "a", "opts": options}]), f"jobs[1].opts.{place}", meant)
    await refused_call(queue.upsertJobScheduler("s", {"every": 1000}, "a", {}, options), place, meant)
    await refused_call(flows.add(leaf), f"flow.opts.{place}", meant)
    await refused_call(flows.add(tree), f"flow.children[1].opts.{place}", meant)
    await refused_call(flows.add(tree, defaults), f"queuesOptions.q.defaultJobOptions.{place}", meant)
    await refused_call(flows.addBulk([tree]), f"flows[0].children[1].opts.{place}", meant)
    await queue.close()
    await flows.close()


async def test_the_dictionaries_of_jobs_and_flows() -> None:
    queue, flows = Queue("q", NOWHERE), FlowProducer(NOWHERE)
    node = {"name": "p", "queueName": "q"}
    child = {"name": "c", "queueName": "q", "childrn": []}

    await refused_call(queue.addBulk([{"name": "a", "options": {"delay": 1}}]), "jobs[0].options", "opts")
    await refused_call(queue.addBulk([{"name": "a", "dat": {}}]), "jobs[0].dat", "data")
    await refused_call(queue.upsertJobScheduler("s", {"evry": 1}), "evry", "every")
    await refused_call(flows.add({**node, "childs": [{}]}), "flow.childs", "children")
    await refused_call(flows.add({**node, "children": [child]}), "flow.children[0].childrn", "children")
    await refused_call(flows.add({"name": "p", "queuename": "q"}), "flow.queuename", "queueName")
    await refused_call(flows.add({"name": "p"}), "flow.queueName", None)
    await refused_call(flows.addBulk([node, {**node, "dat": 1}]), "flows[1].dat", "data")
    await refused_call(flows.add(node, {"queueOptions": {}}), "queueOptions", "queuesOptions")
    wrong: dict[str, Any] = {"queuesOptions": {"q": {"defaultJobOption": {}}}}
    await refused_call(flows.add(node, wrong), "queuesOptions.q.defaultJobOption", "defaultJobOptions")
    await queue.close()
    await flows.close()


async def test_the_options_of_calls() -> None:
    queue = Queue("q", NOWHERE)
    job = Job(queue, "a", {}, {}, "1")

    await refused_call(queue.remove("1", {"removeChilds": False}), "removeChilds", "removeChildren")
    await refused_call(queue.retryJobs({"stat": "failed"}), "stat", "state")
    await refused_call(queue.promoteJobs({"cont": 1}), "cont", "count")
    await refused_call(job.remove({"removeChildern": False}), "removeChildern", "removeChildren")
    await refused_call(job.retry("failed", {"resetAttemptMade": True}), "resetAttemptMade", "resetAttemptsMade")
    await refused_call(job.changePriority({"priorty": 1}), "priorty", "priority")
    await refused_call(job.moveToWaitingChildren("", {"chid": {}}), "chid", "child")
    await refused_call(job.moveToWaitingChildren("", {"child": {"id": "1", "que": "q"}}), "child.que", "queue")
    await queue.close()


async def test_the_name_of_a_state() -> None:
    queue = Queue("q", NOWHERE)
    job = Job(queue, "a", {}, {}, "1")

    for call, place in (
        (queue.getJobCounts("waitin"), "types"),
        (queue.getJobCountByTypes("waitin"), "types"),
        (queue.getJobs(["waitin"]), "types"),
        (queue.clean(0, 1, "waitin"), "type"),
        (queue.retryJobs({"state": "waitin"}), "state"),
        (job.retry("waitin"), "state"),
        (job.isInList("waitin"), "list_name"),
        (job.isInZSet("waitin"), "list_name"),
    ):
        text = await refused_call(call, place, "waiting")
        assert "completed, delayed, failed, paused, prioritized, wait, waiting, waiting-children" in text
    await queue.close()


async def test_the_name_of_an_event() -> None:
    worker = Worker("q", None, NOWHERE)
    queue, flows = Queue("q", NOWHERE), FlowProducer(NOWHERE)

    refused(lambda: worker.on("complete", print), "on", "completed")
    assert "QueueEvents" in refused(lambda: queue.on("completed", print), "on", None)
    assert "QueueEvents" in refused(lambda: flows.on("completed", print), "on", None)
    for taken in ("locksRenewed", "lockRenewalFailed", "error", "closed"):
        worker.on(taken, print)
    queue.on("error", print)
    flows.on("error", print)
    for each in (worker, queue, flows):
        await each.close()


async def test_every_name_of_theirs_is_taken(redis_url: str) -> None:
    """Also what has no effect there and here."""
    common = {"connection": redis_url, "prefix": "mine", "backend": "redis", "skipVersionCheck": True}
    common["skipWaitingForReady"] = True
    settings = {"settings": {"backoffStrategy": lambda *_: 1}}
    opts = {
        "timestamp": 1,
        "delay": 0,
        "attempts": 2,
        "priority": 1,
        "lifo": False,
        "keepLogs": 3,
        "backoff": {"type": "fixed", "delay": 5, "jitter": 0.5},
        "stackTraceLimit": 4,
        "removeOnComplete": {"age": 9, "count": 9, "limit": 9},
        "removeOnFail": True,
        "jobId": "own",
        "deduplication": {"id": "d", "ttl": 5, "extend": True, "replace": True, "keepLastIfActive": False},
    }
    queue = Queue("q", {**common, **settings, "defaultJobOptions": {"attempts": 4}})
    worker = Worker(
        "q",
        work,
        {
            **common,
            **settings,
            "name": "w",
            "autorun": False,
            "concurrency": 2,
            "limiter": {"max": 1, "duration": 9},
            "maxStalledCount": 1,
            "maxStartedAttempts": 9,
            "stalledInterval": 9_000,
            "lockDuration": 9_000,
            "lockRenewTime": 4_000,
            "drainDelay": 5,
            "runRetryDelay": 9,
            "metrics": {"maxDataPoints": 60},
            "removeOnComplete": {"count": 4},
            "removeOnFail": {"age": 4},
        },
    )
    events = QueueEvents("q", {**common, "autorun": False, "blockingTimeout": 9, "lastEventId": "$"})
    producer, flows = QueueEventsProducer("q", common), FlowProducer({**common, "defaultJobOptions": {}})

    assert (await queue.add("a", {}, opts)).id == "own"
    for each in (queue, worker, events, producer, flows):
        await each.close()


async def test_a_job_of_a_scheduler_can_be_added_again_with_its_options(redis_url: str) -> None:
    """The rule that its scheduler wrote into it is no wish of the caller's."""
    queue = Queue("again", {"connection": redis_url})
    await queue.upsertJobScheduler("tick", {"every": 3_600_000})
    (made,) = await queue.getJobs(["delayed", "waiting"])
    assert made.opts["repeat"]["every"] == 3_600_000

    again = await queue.add(made.name, made.data, {**made.opts, "jobId": "again"})

    assert again.id == "again"
    await queue.close()


@pytest.mark.parametrize("url", ["embedded://{}", "unix://{}", "socket"])
async def test_a_server_of_this_machine(tmp_path: Path, url: str) -> None:
    """The embedded one, and its socket by name."""
    first = Queue("q", {"connection": f"embedded://{tmp_path}"})
    job = await first.add("a", {"n": 1})
    socket = str(first._connection.address).removeprefix("unix:")
    connection: Any = {"unix_socket_path": socket} if url == "socket" else url.format(tmp_path)
    if url.startswith("unix"):
        connection = f"unix://{socket}"

    second = Queue("q", {"connection": connection})
    found = await second.getJob(job.id or "")

    assert found is not None and found.data == {"n": 1}
    client = raw_client({"connection": connection})
    assert await client.exists(f"bull:q:{job.id}") == 1
    await client.aclose()
    for each in (first, second):
        await each.close()


async def test_a_server_that_is_not_there_is_said_soon() -> None:
    port = free_port()
    opts = {"connection": {"host": "127.0.0.1", "port": port}}
    queue, flows = Queue("q", opts), FlowProducer(opts)
    wanted = re.escape(f"cannot connect to 127.0.0.1:{port}")

    async with asyncio.timeout(60):
        calls = (queue.add("a", {}), queue.getJobCounts(), flows.add({"name": "p", "queueName": "q"}))
        errors = await asyncio.gather(*calls, return_exceptions=True)
        await queue.close()
        await flows.close()

    for error in errors:
        assert isinstance(error, ConnectionLost)
        assert re.search(wanted, str(error))


async def test_without_a_connection_it_is_localhost_whatever_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyPI's: a program that is moved talks to the server that it talked to."""
    monkeypatch.setenv("BULLPEN_REDIS_URL", "redis://elsewhere:1")
    queue, flows = Queue("q"), FlowProducer()

    for each in (queue, flows):
        assert str(each._connection.address) == "localhost:6379"
        await each.close()


async def test_no_data_is_null_as_theirs(redis_url: str) -> None:
    place = "__default__"  # where a producer of flows notes its calls
    queue, flows = Queue(place, {"connection": redis_url}), FlowProducer({"connection": redis_url})
    child = {"name": "c", "queueName": place}
    tree = await flows.add({"name": "p", "queueName": place, "children": [child]})
    assert tree is not None
    bulk = await queue.addBulk([{"name": "b"}])
    changed = await queue.add("u", {"n": 1})
    await changed.updateData(None)

    jobs = [tree["job"], tree["children"][0]["job"], await queue.add("a", None), *bulk, changed]
    stored = [await queue.getJob(job.id) for job in jobs]

    assert [job.data for job in jobs] == [None] * 5
    assert [job and job.data for job in stored] == [None] * 5
    for each in (queue, flows):
        await each.close()


async def test_the_template_of_a_scheduler_has_what_was_given(redis_url: str) -> None:
    queue = Queue("templates", {"connection": redis_url})
    await queue.upsertJobScheduler("bare", {"every": 3_600_000})
    await queue.upsertJobScheduler("data", {"every": 3_600_000}, "n", {"a": 1})
    await queue.upsertJobScheduler("both", {"every": 3_600_000}, "n", {"a": 1}, {"priority": 2, "attempts": 3})

    shown: dict[str, Any] = {each["key"]: each.get("template") for each in await queue.getJobSchedulers()}

    assert shown["bare"] is None
    assert shown["data"] == {"data": {"a": 1}}
    assert shown["both"]["data"] == {"a": 1}
    assert {name: shown["both"]["opts"][name] for name in ("priority", "attempts")} == {"priority": 2, "attempts": 3}
    await queue.close()
