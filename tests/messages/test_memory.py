"""A process that only sends messages carries nothing else, and about 50 MB of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.messages import ROOT, SENDER
from bullpen.testing import Child
from bullpen.testing.rabbitmq import RabbitServer
from tests.databases import MakeLedger

NOT_FOR_SENDING = {
    "alembic": "migrates",
    "mako": "belongs to alembic",
    "pygments": "belongs to mako",
    "redis": "belongs to the queue; a sender on RabbitMQ has none",
    "opentelemetry": "is loaded by who traces",
    "httpcore2": "is loaded by channels over HTTP",
    "aiokafka": "belongs to another transport",
    "aiosqlite": "belongs to another database",
    "rich": "is for people",
    "uvicorn": "serves pages",
}


@pytest.mark.requirement("S-46")
async def test_a_sender_is_small(postgres_url: str, make_ledger: MakeLedger, rabbit: RabbitServer) -> None:
    """Bytes depend on the machine and the versions of libraries, so the bounds have room: measured were 69 MB resident,
    of which 49 MB its own. Python, SQLAlchemy, psycopg and aio-pika alone are 60 MB resident before the first line of
    ours. What must never be there is listed above; each of those once was, and together they were 20 MB."""
    await make_ledger(postgres_url).check()
    child = Child.code(SENDER, "rabbitmq", rabbit.url, postgres_url, f"memory-{uuid.uuid4().hex[:6]}", cwd=ROOT)
    try:
        loaded = (await asyncio.to_thread(child.wait_for, "loaded", timeout=60)).split()
        resident_mb, own_mb = map(float, (await asyncio.to_thread(child.wait_for, "rss", timeout=60)).split()[-2:])
    finally:
        child.close()

    assert {"aio_pika", "psycopg", "sqlalchemy"} <= set(loaded)
    assert not NOT_FOR_SENDING.keys() & set(loaded)
    assert own_mb < 60
    assert resident_mb < 85


PREPARES = """
import asyncio, sys
from bullpen import Bullpen
from bullpen.settings import Settings

app = Bullpen(settings=Settings.load(environ={"BULLPEN_DATA_DIR": sys.argv[1]}))


async def main():
    async with app:
        await app.prepare()
        print("alembic" in sys.modules)


asyncio.run(main())
"""


def test_only_the_process_that_makes_the_tables_loads_what_makes_them(tmp_path: Path) -> None:
    """On the default file too: every later process would carry it, and 15 MB with it, for as long as it runs."""
    loaded = [
        subprocess.run(
            [sys.executable, "-c", PREPARES, str(tmp_path / "data")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]

    assert loaded == ["True", "False"]
