"""Exchanges, queues and the delay ladder as they are described: no broker needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.errors import InvalidOption
from bullpen.plugins.transports.rabbitmq import DelayLadder, QueueSpec, Topology
from bullpen.plugins.transports.rabbitmq.topology import AmqpExchange, DeclaredQueue, QueueBinding, matches

BIRTHDAY = Topology.scheduled_messages()


def queues(topology: Topology) -> dict[str, dict[str, Any]]:
    return {one.name: dict(one.arguments) for one in topology.declarations() if isinstance(one, DeclaredQueue)}


@pytest.mark.requirement("S-10", "S-11", "S-12", "S-39", "S-40")
def test_the_preset_has_the_names_of_scheduled_messages() -> None:
    made = list(BIRTHDAY.declarations())

    assert AmqpExchange("birthday.messages", "topic") in made
    assert AmqpExchange("birthday.messages.dlx", "direct") in made
    assert QueueBinding("birthday.messages", "birthday", queue="birthday.messages.queue") in made
    assert QueueBinding("birthday.messages", "anniversary", queue="birthday.messages.queue") in made
    assert QueueBinding("birthday.messages.dlx", "dlq", queue="birthday.messages.dlq") in made
    for name in ("birthday.messages.queue", "birthday.messages.dlq"):
        assert queues(BIRTHDAY)[name]["x-queue-type"] == "quorum"
        assert queues(BIRTHDAY)[name]["x-quorum-initial-group-size"] == 3


@pytest.mark.requirement("S-47", "S-48", "X-67", "X-68", "X-69")
def test_nothing_is_dropped_by_a_limit() -> None:
    """Expired and over-delivered messages go to the dead letters, confirmed; a full queue refuses."""
    arguments = queues(BIRTHDAY)["birthday.messages.queue"]

    assert arguments["x-message-ttl"] == 86_400_000
    assert arguments["x-max-length"] == 100_000
    assert arguments["x-overflow"] == "reject-publish"
    assert arguments["x-dead-letter-exchange"] == "birthday.messages.dlx"
    assert arguments["x-dead-letter-routing-key"] == "dlq"
    assert arguments["x-dead-letter-strategy"] == "at-least-once"
    assert arguments["x-delivery-limit"] > 6
    longer = Topology.scheduled_messages(ttl_ms=1_000, max_length=10)
    assert queues(longer)["birthday.messages.queue"]["x-message-ttl"] == 1_000
    assert queues(longer)["birthday.messages.queue"]["x-max-length"] == 10


@pytest.mark.requirement("S-13")
def test_a_new_category_touches_no_existing_queue() -> None:
    before = queues(BIRTHDAY)
    urgent = QueueSpec(name="urgent", routing_keys=("urgent.*",), dead_letter_queue="urgent-dlq")
    after = Topology(
        exchange=BIRTHDAY.exchange,
        dead_letter_exchange=BIRTHDAY.dead_letter_exchange,
        queues=(*BIRTHDAY.queues, urgent),
    )

    assert {name: queues(after)[name] for name in before} == before
    assert after.routing_key(urgent, "urgent.wedding") == "urgent.wedding"


def test_the_routing_key_is_the_name_where_the_queue_is_bound_to_it() -> None:
    spec = BIRTHDAY.queues[0]

    assert BIRTHDAY.routing_key(spec, "anniversary") == "anniversary"
    assert BIRTHDAY.routing_key(spec, "something else") == "birthday"


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.#", "a", True),
        ("a.#", "a.b.c", True),
        ("#.c", "a.b.c", True),
        ("#", "anything.at.all", True),
        ("*.b.*", "a.b", False),
    ],
)
def test_patterns_match_as_the_broker_matches_them(pattern: str, key: str, fits: bool) -> None:
    assert matches(pattern, key) is fits


def test_an_open_topology_makes_queues_by_convention() -> None:
    spec = Topology().spec("orders", dead_letter_queue="orders-dlq")

    assert (spec.routing_keys, spec.dead_letter_queue, spec.letter_key) == (("orders",), "orders-dlq", "orders-dlq")
    assert "x-message-ttl" not in spec.arguments("dlx")
    with pytest.raises(InvalidOption, match=r"one of birthday\.messages\.queue"):
        BIRTHDAY.spec("orders", dead_letter_queue=None)


def test_a_queue_without_dead_letters_has_no_dead_letter_exchange() -> None:
    spec = QueueSpec(name="orders", routing_keys=("orders",))

    assert not [name for name in spec.arguments("dlx") if name.startswith("x-dead-letter")]
    assert spec.letter_key is None


# ---- the ladder --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-24", "X-61", "X-62")
@pytest.mark.parametrize("seconds", [2, 4, 8, 16, 32])
def test_each_pause_of_the_schedule_is_one_rest_in_a_queue_of_its_own(seconds: int) -> None:
    ladder = DelayLadder()

    exchange, key, left_ms = ladder.route("orders", seconds * 1_000)

    assert exchange == ladder.entrance
    assert key.removesuffix(".orders").count("1") == 1
    assert left_ms == 0
    rests = {queue.name: queue.arguments for queue in ladder.declarations() if isinstance(queue, DeclaredQueue)}
    assert rests[f"bullpen.delay.1000x13.{seconds * 1_000}"]["x-message-ttl"] == seconds * 1_000


def walk(ladder: DelayLadder, key: str) -> tuple[int, str | None]:
    """Follow the declared bindings as the broker would: rested milliseconds, and the queue of the landing."""
    declared = [*ladder.declarations(), ladder.landing("orders"), ladder.landing("orders.eu")]
    arguments = {one.name: one.arguments for one in declared if isinstance(one, DeclaredQueue)}
    exchange, rested = ladder.entrance, 0
    while exchange != ladder.exit:
        (taken,) = [
            one
            for one in declared
            if isinstance(one, QueueBinding) and one.exchange == exchange and matches(one.routing_key, key)
        ]
        if taken.to_exchange is not None:
            exchange = taken.to_exchange
        else:
            assert taken.queue is not None
            rested += arguments[taken.queue]["x-message-ttl"]
            exchange = arguments[taken.queue]["x-dead-letter-exchange"]
    landings = [
        one.queue
        for one in declared
        if isinstance(one, QueueBinding) and one.exchange == exchange and matches(one.routing_key, key)
    ]
    assert len(landings) == 1
    return rested, landings[0]


@pytest.mark.requirement("X-62")
@given(delay_ms=st.integers(1, 200_000), queue=st.sampled_from(["orders", "orders.eu"]))
def test_every_delay_is_rested_in_full_and_lands_in_its_queue(delay_ms: int, queue: str) -> None:
    """Never early, at most one unit late, and what is longer than the ladder remains for another round."""
    ladder = DelayLadder(unit_ms=100, levels=10)

    _, key, left_ms = ladder.route(queue, delay_ms)
    rested_ms, landing = walk(ladder, key)

    assert landing == queue
    assert delay_ms <= rested_ms + left_ms < delay_ms + 100
    assert left_ms == max(0, delay_ms - ladder.longest_ms)


def test_ladders_of_another_size_share_no_name() -> None:
    """Declaring a queue with other arguments under a known name would be refused by the broker."""
    one, other = DelayLadder(), DelayLadder(levels=14)

    names = [
        {each.name for each in ladder.declarations() if isinstance(each, DeclaredQueue)} for ladder in (one, other)
    ]

    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: QueueSpec(name="", routing_keys=("a",)), "queue"),
        (lambda: QueueSpec(name="q", routing_keys=()), "routing_keys"),
        (lambda: QueueSpec(name="q", routing_keys="a"), "routing_keys"),  # type: ignore[arg-type]  # a common mistake
        (lambda: QueueSpec(name="q", routing_keys=("a",), ttl_ms=0), "ttl_ms"),
        (lambda: QueueSpec(name="q", routing_keys=("a",), max_length=-1), "max_length"),
        (lambda: QueueSpec(name="q", routing_keys=("a",), delivery_limit=0), "delivery_limit"),
        (lambda: DelayLadder(unit_ms=0), "delay_unit_ms"),
        (lambda: DelayLadder(levels=40), "delay_levels"),
        (lambda: DelayLadder(prefix=""), "delay_prefix"),
        (lambda: Topology(exchange=""), "exchange"),
        (lambda: Topology(exchange="x", dead_letter_exchange="x"), "dead_letter_exchange"),
        (lambda: Topology(queues=(QueueSpec(name="q", routing_keys=("a",)),) * 2), "each queue once"),
    ],
)
def test_a_wrong_description_is_refused_when_it_is_made(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(InvalidOption, match=complaint):
        make()
