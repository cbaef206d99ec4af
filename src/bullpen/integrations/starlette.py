"""An app of bullpen inside of a Starlette application, which FastAPI's is too.

In: both applications, and which pages to mount. Out: the app is opened and closed with the server, its pages answer,
and handlers find it in `request.app.state.bullpen`. Elsewhere: dependencies of FastAPI (`fastapi`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen._kernel.logs import get_logger
from bullpen.app import Bullpen
from bullpen.errors import InvalidOption, NotConfigured

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from bullpen.dashboard import Visitor

__all__ = ["app_of", "engine_of", "install"]

logger = get_logger("bullpen.integrations")

_STATE: Final = "bullpen"
_ENGINE: Final = "bullpen_engine"
Decide = Callable[[Mapping[str, Any]], "Visitor | Awaitable[Visitor | None] | None"]


def install(
    api: Starlette,
    app: Bullpen,
    *,
    dashboard: str | None = None,
    access: Decide | None = None,
    ops: str | None = None,
    workers: bool = False,
    engine: AsyncEngine | None = None,
) -> None:
    """Open `app` when the server starts and close it when the server stops; before the server starts, once.

    `dashboard` and `ops` are paths at which the [dashboard](dashboard.md) and `/livez`, `/readyz` and `/metrics` are
    mounted. Who may see the dashboard is decided by `access`, a function of the ASGI scope that returns a `Visitor` or
    None, else by `BULLPEN_DASHBOARD_ACCESS`; with neither it is refused, because a web application has strangers.

    `workers=True` also runs everything that `bullpen run` would, in this process: for development, and for services so
    small that one process is enough. When a worker cannot go on, `/livez` says so, since only a restart helps then.

    `engine` is the database of your own data, for `OutboxSession`; unless given, it is the app's ledger.
    """
    if hasattr(api.state, _STATE):
        raise InvalidOption("api", "an application without bullpen: install was called before", api)
    setattr(api.state, _STATE, app)
    setattr(api.state, _ENGINE, engine)
    pages = None if dashboard is None else _mount_dashboard(api, app, dashboard, access)
    if ops is not None:
        from bullpen.http.ops import OpsApp

        api.mount(ops, _asgi(OpsApp(app.health.report, app.metrics)))
    inner = api.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(outer: Any) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            if app.has_outbox:
                await app.prepare()
            if pages is not None:
                await stack.enter_async_context(pages)
            stack.push_async_callback(_dispose, api, own=engine is None)
            # The program's own lifespan is the inner one: what it opens may use the app until it is closed.
            state = await stack.enter_async_context(inner(outer))
            await stack.enter_async_context(_run(app) if workers else app.started())
            yield state

    api.router.lifespan_context = lifespan


def app_of(connection: HTTPConnection) -> Bullpen:
    """The app that `install` was called with, for a request or a web socket."""
    found = getattr(connection.app.state, _STATE, None)
    if not isinstance(found, Bullpen):
        raise NotConfigured("this application has no bullpen: call install(api, app) where it is made")
    return found


def engine_of(connection: HTTPConnection) -> AsyncEngine:
    """The engine that `install` was called with, else one for the app's ledger, made once."""
    from sqlalchemy.ext.asyncio import create_async_engine

    app = app_of(connection)
    found: AsyncEngine | None = getattr(connection.app.state, _ENGINE)
    if found is None:
        found = create_async_engine(app.ledger.database.url, hide_parameters=True)
        setattr(connection.app.state, _ENGINE, found)
    return found


# ---- inside -----------------------------------------------------------------------------------------------------


def _asgi(pages: Any) -> Any:
    """Starlette annotates messages as any mutable mapping, we as dictionaries, which all servers send."""
    return pages


def _mount_dashboard(api: Starlette, app: Bullpen, path: str, access: Decide | None) -> Any:
    from bullpen.dashboard import make_dashboard

    if access is None and app.settings.dashboard.access == "none":
        raise NotConfigured(
            "the dashboard is mounted without a log-in: pass install(…, access=…), or set BULLPEN_DASHBOARD_ACCESS to"
            " token, passwords or proxy"
        )
    pages = make_dashboard(app, access=access)
    api.mount(path, _asgi(pages))
    return pages


@contextlib.asynccontextmanager
async def _run(app: Bullpen) -> AsyncIterator[None]:
    """Run the app beside the server; the server's signals stay its own."""
    running = asyncio.create_task(_run_logged(app))

    async def check() -> str | None:
        return "the workers of this process have ended; the log says why" if running.done() else None

    # Vital: with its workers an app closes its connections, so that only a restart helps.
    app.health.add("workers", check, vital=True)
    try:
        yield
    finally:
        await app.stop()
        await running


async def _run_logged(app: Bullpen) -> None:
    try:
        await app.run(signals=False)
    except AlreadyStopped:
        pass  # the server stopped before it had begun
    except Exception:  # the server cannot be stopped from here: the probe says that it must be
        logger.exception("the workers of this process have ended; restart it")


async def _dispose(api: Starlette, *, own: bool) -> None:
    """Close the engine that was made here; what was given belongs to the program."""
    made: AsyncEngine | None = getattr(api.state, _ENGINE)
    if own and made is not None:
        setattr(api.state, _ENGINE, None)
        await made.dispose()
