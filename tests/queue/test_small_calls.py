"""The small calls of a queue and of a job that BullMQ's other clients have: ranges, counts, logs, events, numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobNotFound, JobStateConflict, PayloadTooLarge
from bullpen.queue import Flow, Job, JobState, NewJob
from tests.queue._kit import Failing, Gate, Kit, nothing, soon

HOUR_MS = 3_600_000


def in_hours(count: float) -> datetime:
    return datetime.now(UTC) + timedelta(hours=count)


class TestReading:
    async def test_ids_are_read_without_their_jobs(self, kit: Kit) -> None:
        """Lists of states follow each other as given; nothing but ids is asked of the server."""
        queue = kit.queue()
        await queue.add_many([NewJob("mail", None, {"job_id": f"w{n}"}) for n in range(3)])
        await queue.add_many([NewJob("mail", None, {"job_id": f"d{n}", "delay": HOUR_MS + n}) for n in range(3)])
        kit.reset_statistics()

        both = (JobState.DELAYED, JobState.WAITING)
        assert await queue.job_ids(both) == ["d0", "d1", "d2", "w0", "w1", "w2"]
        assert await queue.job_ids(both, start=2, count=2) == ["d2", "w0"]
        assert await queue.job_ids(JobState.WAITING, newest_first=True, count=2) == ["w2", "w1"]
        assert await queue.job_ids(JobState.WAITING, start=9) == []
        assert "cmdstat_hgetall" not in kit.redis.info("commandstats")
        with pytest.raises(InvalidOption, match="count"):
            await queue.job_ids(count=0)

    async def test_delayed_jobs_are_counted_up_to_an_instant(self, kit: Kit) -> None:
        queue = kit.queue()
        for hours in (1, 2, 3):
            await queue.add("mail", delay=timedelta(hours=hours))

        assert await queue.count_delayed() == 3
        assert await queue.count_delayed(before=in_hours(2.5)) == 2
        assert await queue.count_delayed(before=in_hours(0.5)) == 0
        with pytest.raises(InvalidOption, match="before"):
            await queue.count_delayed(before=datetime(2030, 1, 1))  # noqa: DTZ001 - that is the point

    async def test_the_instant_itself_does_not_count(self, kit: Kit) -> None:
        queue, at = kit.queue(), datetime(2100, 1, 1, tzinfo=UTC)
        await queue.add("mail", at=at)

        assert await queue.count_delayed(before=at) == 0
        assert await queue.count_delayed(before=at + timedelta(milliseconds=1)) == 1

    async def test_a_queue_is_maxed_when_as_many_run_as_may(self, kit: Kit) -> None:
        queue, gate = kit.queue(), Gate()
        await queue.add("mail")
        await kit.work(gate, concurrency=5)
        await gate.reached()

        assert not await queue.is_maxed()
        await queue.set_global_concurrency(2)
        assert not await queue.is_maxed()
        await queue.set_global_concurrency(1)
        assert await queue.is_maxed()
        gate.open()

    async def test_readers_of_events_are_listed(self, kit: Kit) -> None:
        """Workers are not, and readers are no workers."""
        queue = kit.queue()
        await kit.work(Gate())
        reader = await kit.reader()

        listeners, workers = await queue.listeners(), await queue.workers()
        assert listeners is not None and workers is not None
        assert (len(listeners), len(workers)) == (1, 1)
        assert listeners[0].address != workers[0].address
        reader.close()

    async def test_jobs_are_found_by_the_keys_of_children(self, kit: Kit) -> None:
        """Also in other queues; one that is gone is left out."""
        queue, other = kit.queue(), kit.queue(f"{kit.name}-other")
        tree = await queue.add_flow(
            Flow(
                "sum",
                children=[
                    Flow("here", job_id="a", on_failure="wait"),
                    Flow("there", job_id="b", queue=other, on_failure="wait"),
                ],
            )
        )
        page = await queue.children_page(tree.job, "pending")

        found = await queue.jobs_at([*page.children, f"bull:{kit.name}:gone"])

        assert sorted((job.queue_name, job.name) for job in found) == [(kit.name, "here"), (other.name, "there")]
        assert [await job.state() for job in found] == [JobState.WAITING] * 2
        await queue.remove(tree.job)


class TestLogs:
    async def test_a_range_of_lines_is_read_from_either_end(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("mail")
        for number in range(5):
            await job.log(f"line {number}")

        assert await job.logs(start=1, count=2) == ["line 1", "line 2"]
        assert await job.logs(start=3) == ["line 3", "line 4"]
        assert await job.logs(newest_first=True, count=2) == ["line 4", "line 3"]
        assert await job.logs(newest_first=True, start=3) == ["line 1", "line 0"]
        assert await job.logs(newest_first=True, start=3, count=9) == ["line 1", "line 0"]
        assert await job.logs(start=9) == []
        page = await queue.logs(job, start=4, count=9)
        assert (page.lines, page.total) == (("line 4",), 5)
        assert (await queue.logs("none")).total == 0
        with pytest.raises(InvalidOption, match="start"):
            await job.logs(start=-1)

    async def test_lines_are_cleared_but_the_newest(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("mail")
        for number in range(4):
            await queue.add_log(job, f"line {number}")

        await job.clear_logs(keep=2)
        assert await job.logs() == ["line 2", "line 3"]
        await queue.clear_logs(job.id, keep=1)
        assert await job.logs() == ["line 3"]
        await queue.clear_logs(job)
        assert await job.logs() == []
        assert not kit.redis.exists(f"{kit.base}{job.id}:logs")
        with pytest.raises(InvalidOption, match="keep"):
            await job.clear_logs(keep=-1)

    async def test_a_line_is_added_by_the_id_of_a_job(self, kit: Kit) -> None:
        """With the bound of the job itself, unless another one is given."""
        queue = kit.queue()
        job = await queue.add("mail", keep_logs=2)

        assert [await queue.add_log(job.id, text) for text in "abc"] == [1, 2, 2]
        assert await queue.add_log(job.id, "d", keep=1) == 1
        assert await job.logs() == ["d"]
        with pytest.raises(JobNotFound):
            await queue.add_log("none", "x")

    async def test_progress_is_reported_by_the_id_of_a_job(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("mail")

        await queue.update_progress(job.id, {"done": 3})

        stored = await queue.get_job(job.id)
        assert stored is not None and stored.reported_progress == {"done": 3}
        with pytest.raises(JobNotFound):
            await queue.update_progress("none", 5)
        with pytest.raises(InvalidOption, match="progress"):
            await queue.update_progress(job.id, 101)


class TestOneJob:
    """What the queue does to a job by its id, the job does too."""

    async def test_a_job_is_promoted_and_delayed(self, kit: Kit) -> None:
        queue = kit.queue()
        job = await queue.add("mail", delay=HOUR_MS)

        await job.change_delay(timedelta(hours=2))
        assert await queue.count_delayed(before=in_hours(1.5)) == 0
        await job.promote()
        assert await job.state() is JobState.WAITING
        with pytest.raises(JobStateConflict, match="is not delayed"):
            await job.promote()
        with pytest.raises(JobStateConflict, match="is not delayed"):
            await job.change_delay(5)

    async def test_a_job_gets_another_priority(self, kit: Kit) -> None:
        job = await kit.queue().add("mail")

        await job.change_priority(5)
        assert await job.state() is JobState.PRIORITIZED
        await job.change_priority(urgency=1, lifo=True)
        assert kit.fields(job.id)["priority"] == "2097151"

    async def test_a_failed_job_is_retried(self, kit: Kit) -> None:
        job = await kit.queue(attempts=1).add("mail")
        await kit.drain(Failing(ValueError("no")), 1)

        with pytest.raises(JobStateConflict, match="is not completed"):
            await job.retry(state=JobState.COMPLETED)
        await job.retry(reset_attempts=True)
        assert await job.state() is JobState.WAITING
        assert kit.fields(job.id).get("atm", "0") == "0"

    async def test_a_job_is_removed_with_its_children(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(Flow("sum", children=[Flow("part", job_id="child", on_failure="wait")]))

        assert await tree.job.remove()
        assert not await tree.job.remove()
        assert await queue.get_job("child") is None

    async def test_only_the_job_itself_is_removed(self, kit: Kit) -> None:
        queue = kit.queue()
        tree = await queue.add_flow(Flow("sum", children=[Flow("part", job_id="child", on_failure="wait")]))

        assert await tree.job.remove(children=False)
        assert await queue.get_job("child") is not None

    async def test_a_handler_cannot_remove_its_own_job(self, kit: Kit) -> None:
        async def handle(job: Job) -> str:
            with pytest.raises(JobStateConflict, match="is running"):
                await job.remove()
            return "done"

        await kit.queue().add("mail")

        told = await kit.drain(handle, 1)

        assert told.of("completed")[0][1] == "done"


class TestManyJobs:
    async def test_at_most_so_many_are_promoted_those_due_first(self, kit: Kit) -> None:
        queue = kit.queue()
        for number in range(5):
            await queue.add("mail", job_id=f"d{number}", delay=HOUR_MS + number)

        assert await queue.promote_all(count=2) == 2
        assert await queue.job_ids(JobState.WAITING) == ["d0", "d1"]
        assert await queue.promote_all(count=99) == 3
        assert await queue.promote_all(count=1) == 0
        with pytest.raises(InvalidOption, match="count"):
            await queue.promote_all(count=0)

    async def test_a_bound_above_one_step_is_kept(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add_many([NewJob("mail", None, {"delay": HOUR_MS}) for _ in range(1_200)])

        assert await queue.promote_all(count=1_100) == 1_100
        assert (await queue.counts()).delayed == 100

    async def test_a_queue_is_obliterated_in_steps_of_the_given_size(self, kit: Kit) -> None:
        queue = kit.queue()
        await queue.add_many([("mail", number) for number in range(10)])
        kit.reset_statistics()

        assert await queue.obliterate(count=3) == 10

        assert kit.script_calls() >= 4
        assert not list(kit.redis.scan_iter(f"{kit.base}*"))
        with pytest.raises(InvalidOption, match="count"):
            await queue.obliterate(count=0)

    async def test_at_most_so_many_orphans_are_removed(self, kit: Kit) -> None:
        """Those that can be put back in line do not use up the limit."""
        queue = kit.queue()
        for number in range(3):
            await queue.add("mail", job_id=f"a{number}")
            kit.redis.lrem(f"{kit.base}wait", 0, f"a{number}")
        for number in range(4):
            kit.redis.hset(f"{kit.base}z{number}", mapping={"name": "x", "data": "{}", "finishedOn": "1"})

        assert await queue.remove_orphans(limit=3) == 3
        assert await queue.remove_orphans(limit=3) == 1
        assert await queue.remove_orphans(limit=2, restorable=True) == 2
        assert await queue.restore_orphans() == 1


class TestCustomEvents:
    async def test_an_event_of_ones_own_reaches_every_reader(self, kit: Kit) -> None:
        queue = kit.queue()
        reader = await kit.reader()

        entry_id = await queue.publish_event("invoice.sent", {"number": 7, "to": "ada", "lines": [1, 2]})

        event = await soon(anext(reader))
        assert (event.id, event.event, event.job_id) == (entry_id, "invoice.sent", None)
        assert event.data == {"number": "7", "to": "ada", "lines": "[1,2]"}

    async def test_the_stream_keeps_its_bound(self, kit: Kit) -> None:
        """By the queue's own bound: Node's producer cuts the whole stream to a thousand unless told otherwise."""
        queue = kit.queue(events_max_len=100)
        await queue.add("mail")
        for number in range(500):
            await queue.publish_event("tick", {"n": number})
        assert 100 <= kit.redis.xlen(f"{kit.base}events") < 250

        await queue.publish_event("tick", max_len=1)
        assert kit.redis.xlen(f"{kit.base}events") < 150

    @pytest.mark.parametrize(
        ("event", "fields"),
        [("completed", {}), ("", {}), ("x" * 201, {}), ("tick", {"event": "x"}), ("tick", {"": 1}), (b"tick", {})],
    )
    async def test_what_would_fool_readers_is_refused(self, kit: Kit, event: Any, fields: dict[str, Any]) -> None:
        with pytest.raises(InvalidOption):
            await kit.queue().publish_event(event, fields)

    async def test_an_event_has_the_size_limit_of_a_job(self, kit: Kit) -> None:
        with pytest.raises(PayloadTooLarge):
            await kit.queue().publish_event("tick", {"text": "x" * (11 * 1024 * 1024)})


async def test_numbers_for_prometheus_have_the_names_of_node(kit: Kit) -> None:
    queue = kit.queue()
    await queue.add_many([("mail", 1), ("mail", 2)])
    await kit.drain(nothing, 2, metrics_minutes=10)
    await queue.add("mail", delay=HOUR_MS)

    text = await queue.prometheus_metrics({"region": 'eu"1\n'})

    lines = text.splitlines()
    assert f'bullmq_job_count{{queue="{kit.name}", state="delayed", region="eu\\"1\\n"}} 1' in lines
    assert lines[0] == "# HELP bullmq_job_count Number of jobs in the queue by state"
    assert f'bullmq_job_completed_total{{queue="{kit.name}", region="eu\\"1\\n"}} 2' in lines
    assert lines[-1].startswith(f'bullmq_job_failed_total{{queue="{kit.name}", region=')
