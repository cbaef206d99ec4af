"""Endpoints over HTTP: customers manage their own. An ASGI application.

In: `Endpoints` and who may ask (a bearer token names a tenant, an actor and whether it may change anything). Out: JSON
as in the types beside this, and an OpenAPI description at `/openapi.json`. The tenant comes from the token and from
nowhere else; what belongs to another tenant does not exist. A secret is in the answer that made it, and in no other. It
mounts in any ASGI application: `app.mount("/webhooks", endpoints_api(...))`. Needs the extra `http`.
Elsewhere: what the operations do (`bullpen.outbox.endpoints`), who issues tokens (you).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bullpen._kernel.duration import check_int
from bullpen._kernel.scrub import scrub
from bullpen.errors import InvalidOption, MissingExtra
from bullpen.http._api import ON_ERRORS, Authenticate, Principal, answer_json, decode, identify, read_body, read_limit
from bullpen.http._endpoint_openapi import describe
from bullpen.http._endpoint_types import (
    EndpointAttemptPage,
    EndpointAttemptView,
    EndpointChange,
    EndpointPage,
    EndpointView,
    NewEndpoint,
    Replayed,
    ReplayOrder,
    Rotation,
    SecretView,
    StateChange,
    TestAnswer,
    TestMessage,
)
from bullpen.outbox import Endpoint, Endpoints, EndpointState

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra("http", "the HTTP interface of endpoints") from error

__all__ = ["endpoints_api"]

_MOST_BYTES: Final = 1024 * 1024
_MOST_REPLAYED: Final = 10_000
"""Messages that one request looks at: a request is answered when all are copied."""
_NO_STORE: Final = {"cache-control": "no-store"}


def endpoints_api(endpoints: Endpoints, authenticate: Authenticate, *, tests: int = 2) -> Starlette:
    """The application. `tests` is how many test messages and replays of one tenant may be under way at the same time:
    each is a request of ours to an address of its choice, or a walk over its messages."""
    api = _EndpointsApi(endpoints, authenticate, _TestSlots(check_int("tests", tests, minimum=1)))
    one = "/endpoints/{endpoint_id}"
    routes = [
        Route("/endpoints", api.create, methods=["POST"]),
        Route("/endpoints", api.list, methods=["GET"]),
        Route(one, api.inspect, methods=["GET"]),
        Route(one, api.change, methods=["PATCH"]),
        Route(one, api.remove, methods=["DELETE"]),
        Route(f"{one}/secret", api.rotate, methods=["POST"]),
        Route(f"{one}/enable", api.enable, methods=["POST"]),
        Route(f"{one}/pause", api.pause, methods=["POST"]),
        Route(f"{one}/disable", api.disable, methods=["POST"]),
        Route(f"{one}/test", api.send_test, methods=["POST"]),
        Route(f"{one}/replay", api.replay, methods=["POST"]),
        Route(f"{one}/attempts", api.attempts, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=ON_ERRORS)


class _TestSlots:
    """What takes long, per tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant_id: str) -> Iterator[None]:
        if self._taken[tenant_id] >= self._most:
            raise HTTPException(429, f"at most {self._most} tests and replays at the same time; try again")
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1
            if not self._taken[tenant_id]:
                del self._taken[tenant_id]


class _EndpointsApi:
    def __init__(self, endpoints: Endpoints, authenticate: Authenticate, places: _TestSlots) -> None:
        self._endpoints, self._authenticate, self._places = endpoints, authenticate, places

    async def create(self, request: Request) -> Response:
        who = await self._writer(request)
        wanted = decode(await read_body(request, _MOST_BYTES), NewEndpoint)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 200:
            raise InvalidOption("Idempotency-Key", "a header of 1 to 200 characters", key)
        made = await self._endpoints.create(
            who.tenant_id,
            wanted.url,
            by=who.actor,
            events=wanted.events,
            description=wanted.description,
            headers=wanted.headers,
            rate=None if wanted.rate is None else wanted.rate.read(),
            secret=wanted.secret,
            idempotency_key=key,
        )
        view = SecretView(endpoint=EndpointView.of(made.endpoint), secret=made.secret or None)
        return _secret(view, 201 if made.secret else 200)

    async def list(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        query = request.query_params
        state, limit = query.get("state"), read_limit(query.get("limit", "50"))
        if state is not None and state not in tuple(EndpointState):
            raise InvalidOption("state", f"one of {', '.join(EndpointState)}", state)
        found = await self._endpoints.find(
            who.tenant_id,
            state=None if state is None else EndpointState(state),
            after=query.get("cursor"),
            limit=limit,
        )
        is_full = len(found) == limit
        views = [EndpointView.of(each) for each in found]
        return answer_json(EndpointPage(endpoints=views, next=found[-1].cursor if is_full else None))

    async def inspect(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        return _view(await self._endpoints.get(who.tenant_id, _id(request)))

    async def change(self, request: Request) -> Response:
        who = await self._writer(request)
        changes = decode(await read_body(request, _MOST_BYTES), EndpointChange).read()
        return _view(await self._endpoints.update(who.tenant_id, _id(request), by=who.actor, **changes))

    async def remove(self, request: Request) -> Response:
        who = await self._writer(request)
        await self._endpoints.remove(who.tenant_id, _id(request), by=who.actor)
        return Response(status_code=204)

    async def rotate(self, request: Request) -> Response:
        who = await self._writer(request)
        wanted = decode(await read_body(request, _MOST_BYTES) or b"{}", Rotation)
        made = await self._endpoints.rotate_secret(
            who.tenant_id, _id(request), by=who.actor, secret=wanted.secret, overlap_ms=wanted.overlap_ms
        )
        return _secret(SecretView(endpoint=EndpointView.of(made.endpoint), secret=made.secret))

    async def enable(self, request: Request) -> Response:
        return await self._set_state(request, self._endpoints.enable)

    async def pause(self, request: Request) -> Response:
        return await self._set_state(request, self._endpoints.pause)

    async def disable(self, request: Request) -> Response:
        return await self._set_state(request, self._endpoints.disable)

    async def _set_state(self, request: Request, change: Callable[..., Awaitable[Endpoint]]) -> Response:
        who = await self._writer(request)
        reason = decode(await read_body(request, _MOST_BYTES) or b"{}", StateChange).reason
        return _view(await change(who.tenant_id, _id(request), by=who.actor, reason=reason))

    async def send_test(self, request: Request) -> Response:
        who = await self._writer(request)
        payload = decode(await read_body(request, _MOST_BYTES) or b"{}", TestMessage).payload
        with self._places.taken(who.tenant_id):
            result = await self._endpoints.send_test(who.tenant_id, _id(request), payload)
        answer = TestAnswer.of(result)
        answer.detail = scrub(answer.detail)
        return answer_json(answer)

    async def replay(self, request: Request) -> Response:
        who = await self._writer(request)
        wanted = decode(await read_body(request, _MOST_BYTES), ReplayOrder)
        with self._places.taken(who.tenant_id):
            count = await self._endpoints.replay(
                who.tenant_id,
                _id(request),
                by=who.actor,
                label=wanted.label,
                failed=wanted.failed,
                since=wanted.since,
                before=wanted.before,
                new_key=wanted.new_key,
                limit=_MOST_REPLAYED,
            )
        return answer_json(Replayed(count=count))

    async def attempts(self, request: Request) -> Response:
        who = await identify(request, self._authenticate)
        query = request.query_params
        limit, before = read_limit(query.get("limit", "50")), query.get("cursor")
        if before is not None and not (before.isascii() and before.isdigit() and len(before) <= 15):
            raise InvalidOption("cursor", "what an earlier page gave as `next`", before)
        found = await self._endpoints.attempts(
            who.tenant_id, _id(request), before=None if before is None else int(before), limit=limit
        )
        views = [EndpointAttemptView.of(each) for each in found]
        following = str(found[-1].number) if len(found) == limit else None
        return answer_json(EndpointAttemptPage(attempts=views, next=following))

    async def openapi(self, request: Request) -> Response:
        return Response(describe(request.scope.get("root_path", "")), media_type="application/json")

    async def _writer(self, request: Request) -> Principal:
        return await identify(request, self._authenticate, writes=True)


def _id(request: Request) -> str:
    return str(request.path_params["endpoint_id"])


def _view(endpoint: Endpoint) -> Response:
    return answer_json(EndpointView.of(endpoint))


def _secret(view: SecretView, status: int = 200) -> Response:
    """Nobody on the way may keep it."""
    answer = answer_json(view, status)
    answer.headers.update(_NO_STORE)
    return answer
