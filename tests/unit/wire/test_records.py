"""Stored jobs, decoded."""

from __future__ import annotations

import json as standard
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.backoff import Backoff
from bullpen.errors import InvalidOption, NotJson
from bullpen.wire.records import USED_UP, JobRecord, check_job_name, check_progress, read_int

# A job as Node 6.7 leaves it after a failed and a successful attempt.
COMPLETED = {
    b"name": b"send-email",
    b"data": b'{"to":"ada@example.com"}',
    b"opts": b'{"attempts":3,"backoff":{"type":"exponential","delay":1000},"priority":5}',
    b"timestamp": b"1700000000000",
    b"delay": b"0",
    b"priority": b"5",
    b"processedOn": b"1700000002000",
    b"pb": b"host-1-ab",
    b"ats": b"2",
    b"atm": b"2",
    b"stc": b"1",
    b"failedReason": b"refused",
    b"stacktrace": b'["Error: refused"]',
    b"returnvalue": b'{"messageId":"abc"}',
    b"finishedOn": b"1700000003000",
    b"progress": b"50",
}

field_names = st.sampled_from(
    [*COMPLETED, *b"defa parent parentKey rjk deid attemptsMade stalledCounter bpdl bpsolo workerId".split()]
)


@pytest.mark.requirement("Q-1", "Q-12", "X-11")
def test_a_completed_job_is_read_with_all_its_fields() -> None:
    """Node's names on the wire, ours in Python."""
    job = JobRecord.parse("7", COMPLETED)

    assert (job.id, job.name, job.data) == ("7", "send-email", {"to": "ada@example.com"})
    assert (job.opts.attempts, job.opts.backoff) == (3, Backoff.exponential(1_000))
    assert (job.progress, job.delay, job.priority, job.timestamp) == (50, 0, 5, 1_700_000_000_000)
    assert (job.attempts_made, job.attempts_started, job.stalled_count) == (2, 2, 1)
    assert (job.processed_on, job.finished_on, job.worker_id) == (1_700_000_002_000, 1_700_000_003_000, "host-1-ab")
    assert (job.return_value, job.stacktrace) == ({"messageId": "abc"}, ("Error: refused",))
    assert job.exists and job.has_return_value


@pytest.mark.requirement("Q-1", "Q-10", "X-33")
def test_a_job_with_nothing_has_defaults_everywhere() -> None:
    """Times are 0 when unset, data is an empty object."""
    job = JobRecord.parse("7", {})

    assert not job.exists and not job.has_return_value
    assert (job.name, job.data, job.progress, job.delay, job.priority) == ("", {}, 0, 0, 0)
    assert (job.timestamp, job.processed_on, job.finished_on) == (0, 0, 0)
    assert (job.attempts_made, job.attempts_started, job.stalled_count, job.solo_fence) == (0, 0, 0, 0)
    assert (job.worker_id, job.return_value, job.failed_reason, job.stacktrace) == (None, None, None, ())
    assert (job.parent_key, job.parent, job.scheduler_id, job.deduplication_id) == (None, None, None, None)
    assert (job.deferred_failure, job.dead_letter_id, job.raw_data, job.raw_opts) == (None, None, b"{}", b"{}")
    assert job.opts.attempts == 1


def test_the_reply_may_be_a_mapping_or_flat_of_bytes_or_text() -> None:
    """RESP2, RESP3, and clients that decode."""
    flat = [part for pair in COMPLETED.items() for part in pair]
    decoded = {name.decode(): value.decode() for name, value in COMPLETED.items()}

    assert JobRecord.parse("7", flat) == JobRecord.parse("7", decoded) == JobRecord.parse("7", COMPLETED)
    assert JobRecord.parse("7", {"name": "x", "atm": 3, "defa": None}) == JobRecord("7", {b"name": b"x", b"atm": b"3"})


@pytest.mark.requirement("X-99", "Q-16")
def test_the_reason_of_an_earlier_failure_is_not_told_of_a_completed_job() -> None:
    """Node leaves it beside the return value; one of the two is enough."""
    completed = JobRecord.parse("7", COMPLETED)
    retrying = JobRecord.parse("7", {name: value for name, value in COMPLETED.items() if name != b"returnvalue"})

    assert (completed.failed_reason, completed.raw_failed_reason) == (None, "refused")
    assert retrying.failed_reason == "refused"
    assert "failedReason" not in completed.to_json()


@pytest.mark.requirement("X-11")
@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({b"atm": b"2"}, 2),
        ({b"attemptsMade": b"3", b"atm": b"2"}, 3),
        ({b"attemptsMade": b"", b"atm": b"2"}, 2),
        ({b"attemptsMade": b"0", b"atm": b"2"}, 2),
        ({b"atm": b"-1"}, 0),
        ({b"atm": b"many"}, USED_UP),
        ({b"atm": b"nan"}, USED_UP),
        ({b"attemptsMade": b"inf", b"atm": b"1"}, USED_UP),
        ({b"atm": b"9" * 5_000}, USED_UP),
    ],
)
def test_attempts_made_is_the_greater_of_the_old_and_the_new_name(fields: dict[bytes, bytes], made: int) -> None:
    """Old versions wrote the long name. Node takes it alone where it stands, and tries such a job for ever."""
    assert JobRecord.parse("7", fields).attempts_made == made


@pytest.mark.requirement("X-11")
def test_names_of_older_versions_are_read() -> None:
    """Their jobs may still wait in a queue."""
    job = JobRecord.parse("7", {b"workerId": b"w", b"stalledCounter": b"2"})

    assert (job.worker_id, job.stalled_count) == ("w", 2)


def test_data_is_decoded_once_and_only_when_asked_for() -> None:
    """Most reads of a job do not look at its payload."""
    job = JobRecord.parse("7", {b"data": b'{"a":[1]}'})

    assert job.data is job.data
    assert job.raw_data == b'{"a":[1]}'


@pytest.mark.parametrize("raw", [b"{", b"undefined", b"\xff"])
def test_data_that_is_no_json_raises_not_json_and_is_shown_as_text(raw: bytes) -> None:
    """A permanent failure with a dead letter, never a dead worker."""
    job = JobRecord.parse("7", {b"name": b"x", b"data": raw})

    with pytest.raises(NotJson, match="data: expected JSON"):
        _ = job.data

    assert job.to_json()["data"] == raw.decode("utf-8", "replace")


def test_null_is_data() -> None:
    """Node stores it when a producer gives null; absent is something else."""
    assert JobRecord.parse("7", {b"data": b"null"}).data is None


@given(st.dictionaries(field_names, st.binary(max_size=30) | st.sampled_from([b"[1]", b'{"id":1}', b"1e400", b"NaN"])))
def test_whatever_stands_in_a_hash_can_be_read(fields: dict[bytes, bytes]) -> None:
    """Every property but `data` has an answer for anything."""
    job = JobRecord.parse("7", fields)

    for name in dir(JobRecord):
        if isinstance(getattr(JobRecord, name), property) and name != "data":
            getattr(job, name)
    assert job.to_json()["id"] == "7"
    assert repr(job).startswith("JobRecord(id='7'")


def test_flow_scheduler_and_deduplication_fields_are_read() -> None:
    """Jobs made by Node carry them, and settling such a job needs them."""
    job = JobRecord.parse(
        "7",
        {
            b"parentKey": b"bull:parents:1",
            b"parent": b'{"id":"1","queueKey":"bull:parents","fpof":true}',
            b"rjk": b"nightly",
            b"deid": b"user-1",
            b"defa": b"child failed",
            b"bpdl": b"dl-7-1",
            b"bpsolo": b"3",
        },
    )

    assert (job.parent_key, job.parent) == ("bull:parents:1", {"id": "1", "queueKey": "bull:parents", "fpof": True})
    assert (job.scheduler_id, job.deduplication_id, job.deferred_failure) == ("nightly", "user-1", "child failed")
    assert (job.dead_letter_id, job.solo_fence, job.field(b"rjk"), job.field(b"x")) == ("dl-7-1", 3, b"nightly", None)


@pytest.mark.requirement("Q-13", "Q-29", "Q-68", "X-11")
def test_as_json_a_job_has_the_names_of_the_wire_and_nothing_that_is_unset() -> None:
    """What the dashboard and the API show. The lock token is never part of a record."""
    fresh = JobRecord.parse("7", {b"name": b"x", b"data": b"{}", b"opts": b'{"attempts":1}', b"timestamp": b"5"})

    assert fresh.to_json() == {
        "id": "7",
        "name": "x",
        "data": {},
        "opts": {"attempts": 1},
        "progress": 0,
        "delay": 0,
        "timestamp": 5,
        "attemptsMade": 0,
    }
    assert JobRecord.parse("7", COMPLETED).to_json() == {
        "id": "7",
        "name": "send-email",
        "data": {"to": "ada@example.com"},
        "opts": {"attempts": 3, "backoff": {"type": "exponential", "delay": 1000}, "priority": 5},
        "progress": 50,
        "delay": 0,
        "timestamp": 1_700_000_000_000,
        "attemptsMade": 2,
        "processedOn": 1_700_000_002_000,
        "finishedOn": 1_700_000_003_000,
        "workerId": "host-1-ab",
        "stacktrace": ["Error: refused"],
        "returnvalue": {"messageId": "abc"},
    }


def test_a_null_return_value_is_a_return_value() -> None:
    """A handler that returns nothing has still completed its job."""
    job = JobRecord.parse("7", {b"name": b"x", b"returnvalue": b"null", b"failedReason": b"old"})

    assert job.to_json()["returnvalue"] is None
    assert job.failed_reason is None


@pytest.mark.requirement("X-123")
def test_the_idempotency_key_has_the_creation_time() -> None:
    """Counter ids start again on a new server, and a payment provider would swallow the new payment."""
    before = JobRecord.parse("1", {b"timestamp": b"1700000000000"})
    after = JobRecord.parse("1", {b"timestamp": b"1800000000000"})

    assert before.idempotency_key("payments") == "payments/1/1700000000000"
    assert before.idempotency_key("payments") != after.idempotency_key("payments")


def test_records_are_frozen_values_that_do_not_print_payloads() -> None:
    """They end up in logs and sets."""
    job = JobRecord.parse("7", COMPLETED)

    with pytest.raises(AttributeError, match="frozen: id cannot be set"):
        job.id = "8"
    with pytest.raises(AttributeError, match="frozen: id cannot be deleted"):
        del job.id

    assert job == JobRecord.parse("7", COMPLETED) != JobRecord.parse("8", COMPLETED)
    assert hash(job) == hash(JobRecord.parse("7", COMPLETED))
    assert "ada" not in repr(job)


@pytest.mark.parametrize(
    ("raw", "number"), [(b"5", 5), (b"-5", -5), (b"5.9", 5), (b"1e3", 1000), (b"", 0), (b"x", 0), (b"inf", 0), ("7", 7)]
)
def test_numbers_of_a_hash_are_read_or_zero(raw: bytes | str, number: int) -> None:
    """Lua writes large numbers with an exponent; nonsense must not raise."""
    assert read_int(raw) == number


@pytest.mark.requirement("Q-3", "X-33")
@pytest.mark.parametrize("name", ["", None, 5, b"x", "\ud800"])
def test_a_job_needs_a_name(name: Any) -> None:
    """Node runs a job without one as nameless."""
    assert check_job_name("send-email") == "send-email"

    with pytest.raises(InvalidOption, match="name: expected non-empty text"):
        check_job_name(name)


@pytest.mark.requirement("Q-6", "X-34")
@pytest.mark.parametrize("value", [0, 100, 33.3, True, "half", [1, 2], {"step": "upload", "message": "half way"}, {}])
def test_progress_is_a_number_to_a_hundred_or_other_json(value: Any) -> None:
    """Objects carry what a number cannot say."""
    assert standard.loads(check_progress(value)) == value


@pytest.mark.requirement("Q-6", "X-34")
@pytest.mark.parametrize("value", [-1, 101, None, {1}, math.nan, {"message": 5}, {"x": math.inf}])
def test_other_progress_is_refused(value: Any) -> None:
    """An invalid one in an event would end Node's listeners."""
    with pytest.raises(InvalidOption, match="progress"):
        check_progress(value)


@pytest.mark.requirement("X-34")
@pytest.mark.parametrize(("raw", "value"), [(b"250", 250), (b'"half"', "half"), (b"{", 0), (b"true", True), (b"", 0)])
def test_foreign_progress_is_read_as_it_is(raw: bytes, value: Any) -> None:
    """Node allows any JSON."""
    assert JobRecord.parse("7", {b"progress": raw}).progress == value
