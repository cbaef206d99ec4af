"""Kafka records and commits as anybody may have written them: no broker needed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.plugins._kafka import KafkaRecord, Partition
from bullpen.plugins.transports.kafka._records import PAUSE_HEADER, Trouble, delivery_of, parked_for_s

DAY_S = 86_400.0


def record(topic: str = "orders", timestamp_ms: int = 0, **headers: bytes) -> KafkaRecord:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return KafkaRecord(Partition(topic, 0), 7, b"urn:1", b"{}", named, timestamp_ms)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@given(failures=st.integers(0, 999), rest_ms=st.integers(0, 10**9))
def test_trouble_survives_its_commit(failures: int, rest_ms: int) -> None:
    trouble = Trouble.begins(7, failures, rest_ms)

    assert Trouble.read(7, trouble.metadata()) == trouble


@given(st.text(st.characters(codec="ascii")))
def test_metadata_of_others_is_no_trouble(metadata: str) -> None:
    assert Trouble.read(7, metadata) is None or metadata.startswith("bullpen:")


@pytest.mark.parametrize(
    "metadata",
    ["bullpen:failures=-1,rest=0,until=0", "bullpen:failures=1", "bullpen:failures=99999999999,rest=1,until=1", ""],
)
def test_odd_metadata_is_no_trouble(metadata: str) -> None:
    assert Trouble.read(7, metadata) is None


def test_another_clock_never_makes_a_rest_longer_than_it_was() -> None:
    ahead = Trouble(7, 1, rest_ms=500, until_ms=now_ms() + 3_600_000)
    behind = Trouble(7, 1, rest_ms=500, until_ms=now_ms() - 3_600_000)

    assert ahead.left_s() == 0.5
    assert behind.left_s() == 0.0


def test_trouble_of_another_record_says_nothing_about_this_one() -> None:
    assert delivery_of(record(), "orders", Trouble(6, 3, 0, 0), None).attempt == 1
    assert delivery_of(record(), "orders", Trouble(7, 3, 0, 0), None).attempt == 4


def test_a_parked_record_rests_from_its_timestamp() -> None:
    parked = record("orders-retry-1", now_ms(), x_bullpen_pause=b"60000")

    assert 10 < parked_for_s(parked, "orders") <= 60
    assert parked_for_s(record("orders-retry-1", now_ms() - 5_000, x_bullpen_pause=b"1000"), "orders") == 0.0
    assert parked_for_s(record("orders", now_ms(), x_bullpen_pause=b"1000"), "orders") == 0.0


@given(pause=st.binary(max_size=30), timestamp_ms=st.integers(-(2**62), 2**62))
def test_no_header_and_no_timestamp_holds_a_partition_for_ever(pause: bytes, timestamp_ms: int) -> None:
    parked = KafkaRecord(Partition("orders-retry-1", 0), 7, b"urn:1", b"{}", ((PAUSE_HEADER, pause),), timestamp_ms)

    assert 0.0 <= parked_for_s(parked, "orders") <= DAY_S


@given(
    key=st.none() | st.binary(),
    value=st.none() | st.binary(),
    headers=st.lists(st.tuples(st.text(st.characters(codec="ascii")), st.binary()), max_size=3),
)
def test_any_record_becomes_a_delivery(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    delivery = delivery_of(KafkaRecord(Partition("orders", 0), 7, key, value, tuple(headers), 0), "orders", None, None)

    assert delivery.id
    assert delivery.attempt >= 1
    assert delivery.problem is not None or delivery.urn
