"""Which queue and which channel serve a type, without any server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.ids import check_queue_name
from bullpen.errors import InvalidOption
from bullpen.outbox import Route, Router, queue_name, read_queue_name
from bullpen.queue import RateLimit
from tests.outbox.kit import SpyChannel

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)


@pytest.mark.requirement("O-42", "O-79")
@pytest.mark.parametrize(
    ("integration_type", "queue"),
    [
        ("kafka:payments", "outbox-kafka-payments"),
        ("webhook:partnerX", "outbox-webhook-partnerX"),
        ("email:transactional", "outbox-email-transactional"),
        ("kafka", "outbox-kafka"),
        ("kafka:a-b", "outbox-kafka-a%2Db"),
        ("kafka-a:b", "outbox-kafka%2Da-b"),
        ("kafka:a:b", "outbox-kafka-a%3Ab"),
        ("kafka:{x}", "outbox-kafka-%7Bx%7D"),
    ],
)
def test_a_type_has_a_queue_of_its_own(integration_type: str, queue: str) -> None:
    assert queue_name(integration_type) == queue
    assert read_queue_name(queue) == (integration_type, None)


@pytest.mark.requirement("O-72")
def test_a_tenant_may_have_a_queue_of_its_own() -> None:
    assert queue_name("kafka:payments", "acme") == "outbox-kafka-payments-acme"
    assert read_queue_name("outbox-kafka-payments-acme") == ("kafka:payments", "acme")
    assert read_queue_name("outbox-kafka--acme") == ("kafka", "acme")


@pytest.mark.requirement("X-84")
@given(names, names, st.none() | names)
def test_names_can_be_read_back_and_are_allowed(channel: str, name: str, tenant: str | None) -> None:
    """Two types that shared a queue would be delivered by each other's workers."""
    channel = channel.replace(":", "_")

    queue = queue_name(f"{channel}:{name}", tenant)

    assert check_queue_name(queue) == queue
    assert read_queue_name(queue) == (f"{channel}:{name}", tenant)


@pytest.mark.parametrize("queue", ["emails", "outbox", "outbox-", "outbox-a-b-c-d", "outbox-a-b c", "outbox-a-%2x"])
def test_queues_of_others_are_not_ours(queue: str) -> None:
    assert read_queue_name(queue) is None


@pytest.mark.parametrize("integration_type", ["", ":x", "kafka:"])
def test_a_type_without_channel_or_name_has_no_queue(integration_type: str) -> None:
    with pytest.raises(InvalidOption, match="integration_type"):
        queue_name(integration_type)


@pytest.mark.requirement("O-41", "O-79")
def test_the_whole_name_wins_over_the_pattern() -> None:
    special, general = Route(concurrency=1), Route(concurrency=2)
    router = Router({"webhook:partnerX": special, "webhook:*": general})

    assert router.resolve("webhook:partnerX") is special
    assert router.resolve("webhook:other") is general
    assert router.resolve("kafka:x") is None
    assert router.exact_types() == ["webhook:partnerX"]


@pytest.mark.parametrize("pattern", ["", "*", "*:x", "webhook:a*", "webhook:", ":*"])
def test_patterns_that_mean_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidOption, match="routes"):
        Router({pattern: Route()})


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"strategy": "carrier pigeon"}, "strategy"),
        ({"strategy": "direct"}, "channel"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"max_queued": 0}, "max_queued"),
        ({"strategy": "direct", "channel": SpyChannel, "split_tenants": True}, "split_tenants"),
        ({"strategy": "direct", "channel": SpyChannel, "rate_limit": RateLimit(1, 1)}, "rate_limit"),
    ],
)
def test_routes_that_make_no_sense_are_refused(options: dict[str, Any], option: str) -> None:
    if "channel" in options:
        options = {**options, "channel": options["channel"]()}
    with pytest.raises(InvalidOption, match=option):
        Route(**options)
