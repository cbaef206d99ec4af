"""What a hostile client can do to the HTTP service: hold connections, send without end, read nothing, be many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullpen import sync
from bullpen.errors import InvalidOption
from bullpen.http.ops import OpsApp
from bullpen.http.serve import HttpLimits, HttpService
from bullpen.ops.health import Health
from bullpen.testing import free_port
from tests.flows._cli import child, cli_process

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


PATIENCE_S = 60.0  # on a busy machine


async def echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answers with the length of the body; `/large` with 32 MiB in one piece, `/stream` in many."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client is gone")
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
    body = b"x" * 33_554_432 if scope["path"] == "/large" else str(size).encode()
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(application: Any, **limits: int) -> AsyncIterator[HttpService]:
    service = HttpService(application, "127.0.0.1", 0, limits=HttpLimits(**limits))
    running = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        await service.close()
        await running


async def ask(port: int, sent: bytes) -> bytes:
    """All that is answered until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await reader.read()
            except ConnectionError:
                return b""
    finally:
        writer.close()


async def send(port: int, sent: bytes) -> None:
    """And hang up."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


def request(path: str = "/", *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "host: test", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: te",
        b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\nhalf",
        b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhal",
        b"GET / HTTP/1.1\r\nhost: test\r\n\r\nGET / HTTP/1.1\r\nho",
    ],
    ids=["nothing", "headers", "body", "chunk", "second request"],
)
async def test_requests_that_are_sent_half_are_closed(half: bytes) -> None:
    async with serving(echo, request_ms=300, connections=250) as service:
        opened = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(200)]
        for _, writer in opened:
            writer.write(half)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(reader.read() for reader, _ in opened), return_exceptions=True)
        assert status(await ask(service.port, request())) == 200
        for _, writer in opened:
            writer.close()


async def test_a_byte_now_and_then_buys_no_time() -> None:
    async with serving(echo, request_ms=400) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)

        async def drip() -> None:
            writer.write(b"GET / HTTP/1.1\r\n")
            while True:
                writer.write(b"a: b\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
        dripping.cancel()
        writer.close()


@pytest.mark.parametrize("path", ["/large", "/stream"])
async def test_an_answer_that_nobody_reads_is_given_up(path: str) -> None:
    async with serving(echo, request_ms=300, connections=1) as service:
        deaf = socket.create_connection(("127.0.0.1", service.port))
        deaf.sendall(request(path))
        # There is room for one connection: the next one is served when the deaf one is gone.
        assert status(await ask(service.port, request())) == 200
        deaf.close()


async def test_more_connections_than_allowed_wait_for_a_place() -> None:
    open_now, most, go_on = 0, 0, asyncio.Event()

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            go_on.set()
        await go_on.wait()
        await asyncio.sleep(0.02)
        open_now -= 1
        await echo(scope, receive, send)

    async with serving(application, connections=3) as service:
        answers = await asyncio.gather(*(ask(service.port, request()) for _ in range(20)))
    assert {status(answer) for answer in answers} == {200}
    assert most == 3


async def test_headers_and_bodies_have_limits() -> None:
    async with serving(echo, header_bytes=4_096, body_bytes=1_000) as service:
        port = service.port
        assert status(await ask(port, request("/", f"a: {'x' * 3_000}"))) == 200
        assert status(await ask(port, request("/", f"a: {'x' * 6_000}"))) in (400, 431)
        assert status(await ask(port, request("/", *[f"a{n}: b" for n in range(1_000)]))) in (400, 431)
        assert status(await ask(port, request(f"/{'x' * 6_000}"))) in (400, 431)

        fits = await ask(port, request("/", "content-length: 1000", body=b"x" * 1_000))
        told = await ask(port, request("/", "content-length: 1001", body=b"x" * 10))
        chunk = b"100\r\n" + b"x" * 256 + b"\r\n"
        untold = await ask(port, request("/", "transfer-encoding: chunked", body=chunk * 5 + b"0\r\n\r\n"))
        assert status(fits) == 200 and b"\r\n1000\r\n" in fits
        assert (status(told), status(untold)) == (413, 413)


async def test_a_request_with_two_lengths_is_refused() -> None:
    """A proxy that believes the other one would hand over the rest as a request of somebody else."""
    smuggled = b"0\r\n\r\nGET /other HTTP/1.1\r\n\r\n"
    both = ("transfer-encoding: chunked", f"content-length: {len(smuggled)}")
    async with serving(echo) as service:
        answer = await ask(service.port, request("/", *both, body=smuggled))

    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
async def test_without_descriptors_it_pauses_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(echo) as service:
        assert status(await ask(service.port, request())) == 200
        waiting = socket.socket()
        caplog.clear()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            waiting.setblocking(False)
            await asyncio.get_running_loop().sock_connect(waiting, ("127.0.0.1", service.port))
            await asyncio.sleep(1.2)  # longer than one pause: it fails again meanwhile
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        lines = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
        assert len(lines) == 1 and "connections cannot be accepted" in lines[0], lines[:3]
        waiting.sendall(request())
        async with asyncio.timeout(PATIENCE_S):
            assert (await asyncio.get_running_loop().sock_recv(waiting, 100)).startswith(b"HTTP/1.1 200")
        waiting.close()


async def test_tiny_chunks_hold_up_nobody_else_on_the_loop() -> None:
    """One read of 256 KiB holds 43,000 chunks of one byte: parsing them in one go took a second, for all workers. What
    is counted is how often others have their turn while a megabyte of them is read."""
    flood = request("/", "transfer-encoding: chunked", body=b"1\r\nx\r\n" * 170_000 + b"0\r\n\r\n")
    async with serving(echo) as service:
        sending = asyncio.create_task(ask(service.port, flood))
        turns = 0
        while not sending.done():
            await asyncio.sleep(0)
            turns += 1

        assert b"\r\n170000\r\n" in await sending
        assert turns > 100


async def test_a_large_body_arrives_whole_and_fast() -> None:
    body = b"x" * 10_000_000
    async with serving(echo, request_ms=10_000) as service:
        answer = await ask(service.port, request("/", f"content-length: {len(body)}", body=body))

    assert b"\r\n10000000\r\n" in answer


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
    ids=["garbage", "upgrade"],
)
async def test_many_bad_requests_write_one_line(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever can connect could fill the disk with the log otherwise."""
    async with serving(echo) as service:
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(sent)
            assert await reader.read(20)
            writer.close()

    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 1


async def test_health_and_metrics_are_found_out_once_a_second() -> None:
    asked = {"health": 0, "metrics": 0}
    health = Health()

    async def check() -> None:
        asked["health"] += 1
        await asyncio.sleep(0.05)

    async def metrics() -> list[Any]:
        asked["metrics"] += 1
        await asyncio.sleep(0.05)
        return []

    health.add("check", check)
    async with serving(OpsApp(health.report, metrics)) as service:
        for path in ("/readyz", "/metrics"):
            answers = await asyncio.gather(*(ask(service.port, request(path)) for _ in range(30)))
            assert {status(answer) for answer in answers} == {200}
        assert asked == {"health": 1, "metrics": 1}
        await asyncio.sleep(1.1)
        await ask(service.port, request("/metrics"))
        assert asked == {"health": 1, "metrics": 2}


async def test_a_failure_is_not_remembered_and_who_goes_away_takes_nobody_along() -> None:
    begun, go_on, calls = asyncio.Event(), asyncio.Event(), 0

    async def metrics() -> list[Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("away")
        begun.set()
        await go_on.wait()
        return []

    application = OpsApp(Health().report, metrics)
    scope = {"type": "http", "method": "GET", "path": "/metrics"}

    async def get() -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await application(scope, _nothing, send)
        return int(sent[0]["status"])

    with pytest.raises(OSError, match="away"):
        await get()
    first, second = asyncio.create_task(get()), asyncio.create_task(get())
    await begun.wait()
    first.cancel()
    go_on.set()
    assert await second == 200
    assert calls == 2


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
async def test_more_than_this_machine_needs_a_word(host: str) -> None:
    if host == "localhost":
        await HttpService(echo, host, 0).close()
        return
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with pytest.raises(InvalidOption, match="--http-public"):
        HttpService(echo, host, 0)
    await HttpService(echo, host, 0, public=True).close()


@pytest.mark.parametrize("command", [("run", "shop:app"), ("exporter",), ("serve", "shop:api")])
def test_the_commands_need_the_same_word(tmp_path: Path, redis_url: str, command: tuple[str, ...]) -> None:
    (tmp_path / "shop.py").write_text(
        "from bullpen import Bullpen\n"
        "app = Bullpen()\n"
        "@app.handler('mails')\n"
        "async def handle(job): ...\n"
        "async def api(scope, receive, send): ...\n"
    )
    with sync.Queue("mails", connection=redis_url) as queue:  # workers leave keys in a queue that nobody ever filled
        queue.add("tomorrow", delay=86_400_000)
    words, env = (*command, "--http", "0.0.0.0:0"), {"BULLPEN_REDIS_URL": redis_url}
    refused = cli_process(*words, cwd=tmp_path, env=env)
    assert refused.code != 0 and "--http-public" in refused.err
    if command[0] == "exporter":
        return  # as the others
    with child(*words, "--http-public", cwd=tmp_path, env=env) as allowed:
        allowed.wait_for("serving http on port")
        allowed.terminate()
        assert allowed.wait(30) == 0


def test_an_application_is_served_in_a_process_of_its_own(tmp_path: Path) -> None:
    """With its start and its end, and without workers: what a client does there is no concern of theirs."""
    (tmp_path / "shop.py").write_text(
        "import asyncio, os\n"
        "async def api(scope, receive, send):\n"
        "    if scope['type'] == 'lifespan':\n"
        "        await receive()\n"
        "        open('started', 'w').close()\n"
        "        await send({'type': 'lifespan.startup.complete'})\n"
        "        await receive()\n"
        "        open('stopped', 'w').close()\n"
        "        await send({'type': 'lifespan.shutdown.complete'})\n"
        "        return\n"
        "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
        "    await send({'type': 'http.response.body', 'body': str(os.getpid()).encode()})\n"
    )
    port = free_port()
    words = [sys.executable, "-m", "bullpen.cli", "serve", "shop:api", "--http", f"127.0.0.1:{port}"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("serving http on port" in line for line in process.stderr)
        answer = asyncio.run(ask(port, request()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert f"\r\n{process.pid}\r\n".encode() in answer
    assert (tmp_path / "started").exists() and (tmp_path / "stopped").exists()


@pytest.mark.parametrize("target", ["shop:nothing", "shop:number", "shop:app"])
def test_what_is_no_application_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "shop.py").write_text("from bullpen import Bullpen\napp = Bullpen()\nnumber = 1\n")
    words = [sys.executable, "-m", "bullpen.cli", "serve", target, "--http", "127.0.0.1:0"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode != 0 and "ASGI application" in found.stderr and "Traceback" not in found.stderr


_WORDS = [b"GET / HTTP/1.1", b"POST / HTTP/1.1", b"host: a", b"", b"content-length: 5", b"transfer-encoding: chunked"]


@pytest.mark.many
def test_whatever_is_sent_the_next_client_is_served() -> None:
    with asyncio.Runner() as runner:

        async def serve() -> tuple[HttpService, asyncio.Task[None]]:
            service = HttpService(OpsApp(Health().report, _no_metrics), "127.0.0.1", 0)
            return service, asyncio.create_task(service.run())

        service, running = runner.run(serve())

        @given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(_WORDS))))
        @settings(max_examples=60, deadline=None)
        def attempt(lines: list[bytes]) -> None:
            runner.run(send(service.port, b"\r\n".join(lines)))
            answer = runner.run(ask(service.port, request("/livez")))
            assert status(answer) == 200 and json.loads(answer.partition(b"\r\n\r\n")[2])["live"]

        attempt()

        async def end() -> None:
            await service.close()
            await running

        runner.run(end())


async def _no_metrics() -> list[Any]:
    return []
