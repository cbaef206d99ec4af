"""Whatever stands in a job, an event, a dead letter or an event store: reading one bad item raises an error of ours, or
nothing, and so harms only that item. Anything else would end the reader, and again after each restart."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.printable import printable_json
from bullpen.errors import NotJson, UnreadableEvent
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter
from bullpen.ports.source import SourceEvent
from bullpen.wire.events import QueueEvent
from bullpen.wire.options import WireOptions
from bullpen.wire.records import JobRecord

pytestmark = pytest.mark.requirement("X-101")

ODD = [
    *(b"[" * 5_000, b'{"a":' * 3_000, b"9" * 4_000, b"-" + b"9" * 5_000, b"nan", b"1e999", b"-0", b"NaN", b"0x10"),
    *(b"\xff\xfe", b'"\\ud800"', b"\xed\xa0\x80", b"\x00", b"", b"null", b"[]", b"{}", b"true", b'{"attempts": 1e999}'),
    *(b'{"attempts": [], "backoff": {"type": {}, "delay": "x"}}', b'{"backoff": ' + b"[" * 3_000, b'{"de": {"id": 7}}'),
    *(b'{"repeat": {"every": 1e400}}', b'{"kl": -1, "removeOnFail": {"age": {}}}', b'{"parent": 3, "tm": {}}'),
    *(b"bull:other:1", b":::", "٣".encode(), "\u202e".encode(), b" 7 ", b"1_000"),
]
odd = (
    st.sampled_from(ODD)
    | st.binary(max_size=60)
    | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))
)
FIELDS = [
    *(b"name", b"data", b"opts", b"progress", b"timestamp", b"delay", b"priority", b"atm", b"ats", b"attemptsMade"),
    *(b"stc", b"processedOn", b"finishedOn", b"returnvalue", b"failedReason", b"stacktrace", b"defa", b"parentKey"),
    *(b"parent", b"rjk", b"deid", b"bpdl", b"bpsolo", b"pb"),
]
READABLE = [name for name, value in vars(JobRecord).items() if isinstance(value, property)]


@given(st.dictionaries(st.sampled_from(FIELDS) | st.binary(max_size=8), odd, max_size=8))
def test_every_field_of_a_job_can_be_asked_for(fields: dict[bytes, bytes]) -> None:
    """`data` and the result may be no JSON, which has an error of its own."""
    record = JobRecord.parse("1", fields)

    for name in READABLE:
        try:
            getattr(record, name)
        except NotJson:
            assert name in ("data", "return_value", "progress", "decode_data"), name
    record.idempotency_key("orders")
    opts = WireOptions.parse(fields.get(b"opts", b"{}"))
    assert opts == WireOptions.parse(fields.get(b"opts", b"{}"))
    printable_json(record.to_json(), default=str)


@given(
    st.sampled_from([b"1-0", b"1717171717171-7", b"x", b"", b"-", b"9" * 400 + b"-1", b"\xff-\xff"]),
    st.lists(
        st.sampled_from([b"event", b"jobId", b"attemptsMade", b"returnvalue", b"data", b"prev"]) | odd, max_size=9
    ),
)
def test_every_entry_of_a_stream_is_an_event(entry_id: bytes, flat: list[bytes]) -> None:
    event = QueueEvent.parse(entry_id, flat)

    assert isinstance(event.event, str)
    assert event.is_final in (True, False)
    printable_json(event.to_json(), default=str)


@given(odd, odd)
def test_an_event_of_a_store_that_cannot_be_read_says_so(data: bytes, metadata: bytes) -> None:
    """A projector parks what raises UnreadableEvent and goes on; anything else would stop it at this event for good."""
    event = SourceEvent(
        id="1",
        stream="s-1",
        type="t",
        version=0,
        position=0,
        recorded_at=datetime.now(UTC),
        data_bytes=data,
        metadata_bytes=metadata,
    )

    for name in ("data", "metadata", "raw_metadata"):
        with contextlib.suppress(UnreadableEvent):
            getattr(event, name)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ENTRY = [
    *(
        "originalJobId",
        "originalJobName",
        "originalQueue",
        "originalData",
        "error",
        "failedAt",
        "attemptsMade",
        "cause",
    ),
    *("redriven", "tenantId", "errorMessage"),
]


@given(st.dictionaries(st.sampled_from(ENTRY), values, max_size=6))
def test_a_dead_letter_of_anybody_can_be_looked_at_and_searched(entry: dict[str, Any]) -> None:
    letter = DeadLetter.from_entry("dl-1-1", json.loads(json.dumps(entry)), source="orders")
    now = datetime.now(UTC)

    for where in (
        DeadLetterFilter(name="x"),
        DeadLetterFilter(error="x"),
        DeadLetterFilter(cause="x"),
        DeadLetterFilter(failed_after=now),
        DeadLetterFilter(failed_before=now),
    ):
        assert where.matches(letter) in (True, False)
    assert isinstance(letter.redriven, list)
    assert all(isinstance(each, str) for each in (letter.job_id, letter.job_name, letter.queue, letter.failed_at))
    assert isinstance(letter.attempts_made, int)
    assert letter.error_stack is None or isinstance(letter.error_stack, str)
    assert letter.cause is None or isinstance(letter.cause, str)
