"""An add beside a server that is away ends in time, and says whether anything can have been written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from bullpen import Bullpen, NewJob, sync
from bullpen.errors import ConnectionLost, InvalidOption, OutcomeUnknown
from bullpen.ops.tracing import install_tracing
from bullpen.testing import FaultProxy, RedisServer, free_port
from tests.queue._kit import Kit, nothing, soon


@contextmanager
def within(least_s: float, most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert least_s <= took_s < most_s, f"it took {took_s:.2f} s"


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(redis_server) as opened:
        yield opened


@pytest.fixture
def traced() -> Iterator[None]:
    stop = install_tracing(TracerProvider())
    yield
    stop()


def nobody() -> str:
    return f"redis://127.0.0.1:{free_port()}"


async def test_the_default_is_five_seconds_with_a_loop_and_without(kit: Kit) -> None:
    """A web process must not hang for a minute. It takes its time: what is tested is the default itself."""
    url = nobody()
    blocking = sync.Queue(kit.name, connection=url)

    with within(4, 8):
        answers = await soon(
            asyncio.gather(
                kit.queue(connection=url).add("mail"), asyncio.to_thread(blocking.add, "mail"), return_exceptions=True
            )
        )

    assert [type(answer) for answer in answers] == [ConnectionLost, ConnectionLost]
    assert all("nothing was written" in str(answer) for answer in answers)


@pytest.mark.parametrize("given", [300, timedelta(milliseconds=300)], ids=str)
async def test_a_server_that_says_nothing_at_all_is_left_at_the_deadline(
    kit: Kit, proxy: FaultProxy, given: Any
) -> None:
    """It takes the connection and does not greet: connecting alone would take longer."""
    with proxy.stalled(), within(0.25, 4), pytest.raises(ConnectionLost, match="nothing was written"):
        await soon(kit.queue(connection=proxy.url, add_deadline=given).add("mail"))


def test_a_blocking_add_leaves_it_at_the_deadline_too(proxy: FaultProxy, queue_name: str) -> None:
    with (
        proxy.stalled(),
        sync.Queue(queue_name, connection=proxy.url, add_deadline=300) as queue,
        within(0.25, 4),
        pytest.raises(ConnectionLost, match="nothing was written"),
    ):
        queue.add("mail")


async def test_a_call_may_have_a_deadline_of_its_own(kit: Kit) -> None:
    queue = kit.queue(connection=nobody())

    with within(0.15, 4), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add("mail", add_deadline=200)
    with within(0.15, 4), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add_many([("mail", 1), ("mail", 2)], add_deadline=200)


async def test_a_deadline_of_its_own_holds_behind_calls_that_wait_for_longer(kit: Kit) -> None:
    queue = kit.queue(connection=nobody(), add_deadline=2_000)
    patient = [asyncio.ensure_future(queue.add_many([("mail", number)])) for number in range(3)]
    await asyncio.sleep(0)

    with within(0.15, 1.9), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add("mail", add_deadline=200)

    await asyncio.gather(*patient, return_exceptions=True)


async def test_an_add_that_was_sent_and_not_answered_says_that_nobody_knows(kit: Kit, proxy: FaultProxy) -> None:
    queue = kit.queue(connection=proxy.url)
    await queue.add("first")

    with proxy.stalled(), within(0.25, 4), pytest.raises(OutcomeUnknown, match="the outcome is unknown"):
        await queue.add("mail", add_deadline=300)


def test_a_blocking_add_that_was_sent_and_not_answered_says_so_too(
    proxy: FaultProxy, redis_url: str, queue_name: str
) -> None:
    with sync.Queue(queue_name, connection=proxy.url) as queue:
        queue.add("first")
        with proxy.stalled(), within(0.25, 4), pytest.raises(OutcomeUnknown, match="the outcome is unknown"):
            queue.add("mail", add_deadline=300)


async def test_an_add_that_waits_behind_others_is_not_late_by_their_deadlines(kit: Kit) -> None:
    """What is added during an outage has waited since it was added, not since the call before it failed."""
    queue = kit.queue(connection=nobody(), add_deadline=1_800)
    first = asyncio.ensure_future(queue.add("mail"))
    await asyncio.sleep(0.9)

    with within(0.6, 2.7), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add("mail")

    await asyncio.gather(first, return_exceptions=True)


async def test_an_add_during_an_outage_succeeds_when_the_server_is_back_in_time(kit: Kit, proxy: FaultProxy) -> None:
    queue = kit.queue(connection=proxy.url)
    with proxy.outage():
        waiting = [asyncio.ensure_future(queue.add("mail", number)) for number in range(3)]
        await asyncio.sleep(0.2)

    jobs = await soon(asyncio.gather(*waiting))

    assert len({job.id for job in jobs}) == 3
    await kit.drain(nothing, 3)


async def test_a_task_may_have_one_and_so_may_one_run_of_it() -> None:
    async with Bullpen(nobody()) as app:

        @app.task("mails", add_deadline=200)
        async def send(number: int) -> None: ...

        with within(0.15, 4), pytest.raises(ConnectionLost, match="nothing was written"):
            await send.add(1)
        with within(0.35, 4), pytest.raises(ConnectionLost, match="nothing was written"):
            await send.options(add_deadline=400).add_many([{"number": 1}])


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "5"])
async def test_what_is_no_duration_is_refused(kit: Kit, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="add_deadline"):
        kit.queue(add_deadline=wrong)
    with pytest.raises(InvalidOption, match="add_deadline"):
        await kit.queue().add("mail", add_deadline=wrong)
    with pytest.raises(InvalidOption, match="add_deadline"):
        sync.Queue(kit.name, connection=kit.url).add("mail", add_deadline=wrong)


@pytest.mark.parametrize("options", [{}, {"add_deadline": 300}], ids=["of the queue", "of the call"])
async def test_an_unknown_outcome_names_the_job_whose_id_the_caller_gave(
    kit: Kit, proxy: FaultProxy, options: dict[str, Any]
) -> None:
    """Whoever catches it looks that job up: the id must stand in a field, also when many adds shared the call."""
    queue = kit.queue(connection=proxy.url, add_deadline=300)
    await queue.add("first", add_deadline=20_000)

    with proxy.stalled():
        errors = await soon(
            asyncio.gather(
                queue.add("mail", job_id="order-7", **options),
                queue.add("mail", job_id="order-8", **options),
                queue.add("mail", **options),
                return_exceptions=True,
            )
        )

    assert [type(error) for error in errors] == [OutcomeUnknown] * 3
    assert [(error.queue, error.job_id) for error in errors] == [
        *((kit.name, "order-7"), (kit.name, "order-8")),
        (kit.name, None),
    ]
    assert "'order-7'" in str(errors[0])
    assert "by its id" not in str(errors[2])


def test_an_unknown_outcome_of_a_blocking_add_names_it_too(proxy: FaultProxy, redis_url: str, queue_name: str) -> None:
    with sync.Queue(queue_name, connection=proxy.url, add_deadline=300) as queue:
        queue.add("first", add_deadline=20_000)
        with proxy.stalled(), pytest.raises(OutcomeUnknown, match="'order-7'") as one:
            queue.add("mail", job_id="order-7")
        queue.add("second", add_deadline=20_000)
        with proxy.stalled(), pytest.raises(OutcomeUnknown) as many:
            queue.add_many([NewJob("mail", options={"job_id": "order-8"})])

    assert (one.value.job_id, many.value.job_id) == ("order-7", "order-8")


async def test_the_deadline_of_a_call_holds_while_it_is_traced_too(kit: Kit, traced: None) -> None:
    queue = kit.queue(connection=nobody())

    with within(0.15, 4), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add("mail", add_deadline=200)
    with within(0.15, 4), pytest.raises(ConnectionLost, match="nothing was written"):
        await queue.add_many([("mail", 1)], add_deadline=200)


async def test_reads_end_with_the_deadline_too(kit: Kit, proxy: FaultProxy) -> None:
    """A page that lists jobs must not hang for a minute, whether nobody is there or somebody who says nothing."""
    away = kit.queue(connection=nobody(), add_deadline=300)
    with within(0, 4), pytest.raises(ConnectionLost):
        await away.counts()
    with within(0, 4), pytest.raises(ConnectionLost):
        await away.get_job("1")

    frozen = kit.queue(connection=proxy.url, add_deadline=300)
    await frozen.add("mail", add_deadline=20_000)
    with proxy.stalled(), within(0.25, 4), pytest.raises(ConnectionLost):
        await frozen.counts()


async def test_reads_of_a_queue_with_no_deadline_given_end_within_five_seconds(kit: Kit) -> None:
    """It takes its time: what is tested is the default itself."""
    url = nobody()
    blocking = sync.Queue(kit.name, connection=url)

    with within(4, 8):
        answers = await soon(
            asyncio.gather(
                *(kit.queue(connection=url).counts(), asyncio.to_thread(blocking.counts)), return_exceptions=True
            )
        )

    assert [type(answer) for answer in answers] == [ConnectionLost, ConnectionLost]


def test_a_blocking_read_that_is_not_answered_speaks_of_no_job(proxy: FaultProxy, queue_name: str) -> None:
    """Nothing was to be written: "look the job up before adding it again" would be nonsense."""
    with sync.Queue(queue_name, connection=proxy.url, add_deadline=300) as queue:
        queue.add("first", add_deadline=20_000)
        with proxy.stalled(), within(0.25, 4), pytest.raises(ConnectionLost, match=r"no answer within 0\.3 s"):
            queue.counts()


async def test_a_wait_for_a_result_outlives_an_outage_that_is_longer_than_the_deadline(
    kit: Kit, proxy: FaultProxy
) -> None:
    """It has a timeout of its own, and the job goes on meanwhile."""
    queue = kit.queue(connection=proxy.url, add_deadline=300)
    job = await queue.add("mail", add_deadline=20_000)
    with proxy.outage():
        waiting = asyncio.ensure_future(job.result(timeout=20_000))
        await asyncio.sleep(0.8)
        assert not waiting.done()

    await kit.drain(nothing, 1)

    assert await soon(waiting) is None
