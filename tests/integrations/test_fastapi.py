"""An app of bullpen inside of FastAPI and Starlette: opened with the server, injected into routes, pages mounted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bullpen import Bullpen, Queue, Settings
from bullpen.dashboard import Role, Visitor
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.integrations.fastapi import App, OutboxSession, app_of, install, queue

Api = FastAPI | Starlette
Numbers = Annotated[Queue, queue("numbers")]


@contextlib.asynccontextmanager
async def serving(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    """The application between its start and its end, and a client that asks it."""
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport, base_url="http://here") as asks:
        yield asks


@pytest.fixture
def app(redis_url: str, tmp_path: Path) -> Bullpen:
    return Bullpen(settings=Settings.load(redis_url=redis_url, ledger_url=f"sqlite:///{tmp_path / 'shop.db'}"))


async def test_routes_get_the_app_and_its_queues_and_workers_run_beside_them(app: Bullpen) -> None:
    """The whole of a small service in one process."""

    @app.task("numbers")
    async def double(number: int) -> int:
        return number * 2

    api = FastAPI()
    install(api, app, workers=True)

    @api.post("/double")
    async def ask(number: int, numbers: Numbers, found: App) -> dict[str, Any]:
        job = await numbers.add("double", {"number": number})
        return {"result": await job.result(timeout=30_000), "same": found is app}

    async with serving(api) as asks:
        answer = await asks.post("/double", params={"number": 21})

    assert answer.json() == {"result": 42, "same": True}
    assert not app.is_running


async def make_orders(app: Bullpen) -> None:
    app.use_outbox()
    await app.ledger.migrate()
    engine = create_async_engine(app.ledger.database.url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (email TEXT)"))
    await engine.dispose()


async def count(app: Bullpen, table: str) -> int:
    engine = create_async_engine(app.ledger.database.url)
    async with engine.connect() as connection:
        found = int(await connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)
    await engine.dispose()
    return found


async def test_an_order_and_its_job_share_the_fate_of_the_route(app: Bullpen) -> None:
    """Committed before the answer is sent, and rolled back when the route raises."""
    await make_orders(app)
    api = FastAPI()
    install(api, app)

    @api.post("/orders")
    async def place(email: str, session: OutboxSession, found: App) -> dict[str, str | None]:
        await session.execute(text("INSERT INTO orders (email) VALUES (:email)"), {"email": email})
        stored = await found.outbox.add_in_transaction(session, "emails", "receipt", {"to": email})
        if "@" not in email:
            raise ValueError("no address")
        return {"job": stored.id}

    async with serving(api) as asks:
        refused = await asks.post("/orders", params={"email": "nobody"})
        after_refusal = (await count(app, "orders"), await count(app, "integration_outbox"))
        placed = await asks.post("/orders", params={"email": "ada@example.com"})
        after_order = (await count(app, "orders"), await count(app, "integration_outbox"))

    assert (refused.status_code, after_refusal) == (500, (0, 0))
    assert (placed.status_code, after_order) == (200, (1, 1))
    assert placed.json()["job"]


async def test_an_engine_of_the_program_is_used_and_left_open(app: Bullpen, tmp_path: Path) -> None:
    """It belongs to the program: another part may still use it."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'own.db'}")
    async with engine.begin() as kept:
        await kept.execute(text("CREATE TABLE mine (name TEXT)"))
    api = FastAPI()
    install(api, app, engine=engine)

    @api.get("/tables")
    async def tables(session: OutboxSession) -> list[str]:
        return list(await session.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")))

    async with serving(api) as asks:
        found = (await asks.get("/tables")).json()
    opened_before = engine.pool.checkedin()  # type: ignore[attr-defined]  # of the pool that files have
    await engine.dispose()

    assert found == ["mine"]
    assert opened_before == 1


async def test_the_lifespan_of_the_program_stays_and_may_use_the_app(app: Bullpen, queue_name: str) -> None:
    said: list[str] = []

    @app.on_startup
    async def started() -> None:
        said.append("hook")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, str]]:
        await app.queue(queue_name).add("begin")
        said.append("begin")
        yield {"name": "shop"}
        await app.queue(queue_name).add("end")
        said.append("end")

    api = FastAPI(lifespan=lifespan)
    install(api, app)

    async with api.router.lifespan_context(api) as state:
        said.append("serving")

    assert said == ["begin", "hook", "serving", "end"]
    assert state == {"name": "shop"}


async def test_probes_and_metrics_are_mounted(app: Bullpen) -> None:
    api = FastAPI()
    install(api, app, ops="/ops")

    async with serving(api) as asks:
        answers = [(await asks.get(f"/ops/{path}")).status_code for path in ("livez", "readyz", "metrics", "else")]

    assert answers == [200, 200, 200, 404]


async def test_workers_that_ended_are_reported_by_the_probe(app: Bullpen, queue_name: str) -> None:
    """The server cannot be stopped from inside, so that nobody would notice otherwise."""

    @app.task(queue_name)
    async def nothing() -> None: ...

    @app.on_startup
    async def broken() -> None:
        raise OSError("no certificate")

    api = FastAPI()
    install(api, app, ops="/ops", workers=True)

    async with serving(api) as asks:
        while (answer := await asks.get("/ops/livez")).status_code == 200:  # noqa: ASYNC110  # nobody outside hears of it but by asking
            await asyncio.sleep(0.05)

    assert answer.status_code == 503
    assert "the workers of this process have ended" in answer.json()["checks"]["workers"]


async def test_the_dashboard_asks_who_it_is(app: Bullpen) -> None:
    def decide(scope: Mapping[str, Any]) -> Visitor | None:
        named = dict(scope["headers"]).get(b"x-name")
        return Visitor(named.decode(), Role.VIEWER) if named else None

    api = FastAPI()
    install(api, app, dashboard="/bullpen", access=decide)

    async with serving(api) as asks:
        stranger = await asks.get("/bullpen/")
        known = await asks.get("/bullpen/", headers={"x-name": "ada"})

    assert stranger.status_code in (401, 403)
    assert known.status_code == 200
    assert "/bullpen/queues" in known.text


def test_a_dashboard_without_a_log_in_is_refused(app: Bullpen) -> None:
    """A web application is open to strangers, and whoever sees the dashboard may change what it shows."""
    with pytest.raises(NotConfigured, match="BULLPEN_DASHBOARD_ACCESS"):
        install(FastAPI(), app, dashboard="/bullpen")


async def test_starlette_alone_finds_the_app(app: Bullpen, queue_name: str) -> None:
    async def add(request: Request) -> JSONResponse:
        job = await app_of(request).queue(queue_name).add("hello")
        return JSONResponse({"state": await job.state()})

    api = Starlette(routes=[Route("/add", add)])
    install(api, app)

    async with serving(api) as asks:
        answer = await asks.get("/add")

    assert answer.json() == {"state": "waiting"}


async def test_an_application_without_bullpen_says_what_is_missing(app: Bullpen) -> None:
    api = FastAPI()

    @api.get("/")
    async def ask(found: App) -> None: ...

    with pytest.raises(NotConfigured, match=r"install\(api, app\)"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here") as asks:
            await asks.get("/")
    install(api, app)
    with pytest.raises(InvalidOption, match="called before"):
        install(api, app)
