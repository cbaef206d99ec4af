"""What an event becomes: pure functions from a stored event to messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen._kernel import json
from bullpen.errors import InvalidOption, UnreadableEvent
from bullpen.ledger import OutboxItem
from bullpen.outbox import EventRoute, EventRoutes, IntegrationMessage
from bullpen.outbox.mapping import items_of
from bullpen.ports.source import EventMetadata, SourceEvent

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def an_event(type: str = "payment.completed.v1", data: Any = None, metadata: Any = None, **fields: Any) -> SourceEvent:
    if metadata is None:
        metadata = EventMetadata(
            correlation_id="c-1",
            source="shop",
            tenant_id="acme",
            user_id="u-7",
            occurred_at=NOW,
            headers={"traceparent": "00-ab-cd-01"},
        ).to_wire()
    given = {
        "id": "e-1",
        "stream": "payment-17",
        "type": type,
        "version": 3,
        "position": 10,
        "recorded_at": NOW,
        "data_bytes": json.encode({"paymentId": 17, "card": "4111", "amount": 5} if data is None else data),
        "metadata_bytes": metadata if isinstance(metadata, bytes) else json.encode(metadata),
        **fields,
    }
    return SourceEvent(**given)


def payment_completed(event: SourceEvent) -> dict[str, Any]:
    return {"paymentId": event.data["paymentId"], "amount": event.data["amount"]}


def project(routes: EventRoutes, event: SourceEvent, **options: Any) -> list[OutboxItem]:
    taken = routes.of(event.type)
    return items_of(event, taken, declared=len(taken), **options)


def record(item: OutboxItem) -> dict[str, Any]:
    return item.to_record(default_attempts=10, strict=False)


@pytest.mark.requirement("O-30", "O-31", "O-33", "O-34", "O-35", "O-80", "O-3")
def test_a_mapped_event_becomes_a_row_with_its_source_type_ids_and_key() -> None:
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="kafka:payments", since="beginning")(payment_completed)

    (item,) = project(routes, an_event())

    assert item.payload == {"paymentId": 17, "amount": 5}  # what the mapper chose, and not what the event held
    assert (item.integration_type, item.event_type) == ("kafka:payments", "payment.completed.v1")
    assert (item.source_stream_id, item.source_event_id) == ("payment-17", "e-1")
    assert (item.correlation_id, item.tenant_id, item.user_id) == ("c-1", "acme", "u-7")
    assert item.delay == 0
    assert json.decode(record(item)["headers"]) == {"traceparent": "00-ab-cd-01", "idempotencyKey": "e-1"}
    assert record(item)["route_key"] == "kafka:payments"


@pytest.mark.requirement("O-30", "O-80")
def test_a_mapper_may_pass_an_event_over() -> None:
    routes = EventRoutes()
    routes.on("payment.*", to="kafka:payments", since="beginning", name="big")(
        lambda event: {"id": 1} if event.data["amount"] > 100 else None
    )

    assert project(routes, an_event()) == []
    assert project(routes, an_event("order.paid.v1")) == []
    assert len(project(routes, an_event(data={"amount": 500}))) == 1


@pytest.mark.requirement("X-122", "O-30", "O-35")
def test_an_event_with_two_routes_has_two_keys() -> None:
    """One key for both would let a target take the first and swallow the second."""
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="kafka:payments", since="beginning")(payment_completed)
    routes.on("payment.*", to="webhook:partnerX", since="beginning", name="partner")(payment_completed)

    items = project(routes, an_event())

    assert [item.idempotency_key for item in items] == ["e-1/kafka:payments", "e-1/webhook:partnerX"]
    assert [record(item)["route_key"] for item in items] == ["kafka:payments", "webhook:partnerX"]


@pytest.mark.requirement("X-122")
def test_the_key_does_not_depend_on_which_routes_were_live_at_the_time() -> None:
    """A route that is backfilled alone must not get the key that another route's message had."""
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="webhook:a", since="beginning", name="a")(payment_completed)
    routes.on("payment.completed.v1", to="webhook:b", since="now", name="b")(payment_completed)

    (alone,) = items_of(an_event(), [routes.get("b")], declared=2)

    assert alone.idempotency_key == "e-1/webhook:b"


@pytest.mark.requirement("O-30")
def test_one_mapper_may_give_several_messages() -> None:
    def both(event: SourceEvent) -> list[IntegrationMessage]:
        return [
            IntegrationMessage(integration_type="email:receipt", payload={"n": 1}, delay=5_000, max_attempts=3),
            IntegrationMessage(integration_type="slack:sales", payload={"n": 2}, event_type="sale.v1"),
        ]

    routes = EventRoutes()
    routes.on("payment.completed.v1", since="beginning")(both)

    first, second = project(routes, an_event())

    assert (first.integration_type, first.delay, first.max_attempts) == ("email:receipt", 5_000, 3)
    assert (second.integration_type, second.event_type) == ("slack:sales", "sale.v1")
    assert {first.idempotency_key, second.idempotency_key} == {"e-1/email:receipt", "e-1/slack:sales"}


@pytest.mark.requirement("O-27", "O-35", "X-122")
def test_a_key_of_the_events_own_is_kept_and_still_told_apart_by_route() -> None:
    metadata = {"correlationId": "c", "source": "s", "occurredAt": "2026-05-01T12:00:00Z"}
    event = an_event(metadata={**metadata, "headers": {"idempotencyKey": "mine", "x": "1"}})
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="webhook:a", since="beginning", name="a")(payment_completed)
    (alone,) = project(routes, event)
    routes.on("payment.completed.v1", to="webhook:b", since="beginning", name="b")(payment_completed)
    both = project(routes, event)

    assert json.decode(record(alone)["headers"]) == {"x": "1", "idempotencyKey": "mine"}
    assert [item.idempotency_key for item in both] == ["mine/webhook:a", "mine/webhook:b"]


def test_a_message_may_say_everything_itself() -> None:
    routes = EventRoutes()

    @routes.on("payment.completed.v1", to="webhook:a", since="beginning", key="k", ordered=True)
    def mapper(event: SourceEvent) -> IntegrationMessage:
        return IntegrationMessage(
            payload=[1], headers={"traceparent": "own"}, idempotency_key="exactly-this", route_key="r", backoff=100
        )

    (item,) = project(routes, an_event())

    assert item.idempotency_key == "exactly-this"
    assert item.route_key == "r"
    assert item.ordering_key == "payment-17"
    assert item.headers == {"traceparent": "own"}


@pytest.mark.requirement("O-27")
@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({}, "lacks correlationId, source, occurredAt"),
        ({"correlationId": "c", "source": "s"}, "lacks occurredAt"),
        ({"correlationId": "c", "source": "s", "occurredAt": "yesterday"}, "ISO 8601"),
        ({"correlationId": "c" * 121, "source": "s", "occurredAt": "2026-01-01T00:00:00Z"}, "correlationId"),
        ([1], "not a JSON object"),
        (b"{broken", "metadata is not JSON"),
        (b"\xff\xfe", "metadata is not JSON"),
    ],
)
def test_an_event_without_its_metadata_is_refused_and_says_why(metadata: Any, told: str) -> None:
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="kafka:payments", since="beginning")(payment_completed)

    with pytest.raises(UnreadableEvent, match=told):
        project(routes, an_event(metadata=metadata))


def test_an_event_that_nobody_wants_is_not_asked_for_its_metadata() -> None:
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="kafka:payments", since="beginning", name="none")(lambda event: None)

    assert project(routes, an_event(metadata=b"{broken")) == []


def test_metadata_may_be_optional() -> None:
    """For an event store that others filled long before."""
    routes = EventRoutes()
    routes.on("payment.completed.v1", to="kafka:payments", since="beginning")(payment_completed)

    (bare,) = project(routes, an_event(metadata={"tenantId": "acme"}), require_metadata=False)
    (none,) = project(routes, an_event(metadata=[]), require_metadata=False)

    assert (bare.correlation_id, bare.tenant_id) == ("e-1", "acme")
    assert (none.correlation_id, none.tenant_id) == (None, None)


def test_data_that_is_no_json_is_refused_when_a_mapper_looks_at_it() -> None:
    with pytest.raises(UnreadableEvent, match="data is not JSON"):
        payment_completed(an_event(data_bytes=b"\x00\x01"))


@pytest.mark.parametrize("wrong", [1, "text", [1], [{"a": 1}], b"x"])
def test_a_mapper_that_returns_nonsense_is_named(wrong: Any) -> None:
    routes = EventRoutes()
    routes.on("payment.*", to="kafka:payments", since="beginning", name="odd")(lambda event: wrong)

    with pytest.raises(InvalidOption, match="route 'odd' returned"):
        project(routes, an_event())


def test_messages_that_the_fence_could_not_tell_apart_are_refused() -> None:
    """The second would count as a repetition of the first, and nobody would ever get it."""
    routes = EventRoutes()
    routes.on("payment.*", to="webhook:a", since="beginning", name="twice")(
        lambda event: [IntegrationMessage(payload={}), IntegrationMessage(payload={})]
    )
    with pytest.raises(InvalidOption, match="route key of its own"):
        project(routes, an_event())

    routes.on("order.*", to="webhook:b", since="beginning", name="b")(payment_completed)
    with pytest.raises(InvalidOption, match="which takes the same events"):
        routes.on("order.paid.v1", to="webhook:b", since="beginning", name="c")(payment_completed)
    routes.on("order.paid.v1", to="webhook:b", since="beginning", name="c", key="second")(payment_completed)
    routes.on("account.*", to="webhook:b", since="beginning", name="d")(payment_completed)


def test_a_message_without_a_target_is_refused() -> None:
    routes = EventRoutes()
    routes.on("payment.*", since="beginning", name="nowhere")(lambda event: {"a": 1})

    with pytest.raises(InvalidOption, match="route 'nowhere'"):
        project(routes, an_event())


@pytest.mark.requirement("X-86")
@pytest.mark.parametrize("wrong", ["later", None, -2, True, datetime(2026, 1, 1)])  # noqa: DTZ001 - that is the point
def test_where_a_route_begins_must_be_said(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="since"):
        EventRoutes().on("payment.*", to="kafka:payments", since=wrong)(payment_completed)


@pytest.mark.parametrize(
    ("events", "options"),
    [
        ((), {}),
        (("",), {}),
        (("pay*ment",), {}),
        (("a",), {"name": "n" * 61}),
    ],
)
def test_routes_that_make_no_sense_are_refused(events: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        EventRoutes().on(*events, to="kafka:payments", since="now", **options)(payment_completed)


def test_routes_are_known_by_name() -> None:
    routes = EventRoutes([EventRoute(name="a", events=("x",), mapper=payment_completed, since=5, to="k:x")])

    assert [route.name for route in routes] == ["a"]
    with pytest.raises(InvalidOption, match="one of a"):
        routes.get("b")
    with pytest.raises(InvalidOption, match="no other route"):
        routes.add(routes.get("a"))
    with pytest.raises(InvalidOption, match="because the function has none"):
        routes.on("y", to="k:y", since="now")(lambda event: None)


@pytest.mark.requirement("X-86")
def test_a_route_is_live_behind_a_position_or_from_an_instant_on() -> None:
    route = EventRoute(name="a", events=("x",), mapper=payment_completed, since=0, to="k:x")

    assert not route.is_live(an_event(position=10), 10)
    assert route.is_live(an_event(position=11), 10)
    assert route.is_live(an_event(), NOW)
    assert not route.is_live(an_event(), NOW + timedelta(milliseconds=1))
