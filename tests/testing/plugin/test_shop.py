"""Tests as a user writes them; run by pytest in processes of their own, with and without other plug-ins."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any

import pytest

from bullpen import Bullpen, ConnectionLost, OutcomeUnknown
from bullpen.sync import Queue
from bullpen.testing import AppTester, FaultProxy, RedisServer
from tests.testing.plugin import shop


@pytest.fixture(autouse=True)
def forgotten() -> None:
    for seen in (shop.sent, shop.charged, shop.charged_once, shop.started):
        seen.clear()


async def test_what_a_task_adds_is_seen_and_run(bullpen_app: AppTester) -> None:
    await shop.order.add(7, customer="bob")

    [job] = bullpen_app.assert_enqueued(shop.order, number=7)
    assert job.data == {"number": 7, "customer": "bob"}
    bullpen_app.assert_not_enqueued(shop.order, number=8)
    bullpen_app.assert_not_enqueued("emails")

    done = await bullpen_app.run_until_drained()

    assert [job.return_value for job in done.completed if job.name == "order"] == [7]
    assert done.failed == done.retrying == []
    assert shop.sent == ["bob"]
    bullpen_app.assert_enqueued("emails", "receipt", to="bob", count=1)
    assert shop.started == ["begin", "end"]


def test_each_test_begins_with_an_empty_server_also_one_without_a_loop(bullpen_app: AppTester) -> None:
    bullpen_app.assert_not_enqueued(shop.order)
    bullpen_app.assert_not_enqueued("emails")

    shop.order.add_sync(1)
    assert len(bullpen_app.run_until_drained_sync().completed) == 2
    shop.order.add_sync(2)
    assert len(bullpen_app.run_until_drained_sync().completed) == 2
    assert shop.sent == ["ada", "ada"]


def test_an_assertion_that_fails_shows_what_is_stored(bullpen_app: AppTester) -> None:
    shop.order.add_sync(1)

    with pytest.raises(
        AssertionError, match=r"expected a job\(s\) order of queue 'orders' with \{'number': 2\}, found 0"
    ):
        bullpen_app.assert_enqueued(shop.order, number=2)
    with pytest.raises(AssertionError, match=r"stored: order \{'number': 1\}"):
        bullpen_app.assert_not_enqueued(shop.order)
    with pytest.raises(AssertionError, match="expected 2 "):
        bullpen_app.assert_enqueued("orders", count=2)


def test_parameters_of_a_task_may_have_the_names_of_ours(bullpen_app: AppTester) -> None:
    shop.restock.add_sync("tea", count=5)

    bullpen_app.assert_enqueued(shop.restock, name="tea")
    bullpen_app.assert_not_enqueued(shop.restock, name="milk")
    bullpen_app.assert_enqueued(shop.restock, count=1, data={"count": 5})
    bullpen_app.assert_not_enqueued(shop.restock, count=6)
    with pytest.raises(AssertionError, match=r"expected a job\(s\) restock .* with \{'count': 6, 'name': 'tea'\}"):
        bullpen_app.assert_enqueued(shop.restock, name="tea", data={"count": 6})


async def test_jobs_that_no_handler_serves_are_told(bullpen_app: AppTester) -> None:
    await shop.order.options(attempts=1).add(-1)  # its dead letter waits for nobody
    await bullpen_app.app.queue("newsletters").add("june", {})
    await bullpen_app.app.queue("paused").add("later", {})
    await bullpen_app.app.queue("paused").pause()

    with pytest.raises(AssertionError, match=r"no handler of the app serves: newsletters: \{'waiting': 1\}"):
        await bullpen_app.run_until_drained()
    assert (await bullpen_app.run_until_drained(elsewhere=["newsletters"])).completed == []


async def test_time_passes_when_it_is_told_to(bullpen_app: AppTester) -> None:
    await shop.order.add(1)
    await bullpen_app.run_until_drained()
    assert shop.sent == ["ada"]

    assert bullpen_app.advance(timedelta(days=2, hours=23)) == 0
    await bullpen_app.run_until_drained()
    assert shop.sent == ["ada"]

    assert bullpen_app.advance(timedelta(hours=1, seconds=1)) == 1
    await bullpen_app.run_until_drained()
    assert shop.sent == ["ada", "reminder to ada"]


async def test_a_retry_waits_for_its_time_too(bullpen_app: AppTester) -> None:
    await shop.order.add(-1)

    first = await bullpen_app.run_until_drained()
    again = await bullpen_app.run_until_drained()
    bullpen_app.advance(60_000)
    last = await bullpen_app.run_until_drained()

    assert len(first.retrying) == 1
    assert again.retrying == again.failed == []
    assert [job.failed_reason for job in last.failed] == ["no such order"]


async def test_eager_adds_go_on_when_all_has_run(bullpen_app: AppTester) -> None:
    with bullpen_app.eager():
        job = await shop.order.add(3)
        assert shop.sent == ["ada"]
        assert await job.result(timeout=10_000) == 3
        shop.remind.add_sync("bob")
        assert shop.sent == ["ada", "reminder to bob"]
    await shop.order.add(4)
    assert shop.sent == ["ada", "reminder to bob"]


def test_eager_adds_work_without_a_loop(bullpen_app: AppTester) -> None:
    with bullpen_app.eager():
        shop.order.add_sync(3)
    assert shop.sent == ["ada"]


async def test_a_crash_runs_the_job_again_with_the_same_key(bullpen_app: AppTester) -> None:
    await shop.careless.add(5)

    with bullpen_app.crashing(shop.careless, times=2):
        done = await bullpen_app.run_until_drained()

    assert shop.charged == ["5", "5", "5"]
    assert [job.attempts_made for job in done.completed] == [1]
    with pytest.raises(AssertionError, match="1 of 1 crashes did not happen"), bullpen_app.crashing(shop.careless):
        await bullpen_app.run_until_drained()


async def test_a_handler_that_may_run_twice_is_proved(bullpen_app: AppTester) -> None:
    await bullpen_app.assert_idempotent(shop.careful, 5, effects=lambda: sorted(shop.charged_once))
    assert len(shop.charged_once) == 1

    with pytest.raises(AssertionError, match=r"(?s)'careless' is not idempotent.*one run:  \['5'\].*\['5', '5'\]"):
        await bullpen_app.assert_idempotent(shop.careless, 5, effects=lambda: list(shop.charged))


def test_the_proof_works_without_a_loop(bullpen_app: AppTester) -> None:
    async def effects() -> list[str]:
        return sorted(shop.charged_once)

    bullpen_app.assert_idempotent_sync(shop.careful, 5, effects=effects)
    with pytest.raises(AssertionError, match="could not be run twice: no such order"):
        bullpen_app.assert_idempotent_sync(shop.order.options(attempts=1), -1, effects=effects)


async def test_replies_can_be_lost_on_the_way(bullpen_app: AppTester, bullpen_faults: FaultProxy) -> None:
    bullpen_faults.lose_reply()
    await shop.order.add(1)
    bullpen_app.assert_enqueued(shop.order, count=1)
    assert bullpen_faults.counters.lost_replies == 1

    with bullpen_faults.outage(), pytest.raises((ConnectionLost, OutcomeUnknown)):
        await shop.order.options(add_deadline=200).add(2)


async def test_results_can_be_awaited_while_workers_run(bullpen_app: AppTester) -> None:
    async with bullpen_app.running():
        job = await shop.order.add(9)
        assert await job.result(timeout=30_000) == 9


async def test_a_drain_that_does_not_end_says_what_is_left(bullpen_app: AppTester) -> None:
    never = asyncio.Event()

    @bullpen_app.app.middleware(queues=["orders"])
    async def hang(job: Any) -> Any:
        await never.wait()
        yield

    try:
        await shop.order.add(1)
        with pytest.raises(AssertionError, match=r"not drained within 0\.2 s; orders: \{'active': 1\}"):
            await bullpen_app.run_until_drained(timeout=200)
    finally:
        bullpen_app.app.around._layers.pop()


def test_a_queue_without_an_app_is_not_in_the_project() -> None:
    assert "bullpen-pytest-" in os.environ["BULLPEN_DATA_DIR"]
    with Queue("elsewhere") as queue:
        queue.add("job")


def test_no_address_of_the_program_was_used(bullpen_app: AppTester, bullpen_server: RedisServer) -> None:
    assert isinstance(bullpen_app.app, Bullpen)
    assert bullpen_app.app.connection.address.port == bullpen_server.port  # type: ignore[union-attr]  # one server
