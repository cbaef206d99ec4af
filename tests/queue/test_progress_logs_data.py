"""What a handler may do to its own job while it runs: report progress, log, change the payload."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobNotFound, NotJson, PayloadTooLarge
from bullpen.queue import Job
from tests.queue import _process_handlers
from tests.queue._kit import Kit, load


class TestProgress:
    @pytest.mark.requirement("Q-6", "Q-53", "X-12", "X-34")
    @pytest.mark.parametrize("value", [0, 40, 100, 99.5, {"step": "copy", "message": "half way"}, {}], ids=str)
    async def test_progress_is_stored_and_told(self, kit: Kit, value: Any) -> None:
        """In the hash for whoever looks, in the stream (under `data`, as Node) for whoever listens."""
        queue = kit.queue()
        job = await queue.add("a")

        await job.progress(value)

        assert load(kit.fields(job.id)["progress"]) == value
        event = kit.events()[-1]
        assert {**event, "data": load(event["data"])} == {"event": "progress", "jobId": job.id, "data": value}
        read = await queue.get_job(job.id)
        assert read is not None and read.reported_progress == value

    @pytest.mark.requirement("Q-6", "X-34")
    @pytest.mark.parametrize("value", [-1, 101, 100.5, None, math.nan, {1}, {"message": 5}], ids=str)
    async def test_what_is_no_progress_is_refused(self, kit: Kit, value: Any) -> None:
        """Numbers are 0 to 100, the message of an object is text; nothing is written otherwise."""
        job = await kit.queue().add("a")

        with pytest.raises(InvalidOption, match="progress"):
            await job.progress(value)

        assert "progress" not in kit.fields(job.id)
        assert kit.event_names(job.id) == ["added", "waiting"]

    @pytest.mark.requirement("X-34")
    @pytest.mark.parametrize("raw", ['"half"', "[1]", "null", "true", "1e3"])
    async def test_foreign_progress_is_read_as_it_is(self, kit: Kit, raw: str) -> None:
        """Node allows any JSON."""
        kit.seed("foreign", progress=raw)

        job = await kit.queue().get_job("foreign")

        assert job is not None and job.reported_progress == json.loads(raw)

    async def test_progress_reaches_a_retry(self, kit: Kit) -> None:
        """A handler may go on where the last attempt stopped."""
        kit.seed("resumed", progress='{"done": 7}')
        seen = []

        async def record(job: Job) -> None:
            seen.append(job.reported_progress)

        await kit.drain(record, 1)

        assert seen == [{"done": 7}]

    async def test_progress_of_a_job_that_is_gone_says_so(self, kit: Kit) -> None:
        """Writing anyway would leave a stub that Node runs as a nameless job."""
        job = await kit.queue().add("a")
        kit.redis.delete(kit.base + job.id, kit.base + "wait")

        with pytest.raises(JobNotFound, match=f"job '{job.id}' of queue '{kit.name}' does not exist"):
            await job.progress(5)

        assert not kit.has(job.id)

    async def test_progress_trims_the_stream(self, kit: Kit) -> None:
        """A job that reports a million times must not fill the server."""
        queue = kit.queue(events_max_len=50)
        job = await queue.add("a")

        for n in range(400):
            await job.progress(n % 100)

        assert kit.redis.xlen(kit.base + "events") < 300


class TestLogs:
    @pytest.mark.requirement("Q-63")
    async def test_lines_are_kept_in_order_up_to_the_jobs_bound(self, kit: Kit) -> None:
        """The oldest go first; the answer is how many are kept."""
        job = await kit.queue().add("a", keep_logs=3)

        lengths = [await job.log(f"line {n}") for n in range(5)]

        assert lengths == [1, 2, 3, 3, 3]
        assert await job.logs() == ["line 2", "line 3", "line 4"]

    @pytest.mark.requirement("Q-63")
    async def test_a_thousand_lines_are_kept_unless_told_otherwise(self, kit: Kit) -> None:
        """Also of a foreign job that sets no bound."""
        job = await kit.queue().add("a")
        kit.seed("foreign")
        foreign = await kit.queue().get_job("foreign")
        assert foreign is not None
        for job_id in (job.id, "foreign"):
            kit.redis.rpush(f"{kit.base}{job_id}:logs", *(f"old {n}" for n in range(1_000)))

        assert [await job.log("new"), await foreign.log("new")] == [1_000, 1_000]

        assert (await job.logs())[0] == "old 1"
        assert (await job.logs())[-1] == "new"

    async def test_a_bound_of_zero_keeps_no_line(self, kit: Kit) -> None:
        """Whoever asks for no logs must not fill memory with them."""
        job = await kit.queue().add("a", keep_logs=0)

        assert await job.log("line") == 0

        assert await job.logs() == []
        assert not kit.has(f"{job.id}:logs")

    @pytest.mark.parametrize("line", ["", "ünï ☃", "two\nlines", "nul \x00 byte", "lone \ud800 surrogate"], ids=repr)
    async def test_any_text_is_a_line(self, kit: Kit, line: str) -> None:
        """What a subprocess prints is not always UTF-8; a log line must never fail the job."""
        job = await kit.queue().add("a")

        await job.log(line)

        assert await job.logs() == [line.encode("utf-8", "backslashreplace").decode()]

    async def test_a_log_of_a_job_that_is_gone_says_so(self, kit: Kit) -> None:
        """And leaves no orphan behind."""
        job = await kit.queue().add("a")
        kit.redis.delete(kit.base + job.id, kit.base + "wait")

        with pytest.raises(JobNotFound):
            await job.log("line")

        assert not kit.has(f"{job.id}:logs")


class TestData:
    async def test_new_data_is_for_the_next_run(self, kit: Kit) -> None:
        """This object keeps what it was read with; the next attempt sees the change."""
        seen = []

        async def change(job: Job) -> None:
            seen.append(job.data)
            if len(seen) == 1:
                await job.update_data({"step": 2})
                assert job.data == {"step": 1}
                raise RuntimeError("again")

        await kit.queue().add("a", {"step": 1}, attempts=2, backoff={"type": "fixed", "delay": 1})
        await kit.drain(change, 1)

        assert seen == [{"step": 1}, {"step": 2}]

    async def test_data_is_checked_like_at_the_add(self, kit: Kit) -> None:
        """The limit and the JSON rules hold for the whole life of a job."""
        job = await kit.queue().add("a", {"v": 1})

        with pytest.raises(NotJson, match=r"data\.v"):
            await job.update_data({"v": math.nan})
        with pytest.raises(PayloadTooLarge):
            await job.update_data("x" * (11 * 1024 * 1024))
        await job.update_data(None)

        assert kit.fields(job.id)["data"] == "{}"

    async def test_data_of_a_job_that_is_gone_says_so(self, kit: Kit) -> None:
        """As progress: no stub is left behind."""
        job = await kit.queue().add("a")
        kit.redis.delete(kit.base + job.id, kit.base + "wait")

        with pytest.raises(JobNotFound):
            await job.update_data({"v": 2})

        assert not kit.has(job.id)


@pytest.mark.parametrize("processes", [False, True])
async def test_a_plain_function_has_its_job_without_awaiting(kit: Kit, processes: bool) -> None:
    """`job.sync` is a `bullpen.sync.Job`, in a thread and in a child process."""
    await kit.queue().add("work", {"n": 1}, job_id="own", deduplication="only")

    told = await kit.drain(_process_handlers.at_work, 1, processes=processes)

    assert told.of("completed")[0][1] == {
        "id": "own",
        "data": {"n": 1},
        "logs": ["one"],
        "state": "active",
        "freed": True,
        "left": False,
        "removed": 0,
    }
