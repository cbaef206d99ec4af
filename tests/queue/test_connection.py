"""What queues and workers do with a connection. Addresses, logins and TLS are the matter of `tests/connections`."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from bullpen.errors import InvalidOption
from bullpen.queue import Job
from bullpen.redis import Connection
from bullpen.testing import RedisServer, need
from tests.queue._kit import Kit, soon


async def test_many_queues_share_one_socket(kit: Kit) -> None:
    """A program with a hundred queues must not need a hundred connections to add jobs."""
    connection = Connection(kit.url)
    before = len(kit.clients())

    queues = [kit.queue(f"{kit.name}-{n}", connection=connection) for n in range(20)]
    await asyncio.gather(*(queue.add("a") for queue in queues))

    assert len(kit.clients()) == before + 1
    await connection.aclose()


async def test_a_worker_more_is_one_socket_more(kit: Kit) -> None:
    """Its blocked read. All else goes over two that the process has: one for commands, one for the keepalive."""
    connection = Connection(kit.url)
    queues = [kit.queue(f"{kit.name}-{n}", connection=connection) for n in range(20)]
    first = await kit.work(lambda job: None, queue=queues[0].name, connection=connection)
    await queues[0].add("a")
    await first.finished()
    before = len(kit.clients())

    others = [await kit.work(lambda job: None, queue=queue.name, connection=connection) for queue in queues[1:]]
    await asyncio.gather(*(queue.add("a") for queue in queues[1:]))
    await asyncio.gather(*(other.finished() for other in others))

    assert len(kit.clients()) == before + len(others)
    await asyncio.gather(first.worker.close(), *(other.worker.close() for other in others))
    assert await queues[0].counts()
    await connection.aclose()


async def test_a_worker_that_ends_leaves_the_socket_to_the_others(kit: Kit) -> None:
    """Of two workers on one connection the second goes on; behind the last one nothing is left."""
    connection, other = Connection(kit.url), f"{kit.name}-2"
    jobs = kit.queue(other)
    await jobs.add("a")
    ended = await kit.drain(lambda job: None, 1, queue=other)  # the keepalive's connection is there from here on
    await kit.until(lambda: all(ended.worker.name not in line for line in kit.clients()), "it has left")
    before = len(kit.clients())
    first = await kit.work(lambda job: None, connection=connection)
    second = await kit.work(lambda job: None, queue=other, connection=connection)

    await first.worker.close()
    await connection.aclose()  # whoever made it has no more use for it; the worker has
    await jobs.add("b")
    await second.finished()
    await second.worker.close()

    await kit.until(lambda: len(kit.clients()) == before, "both have left")


async def test_closing_a_queue_leaves_a_shared_connection_open(kit: Kit) -> None:
    """It belongs to whoever made it; the other queues go on."""
    connection = Connection(kit.url)
    first, second = kit.queue(connection=connection), kit.queue(f"{kit.name}-2", connection=connection)
    await first.add("a")

    await first.close()
    await second.add("b")

    assert kit.redis.llen(f"bull:{kit.name}-2:wait") == 1
    await connection.aclose()


async def test_closing_a_queue_closes_the_connection_that_it_made(kit: Kit) -> None:
    """A script that opens and closes queues in a loop must not run out of sockets."""
    before = len(kit.clients())

    for _ in range(5):
        async with kit.queue() as queue:
            await queue.add("a")

    await kit.until(lambda: len(kit.clients()) == before, "all are closed")


async def test_a_worker_leaves_no_connection_behind(kit: Kit) -> None:
    """One for its calls, one for the blocked read; both end with it. The keepalive's is the process's: one for all."""
    queue = kit.queue()
    await queue.add("a")
    before = len(kit.clients())

    for _ in range(5):
        await queue.add("a")
        await kit.drain(lambda job: None, 1)

    await kit.until(lambda: len(kit.clients()) <= before + 1, "none of the five has left one")


def test_without_a_connection_the_error_says_what_to_do() -> None:
    """`bullpen.queue` alone knows neither settings nor the embedded server; its user must name a server."""
    program = (
        "from bullpen.queue import Queue\nfrom bullpen.worker import Worker\n"
        "from bullpen.errors import NotConfigured\n"
        "for make in (lambda: Queue('q'), lambda: Worker('q', print), lambda: Queue('q', connection='embedded://')):\n"
        "    try:\n"
        "        make()\n"
        "    except NotConfigured as error:\n"
        "        print(error)\n"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("no connection given") == 3
    assert 'connection="redis://host:6379"' in ran.stdout


def test_a_wrong_url_is_refused_without_its_password() -> None:
    """Messages end up in logs."""
    with pytest.raises(InvalidOption) as refused:
        Connection("http://user:secret@host")

    assert "redis://host:port/db" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_everything_works_on_uvloop(redis_server: RedisServer, redis_url: str, queue_name: str) -> None:
    """Its transports are not asyncio's own classes; add, run, wait and close must not care."""
    uvloop = pytest.importorskip("uvloop")
    need("valkey")

    async def handle(job: Job) -> int:
        await job.progress(50)
        return int(job.data) * 2

    async def main() -> list[int]:
        kit = Kit(redis_url, queue_name, redis_server.client())
        jobs = await kit.queue().add_many(("n", n) for n in range(50))
        await kit.work(handle, concurrency=10)
        results = await soon(asyncio.gather(*(job.result() for job in jobs)))
        await kit.close()
        return list(results)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == [2 * n for n in range(50)]
