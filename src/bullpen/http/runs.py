"""Runs over HTTP: start, list, inspect, cancel, retry, follow; dead letters of the tenant. An ASGI application.

In: a `RunService` and who may ask (a bearer token names a tenant, an actor and what it may do). Out: JSON as in the
types beside this, an OpenAPI description at `/openapi.json`, and server-sent events. The tenant comes from the token
and from nowhere else; what belongs to another tenant does not exist. Answers hold summaries of errors, never stacks
or secrets. It mounts in any ASGI application: `app.mount("/api", runs_api(...))`. Needs the extra `http`.
Elsewhere: what the operations do (`bullpen.runs`), who issues tokens (you).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.ending import to_its_end
from bullpen._kernel.logs import get_logger
from bullpen.errors import (
    BullpenError,
    DatabaseUnavailable,
    InvalidOption,
    MissingExtra,
    RowNotFound,
    RowStateConflict,
)
from bullpen.http._api import (
    ON_ERRORS,
    Authenticate,
    Principal,
    Problem,
    Tokens,
    answer_json,
    decode,
    identify,
    read_body,
    read_limit,
)
from bullpen.http._openapi import describe
from bullpen.http._run_types import DeadLetterPage, DeadLetterView, RunPage, RunView, StartRun
from bullpen.ledger import RunRow, RunStatus, check_run_id
from bullpen.runs import RunPayload, RunService, run_id_for

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise MissingExtra("http", "the HTTP interface of runs") from error

__all__ = ["Authenticate", "Principal", "Tokens", "runs_api"]

_log = get_logger("bullpen.http")

_KEEP_ALIVE_S: Final = 15.0


def runs_api(
    service: RunService,
    authenticate: Authenticate,
    *,
    price: Callable[[RunPayload], int] | None = None,
    handlers: Iterable[str] | None = None,
    poll_ms: int = 500,
    followers: int = 10,
    all_followers: int = 100,
) -> Starlette:
    """The application. `price` tells what a run of the handler without a name costs in credits (None: what that handler
    says); clients cannot say it themselves. Runs of named handlers have the price of their handler.

    `handlers` are the named handlers that clients may start runs for; None: all that the service knows.
    `poll_ms` is how often a followed run is looked at. `followers` is how many runs a principal may follow at the same
    time, `all_followers` how many all of them may: each holds a connection and asks the database again and again.
    """
    places = _FollowSlots(
        check_int("followers", followers, minimum=1), check_int("all_followers", all_followers, minimum=1)
    )
    allowed = None if handlers is None else frozenset(check_texts("handlers", handlers))
    api = _RunsApi(service, authenticate, price, allowed, check_int("poll_ms", poll_ms, minimum=1) / 1000, places)
    routes = [
        Route("/runs", api.start, methods=["POST"]),
        Route("/runs", api.list, methods=["GET"]),
        Route("/runs/{run_id}", api.inspect, methods=["GET"]),
        Route("/runs/{run_id}/cancel", api.cancel, methods=["POST"]),
        Route("/runs/{run_id}/retry", api.retry, methods=["POST"]),
        Route("/runs/{run_id}/events", api.follow, methods=["GET"]),
        Route("/dead-letters", api.dead_letters, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=ON_ERRORS)


class _FollowSlots:
    """Who follows how many runs."""

    def __init__(self, most_each: int, most: int) -> None:
        self._most_each, self._most = most_each, most
        self._taken: Counter[tuple[str, str]] = Counter()

    def take(self, who: Principal) -> Callable[[], None]:
        """A place; the answer gives it back."""
        key = (who.tenant_id, who.actor)
        if self._taken[key] >= self._most_each:
            raise HTTPException(429, f"at most {self._most_each} runs can be followed at the same time")
        if self._taken.total() >= self._most:
            raise HTTPException(429, "too many runs are being followed; try again")
        self._taken[key] += 1

        def give_back() -> None:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]

        return give_back


class _Followed(StreamingResponse):
    """Gives its place back however it ends, also when the client was gone before it began."""

    def __init__(self, give_back: Callable[[], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._give_back = give_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_back()


class _RunsApi:
    def __init__(
        self,
        service: RunService,
        authenticate: Authenticate,
        price: Callable[[RunPayload], int] | None,
        handlers: frozenset[str] | None,
        poll_s: float,
        places: _FollowSlots,
    ) -> None:
        self._service, self._authenticate, self._handlers = service, authenticate, handlers
        self._price, self._poll_s, self._places = price, poll_s, places

    async def start(self, request: Request) -> Response:
        who = await identify(request, self._authenticate, writes=True)
        key = request.headers.get("idempotency-key", "")
        if not 0 < len(key) <= 200:
            raise InvalidOption("Idempotency-Key", "a header of 1 to 200 characters", key)
        wanted = decode(await read_body(request), StartRun)
        if wanted.is_test_run and not who.may_test:
            raise HTTPException(403, "this token may not start test runs")
        payload = RunPayload(
            run_id=run_id_for(who.tenant_id, key),
            tenant_id=who.tenant_id,
            version_id=wanted.version_id,
            definition=wanted.definition,
            context_inputs=wanted.context_inputs,
            subject_file=wanted.subject_file,
            subject_files=wanted.subject_files,
            knowledge_context=wanted.knowledge_context,
        )
        handler = wanted.handler
        if handler is not None and self._handlers is not None and handler not in self._handlers:
            raise HTTPException(403, "runs of this handler cannot be started here")
        try:
            submitted = await self._service.submit(
                payload,
                handler=handler,
                cost=None if handler is not None or self._price is None else self._price(payload),
                is_test_run=wanted.is_test_run,
                payload_in_job=wanted.payload_in_job,
                actor=who.actor,
            )
        except RowStateConflict:
            text = "this Idempotency-Key has started a run with another body; send the same body, or a new key"
            return answer_json(Problem(error="conflict", message=text), 409)
        return answer_json(RunView.of(submitted.run), 201 if submitted.created else 200)

    async def list(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        query = request.query_params
        status, limit = query.get("status"), read_limit(query.get("limit", "50"))
        if status is not None and status not in RunStatus.__members__:
            raise InvalidOption("status", f"one of {', '.join(RunStatus)}", status)
        handler = query.get("handler")
        if handler is not None and "\0" in handler:  # no database of ours takes it, and none has such a name
            raise InvalidOption("handler", "the name of a handler", handler)
        rows = await self._service.find(
            who.tenant_id,
            status=None if status is None else RunStatus(status),
            handler=handler,
            before=_read_cursor(query.get("cursor")),
            limit=limit,
        )
        is_full = len(rows) == limit
        page = RunPage(runs=[RunView.of(row) for row in rows], next=_cursor(rows[-1]) if is_full else None)
        return answer_json(page)

    async def inspect(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        return answer_json(RunView.of(await self._service.get(who.tenant_id, _run_id(request))))

    async def cancel(self, request: Request) -> Response:
        who = await identify(request, self._authenticate, writes=True)
        return answer_json(RunView.of(await self._service.cancel(who.tenant_id, _run_id(request), actor=who.actor)))

    async def retry(self, request: Request) -> Response:
        who = await identify(request, self._authenticate, writes=True)
        return answer_json(RunView.of(await self._service.retry(who.tenant_id, _run_id(request), actor=who.actor)))

    async def follow(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        row = await self._service.get(who.tenant_id, _run_id(request))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        changes = self._changes(who.tenant_id, row)
        return _Followed(self._places.take(who), changes, media_type="text/event-stream", headers=headers)

    async def _changes(self, tenant_id: str, row: RunRow) -> AsyncIterator[bytes]:
        """The run now and after every change, until it has ended. The row is asked: it is the truth, and one place."""
        sent: RunView | None = None
        silent_s = 0.0
        while True:
            view = RunView.of(row)
            if view != sent:
                sent, silent_s = view, 0.0
                yield b"event: run\ndata: " + msgspec.json.encode(view) + b"\n\n"
            elif silent_s >= _KEEP_ALIVE_S:
                silent_s = 0.0
                yield b": still here\n\n"  # or proxies on the way think that nobody is
            if row.status.is_terminal:
                return
            await asyncio.sleep(self._poll_s)
            silent_s += self._poll_s
            try:
                row = await to_its_end(self._service.get(tenant_id, row.id))
            except DatabaseUnavailable:
                continue  # whoever follows a run sees it go on when the database is back
            except RowNotFound:
                return

    async def dead_letters(self, request: Request) -> Response:
        who = await identify(
            request, self._authenticate, writes=True
        )  # payloads: not for those who may only look at statuses
        query = request.query_params
        cursor, handler = query.get("cursor"), query.get("handler")
        limit = read_limit(query.get("limit", "50"))
        try:
            found = await self._service.dead_letter_page(
                who.tenant_id, actor=who.actor, handler=handler, after=cursor, limit=limit
            )
        except InvalidOption as error:
            if error.option != "after":
                raise
            raise InvalidOption("cursor", "the `next` of an earlier page", cursor) from None
        page = DeadLetterPage(
            dead_letters=[DeadLetterView.of(letter, handler) for letter in found.letters],
            depth=found.depth or 0,
            next=found.next,
        )
        return answer_json(page)

    async def openapi(self, request: Request) -> Response:
        return Response(describe(request.scope.get("root_path", "")), media_type="application/json")


# Reading and answering ----------------------------------------------------------------------------------------------


def _run_id(request: Request) -> str:
    return check_run_id(request.path_params["run_id"])


def _cursor(row: RunRow) -> str:
    return base64.urlsafe_b64encode(f"{row.created_at.isoformat()}|{row.id}".encode()).decode()


def _read_cursor(text: str | None) -> tuple[datetime, str] | None:
    if text is None:
        return None
    try:
        instant, _, run_id = base64.urlsafe_b64decode(text.encode("ascii")).decode().partition("|")
        created_at = datetime.fromisoformat(instant)
        if created_at.tzinfo is None or not 1970 <= created_at.year <= 9000:
            raise ValueError(instant)
        return created_at, check_run_id(run_id)
    except (ValueError, UnicodeError, binascii.Error, BullpenError):
        raise InvalidOption("cursor", "the `next` of an earlier page", text) from None
