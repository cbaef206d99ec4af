"""An application whose work is on RabbitMQ asks for no Redis: not at its start, not for its health, not for alerts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bullpen.app import Bullpen
from bullpen.errors import NotConfigured
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.ports.channel import Message
from bullpen.queue import Job
from bullpen.settings import Settings
from bullpen.testing import free_port
from bullpen.testing.rabbitmq import RabbitServer
from tests.databases import item
from tests.flows._cli import cli
from tests.forks import WarmChild
from tests.messages.test_app import own_names, running
from tests.outbox.kit import SpyChannel, telling

ROOT = Path(__file__).parents[2]
APP = """
from bullpen import Bullpen

app = Bullpen()

@app.use_messages().channel("email", after_crash="same_key")
async def send(message):
    return "taken"

@app.handler("elsewhere")
async def handle(job): ...
"""


def environ(directory: Path, broker: str, name: str, **more: str) -> dict[str, str]:
    return {
        "BULLPEN_EMBEDDED": "never",
        "BULLPEN_DATABASE_URL": f"sqlite:///{directory / 'ledger.sqlite3'}",
        "BULLPEN_MESSAGES_TRANSPORT": "rabbitmq",
        "RABBITMQ_URL": broker,
        **own_names(name),
        **more,
    }


async def prepare(directory: Path) -> None:
    async with Ledger(f"sqlite:///{directory / 'ledger.sqlite3'}") as ledger:
        await ledger.migrate()


@pytest.mark.requirement("W-77")
async def test_bullpen_run_starts_and_is_ready_without_a_redis(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same module has a worker, which runs in another process: a process asks only for what it runs."""
    await prepare(tmp_path)
    with sending(tmp_path, rabbit, monkeypatch) as (child, port):
        checks = await asyncio.to_thread(until_answer, port, 200)
        child.terminate()
        assert await asyncio.to_thread(child.wait, 20) == 0
    with WarmChild.module("bullpen.cli", "run", "rabbit_shop:app", cwd=tmp_path) as refused:
        assert await asyncio.to_thread(refused.wait, 20) != 0

    assert set(checks) == {"ledger", "messages", "scheduler"}
    assert f"running messages on RabbitMQ amqp://***@127.0.0.1:{rabbit.url.rpartition(':')[2]}" in child.errors
    assert "no Redis address is configured" in refused.errors


@pytest.mark.requirement("W-77")
async def test_a_sender_whose_broker_dies_is_not_ready_until_it_is_back(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once frozen, so that its connections stay open and nothing answers; once gone, with all connections closed. The
    process itself goes on: a restart would mend nothing."""
    await prepare(tmp_path)
    with sending(tmp_path, rabbit, monkeypatch) as (child, port):
        await asyncio.to_thread(until_answer, port, 200)

        with rabbit.paused():
            frozen = await asyncio.to_thread(until_answer, port, 503)
            assert await asyncio.to_thread(status_of, port, "livez") == 200
        back = await asyncio.to_thread(until_answer, port, 200)

        await asyncio.to_thread(rabbit.control, "suspend_listeners")
        try:
            await asyncio.to_thread(rabbit.control, "close_all_connections", "--global", "gone")
            gone = await asyncio.to_thread(until_answer, port, 503)
            assert await asyncio.to_thread(status_of, port, "livez") == 200
        finally:
            await asyncio.to_thread(rabbit.control, "resume_listeners")
        back_again = await asyncio.to_thread(until_answer, port, 200)

        child.terminate()
        assert await asyncio.to_thread(child.wait, 20) == 0

    for checks in (frozen, gone):
        assert (checks["messages"] != "ok", checks["ledger"]) == (True, "ok")
    assert {*back.values()} == {*back_again.values()} == {"ok"}


@contextlib.contextmanager
def sending(directory: Path, rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WarmChild, int]]:
    """A process that only sends messages, and the port of its probes."""
    for name, value in environ(directory, rabbit.url, "no-redis").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{ROOT / 'src'}")
    monkeypatch.delenv("BULLPEN_REDIS_URL", raising=False)
    (directory / "rabbit_shop.py").write_text(APP)
    port = free_port()
    words = ("run", "rabbit_shop:app", "--only", "messages", "--http", f"127.0.0.1:{port}")
    with WarmChild.module("bullpen.cli", *words, cwd=directory) as child:
        yield child, port


def status_of(port: int, page: str) -> int:
    return _ask(port, page)[0]


def until_answer(port: int, status: int) -> dict[str, str]:
    """Wait until the probe for readiness answers so; returns its checks."""
    deadline = time.monotonic() + 40
    while True:
        try:
            found, body = _ask(port, "readyz")
            if found == status:
                checks: dict[str, str] = json.loads(body)["checks"]
                return checks
        except OSError:
            found = None
        assert time.monotonic() < deadline, f"/readyz answers {found} and not {status}"
        time.sleep(0.05)


def _ask(port: int, page: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read()


@pytest.mark.parametrize("embedded", ["never", "auto"])
async def test_alerts_and_dead_letters_look_at_what_is_there(tmp_path: Path, embedded: str) -> None:
    """And with the embedded server allowed, none is started that nobody uses."""
    await prepare(tmp_path)
    given = {
        "BULLPEN_DATA_DIR": str(tmp_path / "data"),
        "BULLPEN_ALERTS_WEBHOOK_URL": "http://127.0.0.1:9/",
        "BULLPEN_EMBEDDED": embedded,
        "BULLPEN_MESSAGES_TRANSPORT": "memory",
    }
    settings = Settings.load(environ={**environ(tmp_path, "amqp://x", "no-redis"), **given}, start=tmp_path)
    async with Bullpen(settings=settings) as app:

        @app.use_messages().channel("email", after_crash="same_key")
        async def send(message: Message) -> str:
            return "taken"

        await app.ledger.outbox.enqueue(item())
        (row,) = await app.ledger.outbox.claim_due_batch("me")
        await app.ledger.outbox.dead_letter(row, "no")

        verdict = await app.use_alerts().watch()
        letters = [found async for found in (await app.dead_letters()).find()]

    assert verdict is not None and {incident.rule for incident in verdict.changed} == {"outbox_dead"}
    assert [letter.letter.id for letter in letters] == [row.id]
    assert not (tmp_path / "data").exists()


async def test_an_outbox_without_redis_delivers_directly_and_leaves_jobs_alone(tmp_path: Path) -> None:
    """A row for a queue waits until a process with a Redis has it; nothing of it is counted or dead."""
    await prepare(tmp_path)
    settings = Settings.load(environ=environ(tmp_path, "amqp://x", "no-redis"), start=tmp_path)
    app, spy = Bullpen(settings=settings), SpyChannel()
    app.use_outbox().route("webhook:*", spy)

    with telling() as told:
        async with running(app):
            await app.ledger.outbox.enqueue_many([item(1, integration_type="bullmq:mails"), item(2)])
            await told.wait("outbox.delivered", 2)
            job, sent = await app.ledger.outbox.find()

    assert spy.numbers == [2]
    assert (job.status, job.attempts, sent.status) == (OutboxStatus.PENDING, 0, OutboxStatus.SENT)
    assert "no Redis address is configured" in str(job.last_error)


async def test_a_worker_without_an_address_is_refused_when_it_starts(tmp_path: Path) -> None:
    app = Bullpen(settings=Settings.load(environ={"BULLPEN_EMBEDDED": "never"}, start=tmp_path))

    @app.handler("mails")
    async def handle(job: Job) -> None: ...

    with pytest.raises(NotConfigured, match="no Redis address is configured"):
        await asyncio.wait_for(app.run(signals=False), 20)


async def test_doctor_tells_of_the_ledger_where_no_redis_is_configured(tmp_path: Path) -> None:
    await prepare(tmp_path)

    done = await asyncio.to_thread(cli, "doctor", "--json", cwd=tmp_path, env=environ(tmp_path, "amqp://x", "no-redis"))

    found = {(advice["subject"].split()[0], advice["level"]) for advice in json.loads(done.out)}
    assert ("redis", "unknown") in found
    assert ("ledger", "good") in found
