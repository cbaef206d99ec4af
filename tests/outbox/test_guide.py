"""The examples of the guide that are files of their own: FastAPI, Django and psycopg, each against a real database.

What the page itself runs is run by `tests/docs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import types
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from bullpen.errors import NotInTransaction
from bullpen.ledger import Ledger
from bullpen.outbox import DispatcherOptions, Outbox
from tests.contracts.outbox_repository import execute
from tests.databases import MakeLedger
from tests.docs.run_page import blocks_of
from tests.ledger.test_enqueue import django_connection
from tests.outbox.kit import SpyChannel, rows

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "outbox.md"


def example(name: str, *, old: str = "", new: str = "") -> types.ModuleType:
    """A file of the page as a module; `old` and `new` put the test's own database in."""
    (source,) = [block.source for block in blocks_of(PAGE.read_text()) if block.source.startswith(f"# {name}.py\n")]
    assert old in source
    source = source.replace(old, new) if old else source
    module = types.ModuleType(name)
    module.__dict__["__name__"] = name
    exec(compile(source, f"{PAGE.name}:{name}", "exec"), module.__dict__)
    return module


@pytest.fixture
async def shop(ledger: Ledger) -> Ledger:
    """A database with the business table of the page beside the ledger's."""
    key = "INTEGER GENERATED ALWAYS AS IDENTITY" if ledger.database.is_postgres else "INTEGER PRIMARY KEY"
    await execute(ledger, f"CREATE TABLE orders (id {key}, email VARCHAR(100) UNIQUE NOT NULL)")
    return ledger


async def orders_and_jobs(ledger: Ledger) -> tuple[list[str], list[str]]:
    orders = [email for (email,) in await execute(ledger, "SELECT email FROM orders ORDER BY id")]
    return orders, [row.payload["to"] for row in await rows(ledger)]


@contextlib.asynccontextmanager
async def serving(api: Any) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(api, log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(20):
            while not server.started:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


def post(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


async def test_fastapi(shop: Ledger) -> None:
    url = shop.database.url.render_as_string(hide_password=False)
    module = example("shop_api", old="sqlite+aiosqlite:///shop.db", new=url)

    async with serving(module.api) as address:
        where = f"{address}/orders?{urllib.parse.urlencode({'email': 'ada@example.com'})}"
        first = await asyncio.to_thread(post, where)
        # The same address again: the order is refused by the database, and its job must not be there either.
        second = await asyncio.to_thread(post, where)

    assert first[0] == 200
    assert second[0] == 500
    assert await orders_and_jobs(shop) == (["ada@example.com"], ["ada@example.com"])
    assert (await rows(shop))[0].id == first[1]["job"]


async def test_django(shop: Ledger, ledger_url: str) -> None:
    def requests() -> dict[str, str]:
        with django_connection(ledger_url) as connection:
            from django.test import RequestFactory

            module = example("shop_views")
            answer = module.place_order(RequestFactory().post("/orders", {"email": "ada@example.com"}))
            with pytest.raises(Exception, match=r"(?i)unique"):
                module.place_order(RequestFactory().post("/orders", {"email": "ada@example.com"}))
            with pytest.raises(NotInTransaction):
                module.outbox.add_in_transaction_sync(connection, "emails", "receipt")
            found: dict[str, str] = json.loads(answer.content)
            return found

    answer = await asyncio.to_thread(requests)

    assert await orders_and_jobs(shop) == (["ada@example.com"], ["ada@example.com"])
    assert (await rows(shop))[0].id == answer["job"]


async def test_psycopg(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger, module = make_ledger(postgres_url), example("shop_psycopg")
    await execute(ledger, "CREATE TABLE orders (id INTEGER GENERATED ALWAYS AS IDENTITY, email TEXT UNIQUE)")

    first = await asyncio.to_thread(module.place_order, postgres_url, "ada@example.com")
    second = await module.place_order_async(postgres_url, "grace@example.com")
    with pytest.raises(Exception, match="unique"):
        await module.place_order_async(postgres_url, "grace@example.com")

    emails = ["ada@example.com", "grace@example.com"]
    assert await orders_and_jobs(ledger) == (emails, emails)
    assert [row.id for row in await rows(ledger)] == [first, second]


async def test_the_insert_of_another_language_is_delivered(ledger: Ledger) -> None:
    (text,) = re.findall(r"^```sql\n(INSERT INTO .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    table = ledger.database.table("integration_outbox")
    statement = text.replace("core_outbox.integration_outbox", table)
    spy = SpyChannel()
    outbox = Outbox(ledger, {"webhook:partnerX": spy}, options=DispatcherOptions(tick_interval_ms=600_000))
    dispatcher = outbox.dispatcher()
    await dispatcher.start()

    for _ in range(2):
        async with ledger.database.transaction() as connection:
            await connection.exec_driver_sql(statement)
    await spy.until(1)
    await dispatcher.close()

    assert [(each.payload, each.idempotency_key) for each in spy.messages] == [
        ({"orderId": 1}, "1f0d/webhook:partnerX")
    ]
