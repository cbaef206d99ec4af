"""Which messages an event becomes: declared routes with a mapper each. No input or output.

A route says which events it takes, where its messages go, and from where on it is live; its mapper turns one event into
a payload, into a whole message, into several, or into nothing. Mappers are plain functions of the event: the same event
gives the same messages, whoever asks and however often. Elsewhere: storing them (`projection`), reading events
(`projector`), the way out (`routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeVar

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.duration import check_texts
from bullpen.errors import InvalidOption, require
from bullpen.ledger import OutboxItem
from bullpen.ports.source import BEGINNING, EventMetadata, SourceEvent

Since = int | datetime | Literal["beginning", "now"]
"""From where on a route is live: behind a position, from an instant on, from the first event on, or from the moment it
is first seen by a projector."""

_KEY: Final = "idempotencyKey"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrationMessage:
    """What a mapper may return when a payload alone is not enough."""

    payload: Any = None
    integration_type: str | None = None
    """None: where the route goes."""
    event_type: str | None = None
    """None: the event's own."""
    headers: Mapping[str, Any] | None = None
    """Beside those of the event's metadata, and before them."""
    route_key: str | None = None
    """Tells two messages about one event apart. None: that of the route, else the integration type."""
    idempotency_key: str | None = None
    """None: the source event's id, with the route when the event has several."""
    ordering_key: str | None = None
    """Messages of one type and one key leave one after the other. None: what the route says."""
    delay: int | timedelta = 0
    max_attempts: int | None = None
    backoff: Backoff | int | timedelta | None = None


Mapped = IntegrationMessage | Mapping[str, Any] | Iterable[IntegrationMessage] | None
Mapper = Callable[[SourceEvent], Mapped]
AnyMapper = TypeVar("AnyMapper", bound=Callable[[SourceEvent], Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRoute:
    """One way of events out of the system."""

    name: str
    events: tuple[str, ...]
    """Whole types, or beginnings that end with `*`: `payment.*`."""
    mapper: Mapper
    since: Since
    to: str | None = None
    """Integration type of its messages; None: each message names its own."""
    key: str | None = None
    """Route key of its messages; None: their integration type."""
    ordered: bool = False
    """Messages about one stream leave one after the other."""

    def __post_init__(self) -> None:
        require("name", isinstance(self.name, str) and 0 < len(self.name) <= 60, "1 to 60 characters", self.name)
        object.__setattr__(self, "events", check_texts("events", self.events))
        require("events", bool(self.events), "at least one event type", self.events)
        for pattern in self.events:
            fits = pattern != "" and "*" not in pattern[:-1]
            require("events", fits, "event types such as 'payment.completed.v1', or 'payment.*'", pattern)
        _check_since(self.since)

    def takes(self, event_type: str) -> bool:
        return any(_fits(pattern, event_type) for pattern in self.events)

    def is_live(self, event: SourceEvent, start: int | datetime) -> bool:
        """Whether an event is behind the place where this route began."""
        return event.recorded_at >= start if isinstance(start, datetime) else event.position > start


class EventRoutes:
    """The routes of one projector.

    routes = EventRoutes()

    @routes.on("payment.completed.v1", to="kafka:payments", since="beginning")
    def payment_completed(event: SourceEvent) -> dict[str, Any]:
        return {"paymentId": event.data["paymentId"], "amount": event.data["amount"]}
    """

    def __init__(self, routes: Iterable[EventRoute] = ()) -> None:
        self._routes: dict[str, EventRoute] = {}
        self._is_frozen = False
        for route in routes:
            self.add(route)

    def on(
        self,
        *events: str,
        since: Since,
        to: str | None = None,
        key: str | None = None,
        name: str | None = None,
        ordered: bool = False,
    ) -> Callable[[AnyMapper], AnyMapper]:
        """Register the decorated mapper. `since` must be said: a new route must not send all of history by accident.

        The route's name, the function's unless given, is its identity: `since="now"` is remembered under it.
        """

        def register(mapper: AnyMapper) -> AnyMapper:
            own = str(name or getattr(mapper, "__name__", ""))
            require("name", own != "<lambda>", "a name, because the function has none", own)
            self.add(EventRoute(name=own, events=events, mapper=mapper, since=since, to=to, key=key, ordered=ordered))
            return mapper

        return register

    def add(self, route: EventRoute) -> None:
        """Register a route. Raises InvalidOption when its messages could not be told apart from another route's."""
        require("routes", not self._is_frozen, "all routes before the projector starts", route.name)
        require("name", route.name not in self._routes, "a name that no other route has", route.name)
        for other in self._routes.values():
            fence, same = route.key or route.to, other.key or other.to
            clash = fence is not None and fence == same and _overlap(route.events, other.events)
            require(
                "key", not clash, f"another key than that of route {other.name!r}, which takes the same events", fence
            )
        self._routes[route.name] = route

    def freeze(self) -> None:
        """Take no more: a projector has begun, and where a route begins is settled before its first event."""
        self._is_frozen = True

    def __iter__(self) -> Any:
        return iter(self._routes.values())

    def __len__(self) -> int:
        return len(self._routes)

    def __contains__(self, name: object) -> bool:
        """Whether a route is called so."""
        return name in self._routes

    def get(self, name: str) -> EventRoute:
        """A route by its name. Raises InvalidOption that lists the names there are."""
        route = self._routes.get(name)
        if route is None:
            raise InvalidOption("route", f"one of {', '.join(self._routes) or 'none'}", name)
        return route

    def of(self, event_type: str) -> list[EventRoute]:
        """Routes that take events of a type."""
        return [route for route in self._routes.values() if route.takes(event_type)]


def items_of(
    event: SourceEvent, routes: Iterable[EventRoute], *, declared: int, require_metadata: bool = True
) -> list[OutboxItem]:
    """What an event becomes on these routes. `declared` is how many routes take such events at all. Pure.

    Raises whatever a mapper raises, UnreadableEvent for an event without its metadata, InvalidOption for a message that
    cannot be stored.
    """
    messages = [(route, message) for route in routes for message in _messages(route, route.mapper(event))]
    if not messages:
        return []
    fans_out = declared > 1 or len(messages) > 1
    metadata = event.metadata if require_metadata else _lenient_metadata(event)
    items = [_item(event, metadata, route, message, fans_out=fans_out) for route, message in messages]
    keys = [item.route_key or item.integration_type for item in items]
    for key in keys:
        # The fence would take the second for a repetition of the first, and nobody would ever get it.
        require("route_key", keys.count(key) == 1, "a route key of its own for each message about one event", key)
    return items


def _messages(route: EventRoute, mapped: Any) -> list[IntegrationMessage]:
    if mapped is None:
        return []
    if isinstance(mapped, IntegrationMessage):
        return [mapped]
    if isinstance(mapped, Mapping):
        return [IntegrationMessage(payload=mapped)]
    if isinstance(mapped, Iterable) and not isinstance(mapped, str | bytes):
        given = list(mapped)
        if all(isinstance(each, IntegrationMessage) for each in given):
            return given
    raise InvalidOption(
        f"what route {route.name!r} returned", "a mapping, IntegrationMessage, several, or None", mapped
    )


def _item(
    event: SourceEvent,
    metadata: EventMetadata | None,
    route: EventRoute,
    message: IntegrationMessage,
    *,
    fans_out: bool,
) -> OutboxItem:
    integration_type = message.integration_type or route.to
    if integration_type is None:
        raise InvalidOption("integration_type", f"one in each message of route {route.name!r}, or `to`", None)
    route_key = message.route_key or route.key
    headers = {**(metadata.headers if metadata is not None else {}), **(message.headers or {})}
    given = headers.pop(_KEY, None)
    # One key for two messages would let a target take the first and swallow the second.
    own = f"{given or event.id}/{route_key or integration_type}" if fans_out else str(given or event.id)
    return OutboxItem(
        integration_type=integration_type,
        event_type=message.event_type or event.type,
        payload=message.payload,
        source_stream_id=event.stream,
        source_event_id=event.id,
        route_key=route_key,
        headers=headers,
        tenant_id=None if metadata is None else metadata.tenant_id,
        user_id=None if metadata is None else metadata.user_id,
        correlation_id=None if metadata is None else metadata.correlation_id,
        ordering_key=message.ordering_key or (event.stream if route.ordered else None),
        delay=message.delay,
        max_attempts=message.max_attempts,
        backoff=message.backoff,
        idempotency_key=message.idempotency_key or own,
    )


def _lenient_metadata(event: SourceEvent) -> EventMetadata | None:
    """What there is of it. An event of somebody else's may have none; it is then told by its own id."""
    stored = event.raw_metadata
    if not isinstance(stored, Mapping):
        return None
    filled = {
        **stored,
        "correlationId": stored.get("correlationId") or event.id,
        "source": stored.get("source") or event.stream,
        "occurredAt": stored.get("occurredAt") or event.recorded_at.isoformat(),
    }
    return EventMetadata.from_wire(filled)


def _fits(pattern: str, event_type: str) -> bool:
    return event_type.startswith(pattern[:-1]) if pattern.endswith("*") else event_type == pattern


def _overlap(these: Iterable[str], those: Iterable[str]) -> bool:
    """Whether some event type fits a pattern of each."""
    return any(
        _fits(one, other.removesuffix("*")) or _fits(other, one.removesuffix("*")) for one in these for other in those
    )


def _check_since(since: Any) -> None:
    if isinstance(since, datetime):
        require("since", since.tzinfo is not None, "an aware datetime", since)
    elif isinstance(since, int) and not isinstance(since, bool):
        require("since", since >= BEGINNING, f"a position of at least {BEGINNING}", since)
    else:
        require("since", since in ("beginning", "now"), "'beginning', 'now', a position, or a datetime", since)
