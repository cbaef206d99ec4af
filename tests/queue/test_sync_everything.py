"""Everything that a queue can do gives the same answers with an event loop and without one.

One scenario is written once and played on both faces; the answers are compared step by step. It must use every name
that a blocking queue, job, lanes and dead letters have: a coroutine that waits for a loop is found here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen import DeadLetterFilter, Flow, Job, JobState, NewJob, PermanentError, Queue, sync
from bullpen.ports.edits import make_edit
from bullpen.queue.blocking import drive
from bullpen.queue.flows import BlockedParent, FlowNode
from bullpen.queue.heads import HeadFilter
from bullpen.queue.schedulers import DeclaredScheduler
from bullpen.queue.sync import DeadLetters, FailedSetStore, Lanes
from bullpen.wire.records import JobRecord
from tests.queue._kit import Kit

FACES = (sync.Queue, sync.Job, Lanes, DeadLetters, FailedSetStore)
NOT_PLAYED = {"codec", "connection", "note_late_run", "note_user"}
"""What was given to the constructor, what would count a late wake-up, and who uses a queue now."""
FOREVER = datetime(2999, 1, 1, tzinfo=UTC)


async def get(value: Any) -> Any:
    """The answer, however it comes."""
    if inspect.isawaitable(value):
        return await value
    if isinstance(value, AsyncIterator):
        return [one async for one in value]
    return list(value) if isinstance(value, Iterator) else value


def plain(value: Any) -> Any:
    """An answer without times, and without the classes that differ on purpose."""
    match value:
        case Job() | sync.Job():
            return ("job", value.id, value.name, value.data)
        case FlowNode():
            return ("node", plain(value.job), sorted(map(plain, value.children)))
        case BlockedParent():
            return ("blocked", plain(value.job), value.failed, value.missing)
        case JobRecord():
            return ("record", value.id, value.name)
        case dict():
            return {name: plain(one) for name, one in value.items() if name not in ("timestamp", "entry", "failedAt")}
        case list() | tuple():
            return [plain(one) for one in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            volatile = ("failed_at", "error_stack", "next_ms", "job_id", "entry", "fields", "previous_ms")
            shown = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return (type(value).__name__, plain({name: one for name, one in shown.items() if name not in volatile}))
    return value


class Recorded:
    """A face that notes what is asked of it."""

    def __init__(self, face: Any, used: set[tuple[str, str]]) -> None:
        self._face, self._used = face, used

    def __getattr__(self, name: str) -> Any:
        self._used.add((type(self._face).__name__, name))
        return getattr(self._face, name)


class Scenario:
    """The steps, for one face."""

    def __init__(self, face: Any, name: str) -> None:
        self.used: set[tuple[str, str]] = set()
        self.queue = Recorded(face, self.used)
        self.name = name
        self.answers: list[tuple[str, str]] = []

    def note(self, step: str, answer: Any) -> None:
        self.answers.append((step, repr(plain(answer)).replace(self.name, "Q")))

    async def do(self, step: str, value: Any) -> Any:
        answer = await get(value)
        self.note(step, answer)
        return answer

    def over(self, part: Any) -> Recorded:
        return Recorded(part, self.used)

    async def job(self, job_id: str) -> Recorded:
        return self.over(await get(self.queue.get_job(job_id)))

    async def add(self) -> None:
        queue = self.queue
        await self.do("add", queue.add("mail", {"n": 1}, job_id="w1"))
        await self.do("add again", queue.add("mail", {"n": 2}, job_id="w1"))
        await self.do("add many", queue.add_many([NewJob("mail", 1, {"job_id": "w2", "lane": "acme"}), ("mail", 2)]))
        await self.do("delayed", queue.add("mail", job_id="d1", delay=3_600_000))
        await self.do("delayed", queue.add("mail", job_id="d2", delay=7_200_000))
        await self.do("prioritized", queue.add("mail", job_id="p1", priority=7))
        await self.do("unique", queue.add("mail", job_id="u1", deduplication="only"))
        flow = Flow("sum", job_id="top", children=[Flow("part", job_id="leaf", on_failure="wait")])
        await self.do("flow", queue.add_flow(flow))
        await self.do(
            "flows",
            queue.add_flows([Flow("a", job_id="f1"), Flow("b", job_id="f2", children=[leaf("f3"), leaf("f4")])]),
        )

    async def read(self) -> None:
        queue = self.queue
        for name in ("name", "defaults"):
            self.note(name, getattr(queue, name))
        self.note("keys", queue.keys.base)
        self.note("key", str(queue.key_of("w1")))
        await self.do("counts", queue.counts())
        await self.do("jobs", queue.jobs(JobState.WAITING, count=3))
        await self.do("iter", queue.iter_jobs([JobState.DELAYED, JobState.COMPLETED, JobState.FAILED]))
        await self.do("job", queue.get_job("w1"))
        await self.do("no job", queue.get_job("none"))
        await self.do("open", queue.open(await get(queue.get_job("w1"))))
        await self.do("state", queue.state_of("d1"))
        await self.do("flow", queue.get_flow("top"))
        await self.do("no flow", queue.get_flow("none"))
        await self.do("children", queue.children("top"))
        await self.do("children", queue.children_counts(await get(queue.get_job("top"))))
        await self.do("page", queue.children_page("top", "pending"))
        await self.do("blocked", queue.blocked_parents())
        await self.do("per priority", queue.counts_per_priority([0, 7]))
        await self.do("deduplication", queue.deduplication_owner("only"))
        await self.do("lock", queue.lock_holder("w1"))
        await self.do("users", queue.note_user("test", "somebody"))
        await self.do("told", queue.note_cancelled("w1"))
        await self.do("healthy", queue.is_healthy())
        self.note("heads", [head.record.id for head in await get(queue.heads(JobState.FAILED))])
        self.note("heads", [head.preview("data") for head in await get(queue.heads_of(["w1", "none"]))])
        await self.do("find", queue.find(JobState.WAITING, HeadFilter(name="mail")))
        await self.do("position", queue.position_at(JobState.DELAYED, 4_000_000_000_000))
        self.note("locate", (await get(queue.locate("w1")))[0])
        # A worker writes down when it checks next, sooner or later.
        self.note("meta", sorted({*await get(queue.meta())} - {"bpcheck"}))
        await self.do("unlocked", queue.unlocked())
        await self.do("no job behind", queue.ids_without_job())
        self.note("age", (await get(queue.oldest_age_ms())) < 600_000)
        await self.do("metrics", queue.metrics())
        await self.do("workers", queue.workers())
        await self.do("payloads", queue.payload_report())
        await self.do("orphans", queue.find_orphans())
        await self.do("ids", queue.job_ids([JobState.DELAYED, JobState.FAILED]))
        await self.do("due", queue.count_delayed(before=FOREVER))
        await self.do("maxed", queue.is_maxed())
        await self.do("listeners", queue.listeners())
        await self.do("numbers", queue.prometheus_metrics())
        await self.do("at", queue.jobs_at([f"bull:{self.name}:w1"]))
        self.note("event", "-" in await get(queue.publish_event("hello", {"n": 1})))

    async def use_jobs(self) -> None:
        top, leaf, waiting, unique = [await self.job(each) for each in ("top", "leaf", "w1", "u1")]
        for name in sorted(
            properties(sync.Job) - {"record", "opts", "meta", "timestamp", "processed_on", "finished_on"}
        ):
            self.note(name, getattr(waiting, name) if name not in VOLATILE else bool(getattr(waiting, name)))
        self.note("times", [bool(waiting.timestamp), waiting.processed_on, waiting.finished_on])
        self.note("stored", [waiting.record, waiting.opts.attempts, waiting.meta.to_wire()])
        self.note("json", waiting.to_json()["data"])
        self.note("fields", sorted(waiting.log_fields()))
        await self.do("progress", waiting.progress({"done": 1}))
        await self.do("log", waiting.log("one"))
        await self.do("log", self.queue.add_log("w1", "two"))
        await self.do("logs", waiting.logs(newest_first=True))
        await self.do("logs", self.queue.logs("w1", start=1))
        await self.do("clear", waiting.clear_logs(keep=1))
        await self.do("clear", self.queue.clear_logs("w1"))
        await self.do("progress", self.queue.update_progress("w1", 7))
        await self.do("data", waiting.update_data({"n": 3}))
        await self.do("state", waiting.state())
        await self.do("values", top.children_values())
        await self.do("ignored", top.ignored_children())
        await self.do("failed", top.failed_children())
        await self.do("counts", top.children_counts())
        await self.do("leave", leaf.leave_parent())
        await self.do("free", unique.remove_deduplication())
        await self.do("children", (await self.job("f2")).remove_unprocessed_children())
        await self.do("result", (await self.job("c1")).result(timeout=5_000))
        await self.do("cancel", (await self.job("f1")).cancel("not wanted"))
        later, done = await self.job("d2"), await self.job("c1")
        await self.do("delay", later.change_delay(60_000))
        await self.do("promote", later.promote())
        await self.do("priority", later.change_priority(9))
        await self.do("remove", later.remove())
        await self.do("retry", done.retry(state=JobState.COMPLETED))

    async def use_schedulers(self) -> None:
        queue = self.queue
        made = await get(queue.upsert_scheduler("s", "tick", every=3_600_000))
        self.note("made", made.id)
        self.note("one", (await get(queue.get_scheduler("s"))).every_ms)
        self.note("page", [each.id for each in await get(queue.schedulers())])
        await self.do("count", queue.count_schedulers())
        await get(queue.change_scheduler("s", every=7_200_000))
        self.note("changed", (await get(queue.get_scheduler("s"))).every_ms)
        await self.do("pause", queue.pause_scheduler("s"))
        await self.do("resume", queue.resume_scheduler("s"))
        self.note("run", (await get(queue.run_scheduler("s", early=True))).startswith("repeat:s:"))
        await self.do("ended", queue.why_ended(await get(queue.get_scheduler("s"))))
        declared = [DeclaredScheduler("t", "tick", None, {"every": 60_000})]
        await self.do("declared", queue.reconcile_schedulers(declared))
        await self.do("remove", queue.remove_scheduler("s"))
        await self.do("prune", queue.reconcile_schedulers([], prune=True))

    async def use_limits(self) -> None:
        queue = self.queue
        await self.do("set", queue.set_global_concurrency(3))
        await self.do("get", queue.global_concurrency())
        await self.do("remove", queue.remove_global_concurrency())
        await self.do("set", queue.set_global_rate_limit(5, timedelta(seconds=1)))
        await self.do("get", queue.global_rate_limit())
        await self.do("remove", queue.remove_global_rate_limit())
        await self.do("stop", queue.rate_limit(60_000))
        self.note("left", (await get(queue.rate_limit_ttl())) > 0)
        await self.do("lift", queue.lift_rate_limit())
        await self.do("turn", queue.take_turn("mailer", most=1))
        await self.do("pause", queue.pause())
        await self.do("paused", queue.is_paused())
        await self.do("resume", queue.resume())
        await self.do("layout", queue.set_pause_layout(None))
        await self.do("events", queue.set_events_max_len(5_000))
        self.note("find", (await get(queue.find(JobState.WAITING, HeadFilter(name="none"), count=5))).ids)
        lanes = self.over(queue.lanes)
        await self.do("lane", lanes.set("acme", weight=2, concurrency=1))
        await self.do("pause", lanes.pause("acme"))
        await self.do("get", lanes.get("acme"))
        await self.do("list", lanes.list())
        await self.do("resume", lanes.resume("acme"))
        await self.do("remove", lanes.remove("acme"))

    async def use_letters(self) -> None:
        letters = self.over(self.queue.dead_letters)
        self.note("name", letters.name)
        await self.do("depth", letters.depth())
        found = await self.do("list", letters.list())
        await self.do("find", letters.find())
        first, second, *_ = found
        await self.do("get", letters.get(first.id))
        await self.do("tenant", letters.of_tenant("acme"))
        self.note("page", len((await get(letters.page(limit=2))).letters))
        self.note("groups", [(group.name, group.count) for group in await get(letters.groups())])
        await self.do("put", letters.put(first))
        await self.do("redrive", letters.redrive(first.id, by="ada"))
        await self.do("discard", letters.discard(second.id))
        await self.do("redrive all", letters.redrive_all(limit=1, rate=1_000.0, by="ada"))
        await self.do("sweep", letters.sweep())
        edited, *_ = await get(letters.list())
        edit = make_edit(edited.data, merge={"n": 9})
        await self.do("redrive edited", letters.redrive_edited(edited.id, edit))
        await self.do("discard all", letters.discard_all(DeadLetterFilter()))
        failed = self.over(self.queue.failed_set)
        self.note("name", failed.name)
        await self.do("depth", failed.depth())
        records = await get(failed.list())
        one, two, three = sorted(records, key=lambda each: str(each.id))[:3]
        self.note("list", [each.id.partition("-")[0] for each in (one, two, three)])
        await self.do("get", failed.get("none"))
        self.note("page", len((await get(failed.page(limit=2))).letters))
        self.note("groups", [group.count for group in await get(failed.groups())])
        await self.do("discard", failed.discard(one.id))
        await self.do("put", failed.put(one))
        await self.do("redrive", failed.redrive(two.id))
        edit = make_edit(three.data, merge={"n": 9})
        await self.do("redrive edited", failed.redrive_edited(three.id, edit))

    async def look_after(self) -> None:
        queue = self.queue
        await self.do("delay", queue.change_delay("d1", 1_800_000))
        await self.do("priority", queue.change_priority("p1", 3))
        await self.do("promote", queue.promote("d1"))
        await self.do("retry", queue.retry("b6"))
        await self.do("cancel", queue.cancel("w2", "why not"))
        await self.do("children", queue.remove_unprocessed_children("f2"))
        await self.do("remove", queue.remove("p1"))
        await self.do("free", queue.remove_deduplication("only"))
        await self.do("promote all", queue.promote_all())
        await self.do("retry all", queue.retry_all(until=FOREVER))
        await self.do("drain", queue.drain(delayed=True))
        await self.do("clean", queue.clean(state=JobState.FAILED))
        await self.do("trim", queue.trim_events(100_000))
        await self.do("orphans", queue.restore_orphans())
        await self.do("orphans", queue.remove_orphans())
        with pytest.raises(Exception, match="a queue whose codec has a store"):
            await get(queue.sweep_payloads())
        await self.do("obliterate", queue.obliterate(force=True))

    async def play(self) -> None:
        for act in (self.add, self.read, self.use_jobs, self.use_schedulers):
            await act()
        for act in (self.use_limits, self.use_letters, self.look_after):
            await act()
        await get(self.queue.close())


VOLATILE = {"idempotency_key"}


def leaf(job_id: str) -> Flow:
    return Flow("leaf", job_id=job_id, on_failure="ignore")


def properties(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_") and isinstance(getattr(of, name), property)}


async def work(job: Job) -> Any:
    if job.name == "bad":
        raise PermanentError("no such address")
    return {"done": job.id}


async def finish_some(kit: Kit, name: str) -> None:
    """Completed and failed jobs, which only a worker makes."""
    queue = kit.queue(name)
    await queue.add("good", job_id="c1")
    await queue.add_many(
        [NewJob("bad", {"n": number, "tenantId": "acme"}, {"job_id": f"b{number}"}) for number in range(7)]
    )
    await kit.drain(work, 8, queue=name, dead_letters=True)
    await queue.close()


@pytest.mark.leaves_queue_broken
async def test_both_faces_answer_the_same_to_everything(kit: Kit) -> None:
    on_loop = Scenario(Queue(f"{kit.name}-loop", connection=kit.url), f"{kit.name}-loop")
    await finish_some(kit, on_loop.name)
    await on_loop.play()

    blocking = Scenario(sync.Queue(f"{kit.name}-thread", connection=kit.url), f"{kit.name}-thread")
    await finish_some(kit, blocking.name)
    await asyncio.to_thread(drive, blocking.play())  # where no loop runs

    for one, other in zip(on_loop.answers, blocking.answers, strict=True):
        assert one == other
    missing = {
        (face.__name__, name)
        for face in FACES
        for name in dir(face)
        if not name.startswith("_") and (face.__name__, name) not in blocking.used
    }
    assert {name for _, name in missing} <= NOT_PLAYED
