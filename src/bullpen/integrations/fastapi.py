"""bullpen in FastAPI: installed by one line, injected where a route names it.

    install(api, app, dashboard="/bullpen", ops="/ops")

    @api.post("/orders")
    async def place_order(email: str, session: OutboxSession, app: App) -> None:
        session.add(Order(email=email))
        await app.outbox.add_in_transaction(session, "emails", "receipt", {"to": email})

Needs the package `fastapi`, and `OutboxSession` the extra `sqlite` or `postgres`. Starlette alone has `install` and
`app_of` in `bullpen.integrations.starlette`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fastapi import Depends
from starlette.requests import HTTPConnection

from bullpen._kernel.lazy import lazy
from bullpen.app import Bullpen
from bullpen.integrations.starlette import app_of, install
from bullpen.queue import Queue

if TYPE_CHECKING:
    from bullpen.integrations._session import OutboxSession

__all__ = ["App", "OutboxSession", "app_of", "install", "queue"]

App: TypeAlias = Annotated[Bullpen, Depends(app_of)]
"""The app, as the parameter of a route."""


def queue(name: str) -> Any:
    """A queue of the app, as the parameter of a route: `emails: Annotated[Queue, queue("emails")]`."""

    async def find(connection: HTTPConnection) -> Queue:
        return app_of(connection).queue(name)

    return Depends(find)


# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"bullpen.integrations._session": ("OutboxSession",)})
