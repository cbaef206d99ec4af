"""Every store of dead letters keeps the same promises: a queue's own two, the outbox, and those of the transports.

Kafka's and RabbitMQ's run with their brokers, beside the suites of those transports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.errors import DeadLetterNotFound, InvalidOption, JobStateConflict
from bullpen.ledger import Ledger
from bullpen.outbox import OutboxDeadLetters
from bullpen.plugins.transports.bullmq import BullMQTransport
from bullpen.plugins.transports.memory import MemoryTransport
from bullpen.ports.dead_letters import DeadLetter, DeadLetterStore
from bullpen.queue import Job, Queue
from bullpen.queue.dead_letters.failed_set import FailedSetStore
from bullpen.queue.dead_letters.operations import DeadLetters
from bullpen.queue.dead_letters.store import dead_letter_store
from bullpen.testing import RedisServer
from bullpen.testing.contracts.dead_letters import DeadLetterContract, TransportLetters
from bullpen.worker import Worker
from bullpen.worker.options import WorkerArguments
from tests.databases import MakeLedger, item


class QueueLetters:
    """A worker whose handler fails each job at its first run and finishes it at the next."""

    redrives_once = True

    def __init__(self, queue: Queue, store: DeadLetterStore) -> None:
        self.queue, self.store = queue, store
        self._failed: asyncio.Queue[str] = asyncio.Queue()
        self._done: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def handle(self, job: Job) -> None:
        if job.attempts_started == 1:
            raise RuntimeError(f"no {job.data['number']}")
        assert job.attempts_made == 0
        self._done.put_nowait((job.id, job.data["number"]))

    def worker(self, *, dead_letters: bool, url: str) -> Worker:
        worker = Worker(self.queue.name, self.handle, connection=url, dead_letters=dead_letters)
        worker.on("failed", lambda job, *_: self._failed.put_nowait(job.id))
        return worker

    async def bury(self, number: int) -> None:
        # Two that fail in one millisecond have no order in a set, so the ids tell it.
        await self.queue.add("charge", {"number": number}, attempts=1, job_id=f"order:n:{number}")
        await asyncio.wait_for(self._failed.get(), 15)

    def number_of(self, letter: DeadLetter) -> int:
        return int(letter.data["number"])

    async def came_back(self) -> tuple[str, int]:
        return await asyncio.wait_for(self._done.get(), 15)

    async def nothing_comes(self) -> None:
        async with asyncio.timeout(15):
            while (await self.queue.counts()).active:  # noqa: ASYNC110 - the last one tells before it is settled
                await asyncio.sleep(0.01)
        assert ((await self.queue.counts()).pending, self._done.qsize()) == (0, 0)


@pytest.fixture
async def queue(redis_url: str, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, connection=redis_url) as opened:
        yield opened


class TestDeadLetterQueue(DeadLetterContract):
    @pytest.fixture
    async def letters(self, queue: Queue, redis_url: str) -> AsyncIterator[QueueLetters]:
        harness = QueueLetters(queue, dead_letter_store(queue, DeadLetterPolicy(store="queue")))
        async with harness.worker(dead_letters=True, url=redis_url):
            yield harness

    async def test_work_that_failed_elsewhere_can_be_put_and_redriven(self, letters: QueueLetters) -> None:
        await _put_and_redrive(letters)


class TestFailedSet(DeadLetterContract):
    @pytest.fixture
    async def letters(self, queue: Queue, redis_url: str) -> AsyncIterator[QueueLetters]:
        harness = QueueLetters(queue, dead_letter_store(queue, DeadLetterPolicy(store="failed_set")))
        async with harness.worker(dead_letters=False, url=redis_url):
            yield harness

    async def test_work_that_failed_elsewhere_can_be_put_and_redriven(self, letters: QueueLetters) -> None:
        await _put_and_redrive(letters)

    @pytest.mark.requirement("X-5")
    async def test_who_redrove_it_is_noted(self, letters: QueueLetters, redis_server: RedisServer) -> None:
        await letters.bury(1)
        (letter,) = await letters.store.list()

        await letters.store.redrive(letter.id, by="ada")
        await letters.came_back()

        stored: Any = redis_server.client().hget(letters.queue.keys.job("order:n:1"), "bpredriven")
        notes = json.loads(stored)
        assert [(note["by"], note["entry"]) for note in notes] == [("ada", letter.id)]

    @pytest.mark.requirement("X-5")
    async def test_a_later_failure_is_not_touched_in_the_name_of_an_earlier_one(
        self, queue: Queue, redis_url: str
    ) -> None:
        """A console that shows yesterday's failure must not throw away today's."""
        failed: asyncio.Queue[str] = asyncio.Queue()

        async def handle(job: Job) -> None:
            raise RuntimeError("again")

        async with Worker(queue.name, handle, connection=redis_url) as worker:
            worker.on("failed", lambda job, *_: failed.put_nowait(job.id))
            await queue.add("charge", {}, attempts=1)
            await asyncio.wait_for(failed.get(), 15)
            (earlier,) = await queue.failed_set.list()
            await queue.failed_set.redrive(earlier.id)
            await asyncio.wait_for(failed.get(), 15)

        (later,) = await queue.failed_set.list()
        assert later.id != earlier.id and later.message_id == earlier.message_id
        with pytest.raises(DeadLetterNotFound):
            await queue.failed_set.redrive(earlier.id)
        assert not await queue.failed_set.discard(earlier.id)
        assert await queue.failed_set.get(earlier.id) is None
        assert await queue.failed_set.get(later.id) == later

    async def test_what_is_put_does_not_replace_a_job_that_still_runs(self, queue: Queue) -> None:
        await queue.add("charge", {"number": 1}, job_id="m-7")

        with pytest.raises(JobStateConflict, match="has not failed"):
            await queue.failed_set.put(DeadLetter(id="dl-m-7-1", source=queue.name, message_id="m-7", name="charge"))

        assert (await queue.counts()).waiting == 1

    async def test_data_that_is_no_json_can_be_looked_at(self, queue: Queue, redis_server: RedisServer) -> None:
        client = redis_server.client()
        for job_id, data in (("text", b"{'no json'"), ("bytes", b"\xff\xfe")):
            client.hset(queue.keys.job(job_id), mapping={"name": "odd", "data": data, "opts": "{}", "timestamp": 1})
            client.zadd(queue.keys.failed, {job_id: 1 if job_id == "text" else 2})

        letters = await queue.failed_set.list()

        assert [letter.data for letter in letters] == ["{'no json'", "//4="]
        for letter in letters:
            assert await queue.failed_set.discard(letter.id)


async def _put_and_redrive(letters: QueueLetters) -> None:
    letter = DeadLetter(
        id="dl-m-7-1",
        source=letters.queue.name,
        message_id="m-7",
        name="charge",
        data={"number": 7},
        error_message="no 7",
        error_stack="Traceback",
        failed_at="2026-01-02T03:04:05.006Z",
        attempts_made=1,
    )

    await letters.store.put(letter)
    await letters.store.put(letter)

    (stored,) = await letters.store.list()
    assert (stored.id, stored.message_id, stored.data) == (letter.id, "m-7", {"number": 7})
    assert (stored.error_message, stored.error_stack, stored.failed_at) == ("no 7", "Traceback", letter.failed_at)
    assert await letters.store.redrive(stored.id) == "m-7"
    assert await letters.came_back() == ("m-7", 7)
    assert await letters.store.depth() == 0


class OutboxLetters:
    """Rows that a dispatcher gives up, and rows that are claimed again."""

    redrives_once = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.store = OutboxDeadLetters(ledger.outbox)

    async def bury(self, number: int) -> None:
        await self._ledger.outbox.enqueue_many([item(number)])
        for row in await self._claimed():
            await self._ledger.outbox.dead_letter(row, f"no {number}", code="HTTP_400")

    def number_of(self, letter: DeadLetter) -> int:
        return int(letter.data["orderId"])

    async def came_back(self) -> tuple[str, int]:
        (row,) = await self._claimed()
        payload: Any = row.payload
        await self._ledger.outbox.mark_sent(row)
        return row.id, int(payload["orderId"])

    async def nothing_comes(self) -> None:
        assert await self._claimed() == []

    async def _claimed(self) -> list[Any]:
        return [row for row in await self._ledger.outbox.claim_due_batch("w") if not row.is_announcement]


class TestOutbox(DeadLetterContract):
    @pytest.fixture
    def letters(self, sqlite_url: str, make_ledger: MakeLedger) -> OutboxLetters:
        return OutboxLetters(make_ledger(sqlite_url))


class TestMemoryTransport(DeadLetterContract):
    @pytest.fixture
    async def letters(self) -> AsyncIterator[TransportLetters]:
        transport = MemoryTransport(dead_letters=DeadLetterPolicy(store="queue"))
        yield TransportLetters(transport, "q", await transport.deliveries("q", prefetch=1))
        await transport.aclose()


class TestBullMQTransport(DeadLetterContract):
    @pytest.fixture
    async def letters(self, redis_url: str, queue_name: str) -> AsyncIterator[TransportLetters]:
        letters, quick = DeadLetterPolicy(store="queue"), WorkerArguments(drain_delay=500)
        transport = BullMQTransport(redis_url, dead_letters=letters, worker_options=quick)
        yield TransportLetters(transport, queue_name, await transport.deliveries(queue_name, prefetch=1))
        await transport.aclose()


@pytest.mark.requirement("X-5")
async def test_the_policy_says_which_store_a_queue_has(queue: Queue) -> None:
    assert isinstance(dead_letter_store(queue, DeadLetterPolicy(store="queue")), DeadLetters)
    assert isinstance(dead_letter_store(queue, DeadLetterPolicy(store="failed_set")), FailedSetStore)
    for store in ("none", "row"):
        with pytest.raises(InvalidOption, match=r"dead_letters\.store"):
            dead_letter_store(queue, DeadLetterPolicy(store=store))
