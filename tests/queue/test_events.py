"""The event stream: exact fields, in order, bounded, and no event lost without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import EventsLost, InvalidOption, PermanentError
from bullpen.queue import Job, NewJob, Queue, QueueEvents
from bullpen.wire.events import QueueEvent
from tests.conftest import StartServer
from tests.queue._kit import Failing, Kit, echo, nothing, soon


async def take(reader: QueueEvents, count: int) -> list[QueueEvent]:
    return [await soon(anext(reader)) for _ in range(count)]


class TestFields:
    @pytest.mark.requirement("Q-53", "Q-54", "Q-58", "X-12")
    async def test_the_life_of_a_job_that_succeeds(self, kit: Kit) -> None:
        """Node's entries with our extra field, in the order things happened."""
        job = await kit.queue().add("a", {"n": 1})

        await kit.drain(echo, 1, name="w1")

        assert kit.events() == [
            {"event": "added", "jobId": job.id, "name": "a"},
            {"event": "waiting", "jobId": job.id},
            {"event": "active", "jobId": job.id, "prev": "waiting", "attemptsMade": "0", "workerId": "w1"},
            {"event": "completed", "jobId": job.id, "returnvalue": '{"n":1}', "prev": "active", "attemptsMade": "1"},
            {"event": "drained"},
        ]

    @pytest.mark.requirement("Q-53", "Q-58", "X-12")
    async def test_the_life_of_a_job_that_is_retried_and_fails(self, kit: Kit) -> None:
        """A retried attempt is `delayed` and `retry`; `failed` comes once, for the final failure."""
        job = await kit.queue().add("a", attempts=2, backoff=Backoff.fixed(1))

        await kit.drain(Failing(RuntimeError("one"), RuntimeError("two")), 1, name="w1")

        events = kit.events(job_id=job.id)
        due = events[3]["delay"]
        assert events[7].pop("stacktrace").endswith("RuntimeError: two")
        assert events == [
            {"event": "added", "jobId": job.id, "name": "a"},
            {"event": "waiting", "jobId": job.id},
            {"event": "active", "jobId": job.id, "prev": "waiting", "attemptsMade": "0", "workerId": "w1"},
            {"event": "delayed", "jobId": job.id, "delay": due},
            {"event": "retry", "jobId": job.id, "delay": "1", "attemptsMade": "1"},
            {"event": "waiting", "jobId": job.id, "prev": "delayed"},
            {"event": "active", "jobId": job.id, "prev": "waiting", "attemptsMade": "1", "workerId": "w1"},
            {"event": "failed", "jobId": job.id, "failedReason": "two", "prev": "active", "attemptsMade": "2"},
            {"event": "retries-exhausted", "jobId": job.id, "attemptsMade": "2"},
        ]

    @pytest.mark.requirement("Q-52")
    async def test_a_reader_gets_decoded_records(self, kit: Kit) -> None:
        """Values as values, numbers as numbers, and the time from the entry's own id."""
        reader = await kit.reader()
        before = kit.server_ms()
        queue = kit.queue()
        job = await queue.add("a", {"ü": [1]}, delay=1)
        await job.progress({"done": 3})
        await kit.drain(echo, 1)

        events = {event.event: event for event in await take(reader, 6)}

        assert [event.job_id for event in events.values()] == [job.id] * 6
        assert events["added"].data == {"name": "a"}
        assert events["delayed"].data["delay"] >= before
        assert events["progress"].data == {"data": {"done": 3}}
        assert events["completed"].data == {"returnvalue": {"ü": [1]}, "prev": "active"}
        assert (events["completed"].attempts_made, events["completed"].is_final) == (1, True)
        assert all(before <= event.timestamp <= kit.server_ms() for event in events.values())

    async def test_one_bad_entry_ends_no_reader(self, kit: Kit) -> None:
        """Custom events and broken values of others are passed on with less in them."""
        reader = await kit.reader()
        entries: list[dict[Any, Any]] = [
            {"event": "completed", "jobId": "1", "returnvalue": "{broken"},
            {"no": "event"},
            {"event": "custom", "payload": "5"},
            {"event": "delayed", "jobId": b"\xff", "delay": "soon"},
        ]
        for entry in entries:
            kit.redis.xadd(kit.base + "events", entry)

        events = await take(reader, 4)

        assert [event.event for event in events] == ["completed", "", "custom", "delayed"]
        assert events[0].data == {"returnvalue": "{broken"}
        assert events[2].data == {"payload": "5"}

    @pytest.mark.every_loop
    async def test_several_readers_see_everything(self, kit: Kit) -> None:
        """Readers do not share a position."""
        readers = [await kit.reader() for _ in range(3)]
        await kit.queue().add("a")

        seen = [[event.event for event in await take(reader, 2)] for reader in readers]

        assert seen == [["added", "waiting"]] * 3


class TestBounds:
    @pytest.mark.requirement("Q-55", "Q-56", "X-35")
    async def test_the_bound_of_the_queue_trims_the_stream(self, kit: Kit) -> None:
        """About so many: the server trims whole nodes of 100 entries."""
        queue = kit.queue(events_max_len=100)

        for _ in range(10):
            await queue.add_many(("n", n) for n in range(100))

        assert kit.redis.hget(kit.base + "meta", "opts.maxLenEvents") == b"100"
        assert kit.redis.xlen(kit.base + "events") <= 100 + 200 + 100

    @pytest.mark.requirement("Q-56", "X-35")
    async def test_the_bound_of_the_worker_sets_the_same_field(self, kit: Kit) -> None:
        """Whoever states it explicitly wins; all clients obey the one field."""
        await kit.queue().add_many(("n", n) for n in range(400))

        await kit.drain(nothing, 400, concurrency=20, events_max_len=60)

        assert kit.redis.hget(kit.base + "meta", "opts.maxLenEvents") == b"60"
        assert kit.redis.xlen(kit.base + "events") < 400

    @pytest.mark.requirement("Q-55", "X-35")
    async def test_without_an_option_what_is_set_stays(self, kit: Kit) -> None:
        """Ten thousand by default; a bound of Node's is kept."""
        await kit.queue("fresh").add("a")
        kit.redis.hset(kit.base + "meta", "opts.maxLenEvents", 123)
        await kit.queue().add("a")
        await kit.drain(nothing, 1)

        assert kit.redis.hget("bull:fresh:meta", "opts.maxLenEvents") == b"10000"
        assert kit.redis.hget(kit.base + "meta", "opts.maxLenEvents") == b"123"

    @pytest.mark.parametrize("bound", ["many", "-1", "nan", "1e400", "", "1e3"])
    async def test_a_bound_that_nobody_can_read_is_the_default(self, kit: Kit, bound: str) -> None:
        """Handed on as it is, it would make every add fail and swallow events."""
        kit.redis.hset(kit.base + "meta", "opts.maxLenEvents", bound)
        job = await kit.queue().add("a")
        await job.progress(5)

        await kit.drain(nothing, 1)

        assert kit.event_names(job.id) == ["added", "waiting", "progress", "active", "completed"]

    @pytest.mark.requirement("Q-56")
    async def test_the_bound_can_be_changed_later(self, kit: Kit) -> None:
        """An operator who sees memory grow should not need a deployment."""
        queue = kit.queue()
        await queue.add("a")

        await queue.set_events_max_len(5)

        assert kit.redis.hget(kit.base + "meta", "opts.maxLenEvents") == b"5"


class TestReading:
    @pytest.mark.many
    @pytest.mark.every_loop
    async def test_no_event_is_missed_between_ready_and_the_first_read(self, kit: Kit) -> None:
        """Node's listener is ready before it reads and missed hundreds in one run; here the position comes first."""
        queue = kit.queue()

        for number in range(1, 101):
            async with QueueEvents(kit.name, connection=kit.url) as reader:
                job = await queue.add("a")
                first = await soon(anext(reader))
            assert (first.event, first.job_id) == ("added", job.id), f"round {number}"

    async def test_a_reader_may_begin_in_the_past(self, kit: Kit) -> None:
        """`after` is an entry id: a monitor that was away goes on where it stopped."""
        await kit.queue().add_many([("a", None), ("b", None)])
        everything = await take(await kit.reader(after="0-0"), 4)

        rest = await take(await kit.reader(after=everything[1].id), 2)

        assert [(event.event, event.job_id) for event in everything] == [
            ("added", "1"),
            ("waiting", "1"),
            ("added", "2"),
            ("waiting", "2"),
        ]
        assert rest == everything[2:]

    async def test_more_than_a_page_is_read_in_order(self, kit: Kit) -> None:
        """A reader that fell behind catches up page by page."""
        await kit.queue().add_many(("n", n) for n in range(1_500))
        reader = await kit.reader(after="0-0")

        events = await take(reader, 3_000)

        assert sorted({event.id for event in events}, key=lambda text: tuple(map(int, text.split("-")))) == [
            event.id for event in events
        ]

    async def test_a_lost_connection_loses_no_event(self, kit: Kit) -> None:
        """The position is ours, so reading goes on after it."""
        queue = kit.queue()
        reader = await kit.reader()
        await queue.add("before")
        await take(reader, 2)
        waiting = asyncio.ensure_future(take(reader, 2))
        await kit.until(lambda: any("xread" in line for line in kit.clients()), "the reader blocks")

        kit.command("CLIENT", "KILL", "ID", next(line for line in kit.clients() if "xread" in line).split()[0][3:])
        await queue.add("after")

        assert [event.event for event in await waiting] == ["added", "waiting"]

    async def test_the_connection_is_named_as_nodes_are(self, kit: Kit) -> None:
        """`CLIENT LIST` shows who listens: prefix, base64 of the queue's name, `:qe`."""
        import base64

        await kit.reader()

        encoded = base64.b64encode(kit.name.encode()).decode()
        assert any(f"name=bull:{encoded}:qe " in line for line in kit.clients())

    async def test_close_ends_a_reader_that_waits(self, kit: Kit) -> None:
        """Leaving the block must not hang in a blocked read."""
        reader = await kit.reader()
        waiting = asyncio.ensure_future(anext(reader))
        await kit.until(lambda: any("xread" in line for line in kit.clients()), "the reader blocks")

        reader.close()
        await asyncio.wait([waiting], timeout=5)

        assert waiting.done()
        assert waiting.cancelled() or isinstance(waiting.exception(), StopAsyncIteration)


class TestGaps:
    async def test_events_trimmed_unread_are_reported_once(self, kit: Kit) -> None:
        """Silent loss is the worst kind; after the report the reader goes on with what is there."""
        queue = kit.queue()
        reader = await kit.reader()
        await queue.add("zeroth")
        await take(reader, 2)
        await queue.add("first")
        await queue.add("second")
        kit.redis.xtrim(kit.base + "events", maxlen=1, approximate=False)

        with pytest.raises(EventsLost, match=f"events of queue '{kit.name}' were trimmed before they were read"):
            await soon(anext(reader))
        rest = await take(reader, 1)
        await queue.add("third")

        assert [(event.event, event.job_id) for event in rest] == [("waiting", "3")]
        assert [event.event for event in await take(reader, 2)] == ["added", "waiting"]

    async def test_events_trimmed_after_they_were_read_are_no_loss(self, kit: Kit) -> None:
        """The stream is bounded; a reader that keeps up must never hear of it."""
        queue = kit.queue()
        reader = await kit.reader()
        for _ in range(5):
            await queue.add("a")
            await take(reader, 2)
            kit.redis.xtrim(kit.base + "events", maxlen=1, approximate=False)

        await queue.add("last")

        assert [event.event for event in await take(reader, 2)] == ["added", "waiting"]

    async def test_a_stream_that_was_deleted_is_a_loss(self, kit: Kit) -> None:
        """After FLUSHALL or an obliterate nobody knows what was in it."""
        queue = kit.queue()
        reader = await kit.reader()
        await queue.add("a")
        await take(reader, 2)
        await queue.add("b")
        kit.redis.delete(kit.base + "events")
        await queue.add("c")

        with pytest.raises(EventsLost):
            await soon(anext(reader))

        assert [event.event for event in await take(reader, 2)] == ["added", "waiting"]

    @pytest.mark.leaves_queue_broken
    async def test_a_stream_that_began_anew_in_the_same_millisecond_is_a_loss(self, kit: Kit) -> None:
        """Ids are times: there is an event with the id of the last one that was read, and it is another one."""
        stream = kit.base + "events"
        for number in (0, 1):
            kit.redis.xadd(stream, {"event": "waiting", "jobId": f"old-{number}"}, id=f"7-{number}")
        reader = await kit.reader(after="0-0")
        await take(reader, 2)
        kit.redis.delete(stream)
        for number in (0, 1, 2):
            kit.redis.xadd(stream, {"event": "waiting", "jobId": f"new-{number}"}, id=f"7-{number}")

        with pytest.raises(EventsLost):
            await soon(anext(reader))

        assert [event.job_id for event in await take(reader, 3)] == ["new-0", "new-1", "new-2"]

    async def test_a_server_that_counts_nothing_raises_a_suspicion(self, start_server: StartServer) -> None:
        """Redis 6.2 does not tell how many events there ever were: our last one being gone is all there is to see."""
        server = start_server("redis-6.2")
        async with Queue("old", connection=server.url) as queue, QueueEvents("old", connection=server.url) as reader:
            await queue.add("a")
            seen = await take(reader, 2)
            await queue.add("b")
            server.client().xtrim("bull:old:events", maxlen=1, approximate=False)

            with pytest.raises(EventsLost):
                await soon(anext(reader))
            rest = await take(reader, 1)

        assert [event.event for event in seen] == ["added", "waiting"]
        assert (rest[0].event, rest[0].job_id) == ("waiting", "2")

    async def test_a_fresh_queue_on_an_old_server_raises_no_suspicion(self, start_server: StartServer) -> None:
        """False alarms would train people to ignore the true ones."""
        server = start_server("redis-6.2")

        async def handle(job: Job) -> None:
            raise PermanentError("no")

        async with Queue("old", connection=server.url) as queue, QueueEvents("old", connection=server.url) as reader:
            for _ in range(20):
                await queue.add("a")
            events = await take(reader, 40)

        assert len(events) == 40


class TestCallbacks:
    """Functions instead of a loop over the events."""

    async def test_functions_are_called_in_the_order_of_the_events(self, kit: Kit) -> None:
        reader, seen = await kit.reader(), list[tuple[str, str | None]]()

        async def on_completed(event: QueueEvent) -> None:
            await asyncio.sleep(0)
            seen.append((event.event, event.job_id))

        reader.on("added", lambda event: seen.append((event.event, event.job_id)))
        reader.on("completed", on_completed)
        reader.on("completed:b", lambda event: reader.close())
        await kit.queue().add_many([NewJob("mail", None, {"job_id": job_id}) for job_id in "ab"])
        await kit.work(nothing)

        await soon(reader.run())

        assert seen == [("added", "a"), ("added", "b"), ("completed", "a"), ("completed", "b")]

    async def test_once_is_once_and_off_is_off(self, kit: Kit) -> None:
        reader, queue, seen = await kit.reader(), kit.queue(), list[str]()
        forgotten = reader.on("tick", lambda event: seen.append("forgotten"))
        reader.once("tick", lambda event: seen.append("once"))
        reader.on("tick", lambda event: seen.append("on"))
        reader.on("end", lambda event: reader.close())

        assert reader.off("tick", forgotten)
        assert not reader.off("tick", forgotten)
        for name in ("tick", "tick", "end"):
            await queue.publish_event(name)
        await soon(reader.run())

        assert seen == ["once", "on", "on"]

    async def test_what_a_function_raises_harms_nobody(self, kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
        reader, queue, seen = await kit.reader(), kit.queue(), list[str]()
        reader.on("tick", lambda event: 1 / 0)
        reader.on("tick", lambda event: seen.append(event.event))
        reader.on("end", lambda event: reader.close())

        for name in ("tick", "end"):
            await queue.publish_event(name)
        await soon(reader.run())

        assert seen == ["tick"]
        assert "callback for 'tick'" in caplog.text

    async def test_a_loss_is_told_and_reading_goes_on(self, kit: Kit) -> None:
        queue, told = kit.queue(), list[Any]()
        reader = await kit.reader(after="0-1")
        await queue.trim_events(0)
        reader.on("error", told.append)
        reader.on("tick", lambda event: told.append(event.event))
        reader.on("tick", lambda event: reader.close())

        await queue.publish_event("tick")
        await soon(reader.run())

        assert isinstance(told[0], EventsLost)
        assert told[1:] == ["tick"]

    async def test_a_wrong_name_is_refused(self, kit: Kit) -> None:
        reader = await kit.reader()
        with pytest.raises(InvalidOption, match="event"):
            reader.on("", print)
        with pytest.raises(InvalidOption, match="callback"):
            reader.on("tick", "print")  # type: ignore[type-var]
