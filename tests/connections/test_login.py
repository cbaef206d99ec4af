"""Users, passwords, databases, sockets and names, on the first connection and on every later one."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from bullpen import sync
from bullpen.errors import ConnectionLost, InvalidOption, ServerRefused
from bullpen.queue import Queue, QueueEvents
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.queue._kit import PATIENCE_S, Gate, echo, nothing, soon

PASSWORD = "p@ss:w/rd%20#?ü&+"


async def round_trip(connection: str | Connection) -> Any:
    """Add a job, work on it, wait for its result by events: all connections that there are."""
    async with Queue("mail", connection=connection) as queue, Worker("mail", echo, connection=connection):
        return await (await queue.add("welcome", {"to": "ada"})).result(timeout=10_000)


def clients(server: RedisServer) -> list[dict[str, str]]:
    listed: Any = server.client().client_list()
    return list(listed)


async def named(server: RedisServer, *names: str) -> None:
    """Wait until connections with these names are there."""
    async with asyncio.timeout(PATIENCE_S):
        while not {client["name"] for client in clients(server)} >= set(names):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


@pytest.fixture
def guarded(start_server: StartServer) -> RedisServer:
    """A server with a user `ada`. Nobody else may log in any more; the connection of this object is in already."""
    server = start_server()
    server.command("ACL", "SETUSER", "ada", "on", f">{PASSWORD}", "~*", "+@all")
    server.command("ACL", "SETUSER", "default", "off")
    return server


@pytest.mark.requirement("W-71")
async def test_a_user_with_a_password_of_special_characters_works(guarded: RedisServer) -> None:
    """In a URL, percent-encoded; by keyword, as it is. Also the thread that renews locks logs in."""
    by_url = f"redis://ada:{quote(PASSWORD, safe='')}@127.0.0.1:{guarded.port}"
    by_keyword = Connection(host="127.0.0.1", port=guarded.port, username="ada", password=PASSWORD)

    assert await round_trip(by_url) == await round_trip(by_keyword) == {"to": "ada"}
    await by_keyword.aclose()

    assert {client["user"] for client in clients(guarded)} == {"ada", "default"}


@pytest.mark.requirement("W-71")
async def test_a_wrong_password_is_told_at_once(guarded: RedisServer) -> None:
    """Waiting does not make it right; a producer must not hang for its whole deadline."""
    url = f"redis://ada:wrong@127.0.0.1:{guarded.port}"
    worker = Worker("mail", nothing, connection=url)

    with pytest.raises(ServerRefused, match="WRONGPASS"):
        await soon(worker.start())
    await worker.close()
    async with Queue("mail", connection=url) as queue:
        with pytest.raises(ServerRefused, match="WRONGPASS"):
            await soon(queue.add("welcome"))


@pytest.mark.requirement("W-71")
async def test_a_password_without_a_user_is_the_servers_own(start_server: StartServer) -> None:
    server = start_server(args=("--requirepass", "open sesame"))

    assert await round_trip(f"redis://:open%20sesame@127.0.0.1:{server.port}") == {"to": "ada"}


@pytest.mark.requirement("W-71")
async def test_outcomes_outlive_a_password_that_is_changed_under_a_worker(guarded: RedisServer) -> None:
    """Passwords are rotated: until the old one works again, finished work waits instead of being dropped."""
    url = f"redis://ada:{quote(PASSWORD, safe='')}@127.0.0.1:{guarded.port}"
    gate = Gate("done")
    async with Queue("mail", connection=url) as queue, Worker("mail", gate, connection=url) as worker:
        completed = asyncio.Event()
        worker.on("completed", lambda *_: completed.set())
        job = await queue.add("welcome")
        await gate.reached()
        guarded.command("ACL", "SETUSER", "ada", "resetpass", ">another")
        guarded.command("CLIENT", "KILL", "USER", "ada")
        refused = int(guarded.command("INFO", "stats")["acl_access_denied_auth"])

        gate.open()
        async with asyncio.timeout(PATIENCE_S):
            while int(guarded.command("INFO", "stats")["acl_access_denied_auth"]) < refused + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        guarded.command("ACL", "SETUSER", "ada", "resetpass", f">{PASSWORD}")
        await soon(completed.wait())

        assert await job.result(timeout=10_000) == "done"
        assert job.attempts_started <= 1


@pytest.mark.requirement("W-20")
async def test_a_database_number_is_selected_on_every_connection(start_server: StartServer) -> None:
    server = start_server()

    assert await round_trip(f"{server.url}/5") == {"to": "ada"}

    databases = set(server.command("INFO", "keyspace"))
    assert databases == {"db5"}


async def test_a_unix_socket_works_for_all_connections(start_server: StartServer) -> None:
    server = start_server(port=False)

    assert await round_trip(server.unix_url) == {"to": "ada"}
    assert await round_trip(f"{server.unix_url}?db=3") == {"to": "ada"}


@pytest.mark.requirement("W-71")
async def test_user_database_and_name_are_given_again_after_a_cut(guarded: RedisServer) -> None:
    """A worker that comes back without its name is invisible; without its user it is locked out."""
    url = f"redis://ada:{quote(PASSWORD, safe='')}@127.0.0.1:{guarded.port}/2"
    gate = Gate("done")
    async with Queue("mail", connection=url) as queue, Worker("mail", gate, connection=url, name="w1"):
        await queue.add("welcome")
        await gate.reached()
        gate.open()
        for _ in range(3):
            guarded.command("CLIENT", "KILL", "USER", "ada")
            async with QueueEvents("mail", connection=url):
                await (await queue.add("welcome")).result(timeout=10_000)
                await named(guarded, "bull:bWFpbA==:w:w1", "bull:bWFpbA==:qe")
                databases = {client["db"] for client in clients(guarded) if client["name"] and client["user"] == "ada"}
                assert databases == {"2"}


async def test_queues_and_workers_may_share_one_connection_object(start_server: StartServer) -> None:
    """One place for the address; short commands of all queues travel over one wire."""
    server = start_server()
    connection = Connection(server.url)
    queues = [Queue(f"q{number}", connection=connection) for number in range(5)]

    await asyncio.gather(*(queue.add("welcome") for queue in queues))
    connected = len([client for client in clients(server) if client["cmd"] != "client|list"])
    for queue in queues[1:]:
        await queue.close()
    async with Worker("q0", echo, connection=connection), Worker("q1", echo, connection=connection):
        results = [await (await queues[0].add("again", number)).result(timeout=10_000) for number in range(3)]
    await queues[0].close()
    still_open = await connection.is_healthy()
    await connection.aclose()

    assert connected == 1
    assert results == [0, 1, 2]
    assert still_open


@pytest.mark.requirement("W-71")
async def test_a_password_is_rotated_while_a_worker_runs(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The function is asked at each connect; until it knows the new one, the log says why nothing works."""
    server = start_server()
    server.command("ACL", "SETUSER", "default", "resetpass", ">old")
    passwords = ["old"]
    connection = Connection(host="127.0.0.1", port=server.port, password=lambda: passwords[-1])
    async with Queue("mail", connection=connection) as queue, Worker("mail", echo, connection=connection):
        assert await (await queue.add("welcome", 1)).result(timeout=10_000) == 1
        server.command("ACL", "SETUSER", "default", "resetpass", ">new")
        server.command("CLIENT", "KILL", "TYPE", "normal")
        refused = int(server.command("INFO", "stats")["acl_access_denied_auth"])
        async with asyncio.timeout(PATIENCE_S):
            # Several connections are refused, each several times: the queue's, the worker's two, its thread's.
            while int(server.command("INFO", "stats")["acl_access_denied_auth"]) < refused + 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        lines = [record.getMessage() for record in caplog.records if "WRONGPASS" in record.getMessage()]
        assert len(lines) == 1, lines
        assert "WRONGPASS invalid username-password pair or user is disabled" in lines[0]
        passwords.append("new")

        assert await (await queue.add("welcome", 2, add_deadline=10_000)).result(timeout=10_000) == 2
    await connection.aclose()


@pytest.mark.requirement("W-71")
def test_a_blocking_queue_asks_for_its_password_too(start_server: StartServer) -> None:
    server = start_server()
    server.command("ACL", "SETUSER", "default", "resetpass", ">secret")
    asked: list[str] = []

    def password() -> str:
        asked.append("secret")
        return asked[-1]

    with sync.Queue("mail", connection=Connection(host="127.0.0.1", port=server.port, password=password)) as queue:
        queue.add("welcome")

    assert asked != []


@pytest.mark.requirement("W-71")
async def test_a_password_that_cannot_be_asked_for_is_a_server_that_is_away(start_server: StartServer) -> None:
    def password() -> str:
        raise OSError(f"the vault is sealed: password={PASSWORD}")

    connection = Connection(host="127.0.0.1", port=start_server().port, password=password)
    async with Queue("mail", connection=connection) as queue:
        with pytest.raises(ConnectionLost, match="OSError: the vault is sealed") as raised:
            await queue.add("welcome", add_deadline=1_000)
        with pytest.raises(ConnectionLost, match="OSError: the vault is sealed") as seen_by_reader:
            await queue.counts()
    with (
        sync.Queue("mail", connection=connection, add_deadline=1_000) as blocking,
        pytest.raises(ConnectionLost, match="OSError: the vault is sealed") as without_loop,
    ):
        blocking.add("welcome")
    await connection.aclose()

    for error in (raised, seen_by_reader, without_loop):
        shown = "".join(traceback.format_exception(error.value))
        assert PASSWORD not in shown, shown


@pytest.mark.requirement("W-71")
def test_the_login_of_sentinels_stands_in_keywords_too() -> None:
    """As in the URL; and only where there are sentinels."""
    url = "redis+sentinel://ada:a@s-1,s-2/payments"
    by_url = Connection(f"{url}?sentinel_username=watcher&sentinel_password=w").address
    by_keyword = Connection(url, sentinel_username="watcher", sentinel_password="w").address

    assert by_keyword == by_url
    with pytest.raises(InvalidOption, match="sentinel_username: expected redis\\+sentinel"):
        Connection("redis://localhost", sentinel_username="watcher", sentinel_password="w")
