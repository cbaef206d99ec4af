"""A server that refuses for a while: no outcome is dropped, and nobody is told what passes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import sleep

import pytest

from bullpen.errors import ServerRefused
from bullpen.redis import Connection
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.socket import translate
from bullpen.testing import RedisServer, need
from tests.queue._kit import Gate, Kit, nothing, soon

FOR_A_WHILE = [
    "NOREPLICAS Not enough good replicas to write.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "LOADING the dataset in memory",
    "BUSY a script is running",
    "MASTERDOWN Link with MASTER is down",
    "ERR max number of clients reached",
    "ERR max number of clients + cluster connections reached",
]


def _slow_password() -> str:
    sleep(0.2)
    return "secret"


@pytest.fixture(params=["valkey", "redis-6.2"])
def any_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Redis 6.2 wraps what a command inside a script says; later ones pass it on."""
    need(request.param)
    with RedisServer.start(request.param) as server:
        yield server


@pytest.mark.requirement("W-6", "Q-65")
async def test_outcomes_wait_for_a_server_that_takes_no_writes_for_now(
    any_server: RedisServer, queue_name: str
) -> None:
    """A failover or a full disk lasts seconds; dropping finished work because of it would run it all again."""
    kit = Kit(any_server.url, queue_name, any_server.client())
    gate = Gate("done")
    queue = kit.queue()
    await queue.add_many([("mail", {})] * 5)
    told = await kit.work(gate, concurrency=5)
    await gate.reached(5)
    any_server.command("CONFIG", "SET", "min-replicas-to-write", "1")
    refused_before = _refusals(any_server)

    gate.open()
    adding = asyncio.ensure_future(queue.add("mail"))
    await kit.until(lambda: _refusals(any_server) > refused_before + 3, "calls are refused and repeated")
    any_server.command("CONFIG", "SET", "min-replicas-to-write", "0")
    await soon(adding)
    await told.finished(6)

    assert told.of("error") == told.of("lock_lost") == []
    assert kit.fields("1")["ats"] == "1"
    await kit.close()


@pytest.mark.parametrize("password", [None, _slow_password], ids=["no password", "a password that takes time"])
async def test_a_worker_that_starts_waits_for_room(
    any_server: RedisServer, queue_name: str, password: Callable[[], str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with all the clients it may have says so before it is asked, and hangs up. Others go again."""
    client = any_server.client()
    kit = Kit(any_server.url, queue_name, client)
    kit.seed("1")
    if password is not None:
        client.config_set("requirepass", "secret")
    client.config_set("maxclients", 1)

    told = await soon(kit.work(nothing, connection=Connection(any_server.url, password=password)))
    await kit.until(lambda: "reconnecting until it works" in caplog.text, "it is told that nothing is done")
    client.config_set("maxclients", 1_000)

    await told.finished(1)
    assert told.of("error") == []
    assert "max number of clients" in caplog.text
    assert "data_received" not in caplog.text
    client.config_set("requirepass", "")
    await kit.close()


def _refusals(server: RedisServer) -> int:
    stats = server.command("INFO", "errorstats")
    return sum(int(found["count"]) for found in stats.values())


@pytest.mark.parametrize("text", FOR_A_WHILE)
def test_passing_refusals_are_recognised_on_every_server(text: str) -> None:
    """They mean "not now", and nothing was written: the call is repeated."""
    wrapped = f"ERR Error running script (call to f_0a): @user_script:12: @user_script: 12: -{text}"

    assert isinstance(translate(RuntimeError(text)), ServerUnavailable)
    assert isinstance(translate(RuntimeError(wrapped)), ServerUnavailable)


def test_other_refusals_are_not_repeated() -> None:
    """A script that is wrong stays wrong."""
    wrapped = "ERR Error running script (call to f_0a): @user_script:3: user_script:3: attempt to index a nil value"

    assert type(translate(RuntimeError(wrapped))) is ServerRefused
    assert type(translate(RuntimeError("WRONGTYPE Operation against a key"))) is ServerRefused


@pytest.mark.requirement("X-128")
async def test_one_job_that_the_server_refuses_to_settle_harms_no_other(kit: Kit) -> None:
    """Outcomes travel together; one that the script cannot write is told and dropped, the others are written."""
    gate = Gate()
    queue = kit.queue()
    await queue.add_many([("mail", {"number": number}) for number in range(10)])
    told = await kit.work(gate, concurrency=10)
    await gate.reached(10)
    kit.redis.delete(kit.base + "4")
    kit.redis.set(kit.base + "4", "not a job any more")

    gate.open()
    await told.finished(9)
    await told.worker.close()

    assert sorted(told.ids("completed"), key=int) == ["1", "2", "3", "5", "6", "7", "8", "9", "10"]
    kit.redis.delete(kit.base + "4", kit.base + "4:lock")
    kit.redis.lrem(kit.base + "active", 0, "4")
    await kit.drain(nothing, 0)


@pytest.mark.requirement("W-6")
async def test_outcomes_wait_for_a_server_that_does_not_let_us_in(any_server: RedisServer, queue_name: str) -> None:
    """A password that is changed on one side first: an operator mends that in minutes, and no finished work is lost."""
    kit = Kit(any_server.url, queue_name, any_server.client())
    gate = Gate("done")
    await kit.queue().add_many([("mail", {})] * 3)
    told = await kit.work(gate, concurrency=3)
    await gate.reached(3)
    any_server.command("CONFIG", "SET", "requirepass", "changed")
    any_server.command("CLIENT", "KILL", "TYPE", "normal")
    refused_before = _refusals(any_server)

    gate.open()
    await kit.until(lambda: _refusals(any_server) > refused_before + 3, "we are not let in")
    any_server.command("CONFIG", "SET", "requirepass", "")
    await told.finished(3)

    assert told.of("lock_lost") == []
    assert [kit.fields(job_id)["ats"] for job_id in ("1", "2", "3")] == ["1"] * 3
    await kit.close()
