"""The ledger: honest books pass, every kind of fault is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bullpen.testing import Child, JobBook, JobRun, RedisServer

pytestmark = [pytest.mark.leaves_queue_broken]

EVENTS = "bull:q:events"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[JobBook]:
    with JobBook(tmp_path / "ledger") as ledger:
        yield ledger


def _tell(client: redis.Redis, *events: str) -> None:
    """Write events given as `name job_id [prev]`."""
    for event in events:
        name, job_id, *prev = event.split()
        fields: dict[str, str] = {"event": name, "jobId": job_id}
        if prev:
            fields["prev"] = prev[0]
        client.xadd(EVENTS, fields)  # type: ignore[arg-type]  # redis-py's mapping is invariant in its keys


def _judge(ledger: JobBook, client: redis.Redis) -> None:
    ledger.read_events(client, "bull", "q")
    ledger.read_states(client, "bull", "q")


ONE_LIFE = ("added 1", "waiting 1", "active 1 waiting", "completed 1 active")


def test_a_whole_life_adds_up(ledger: JobBook, client: redis.Redis) -> None:
    """Retry, stall, delay, parents, manual retry: all of it is legal."""
    ledger.accepted("1", "2", "3", "4")
    ledger.ran("1", fence=1)
    ledger.ran("1", fence=2)
    _tell(
        client,
        *("added 1", "waiting 1", "active 1 waiting", "delayed 1", "waiting 1 delayed", "active 1 waiting"),
        *("progress 1", "waiting 1 active", "stalled 1", "active 1 waiting", "retries-exhausted 1", "failed 1 active"),
        *("waiting 1 failed", "active 1 waiting", "completed 1 active"),
        *("added 2", "waiting-children 2", "waiting 2 waiting-children", "active 2 waiting", "completed 2 active"),
        *("added 3", "delayed 3", "removed 3 delayed", "added 3", "waiting 3", "active 3 waiting", "failed 3 active"),
        *("added 4", "waiting 4", "active 4 waiting", "completed 4 active", "duplicated 4"),
    )
    client.xadd(EVENTS, {"event": "drained"})
    client.zadd("bull:q:completed", {"1": 1, "2": 1})
    client.zadd("bull:q:failed", {"3": 1})
    _judge(ledger, client)

    ledger.check()

    assert ledger.ended_ids == {"1", "2", "3", "4"}
    assert [(run.job_id, run.fence) for run in ledger.runs] == [("1", 1), ("1", 2)]
    assert str(ledger.report()) == "everything adds up"


def test_a_job_in_no_state_and_without_end_is_lost(ledger: JobBook, client: redis.Redis) -> None:
    """The promise that matters most."""
    ledger.accepted("1", "2")
    _tell(client, "added 1", "waiting 1")
    _judge(ledger, client)

    report = ledger.report()

    assert report.lost == ["'1' is in no state, last seen waiting", "'2' is in no state, no event names it"]
    with pytest.raises(AssertionError, match="the books of 2 accepted jobs do not add up\nlost, 2: '1' is in no state"):
        ledger.check()


def test_a_job_that_did_not_end_is_stuck(ledger: JobBook, client: redis.Redis) -> None:
    """Neither lost nor done is not good enough at the end of a run."""
    ledger.accepted("1")
    _tell(client, "added 1", "waiting 1", "active 1 waiting")
    ledger.read_events(client, "bull", "q")

    assert ledger.report().stuck == ["'1' was last seen active"]
    client.lpush("bull:q:active", "1")
    ledger.read_states(client, "bull", "q")
    assert ledger.report().stuck == ["'1' is in active"]


def test_two_ends_are_doubled_and_illegal(ledger: JobBook, client: redis.Redis) -> None:
    """A job is observed as done exactly once."""
    ledger.accepted("1")
    _tell(client, *ONE_LIFE, "completed 1 active")
    _judge(ledger, client)

    report = ledger.report()

    assert report.doubled == ["'1' ended 2 times: completed, completed"]
    assert report.illegal == ["'1' went from completed to completed (prev=active)"]


def test_runs_are_bounded_as_asked(ledger: JobBook, client: redis.Redis) -> None:
    """Extra runs are allowed for work in flight at a fault, and only so many."""
    ledger.accepted("1", "2")
    for job_id in ("1", "2"):
        _tell(client, *(event.replace("1", job_id, 1) for event in ONE_LIFE))
    ledger.ran("1")
    ledger.ran("1")
    ledger.ran("2", fence=7)
    ledger.ran("2", fence=7)
    _judge(ledger, client)

    assert ledger.report().doubled == ["'2' ran 2 times under fence 7"]
    assert "'1' ran 2 times, allowed are 1" in ledger.report(max_runs=1).doubled
    assert "2 runs were repetitions, allowed are 1" in ledger.report(max_extra_runs=1).doubled
    assert ledger.report(max_runs=2, max_extra_runs=2).doubled == ["'2' ran 2 times under fence 7"]


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        (("added 1", "active 1 waiting"), "'1' went from added to active (prev=waiting)"),
        (("waiting 1",), "'1' went from nowhere to waiting"),
        (("added 1", "waiting 1", "added 1"), "'1' went from waiting to added"),
        (("added 1", "waiting 1", "completed 1 active"), "'1' went from waiting to completed (prev=active)"),
        (("added 1", "waiting 1", "active 1 waiting", "active 1 waiting"), "'1' went from active to active"),
        (("added 1", "delayed 1", "waiting 1 active"), "'1' went from delayed to waiting (prev=active)"),
        ((*ONE_LIFE, "delayed 1"), "'1' went from completed to delayed"),
    ],
)
def test_transitions_that_nobody_may_make_are_named(
    ledger: JobBook, client: redis.Redis, events: tuple[str, ...], sentence: str
) -> None:
    """The event stream is what Node sees; it must tell a possible story."""
    ledger.accepted("1")
    _tell(client, *events)
    _judge(ledger, client)

    assert any(found.startswith(sentence) for found in ledger.report().illegal), ledger.report()


def test_what_nobody_accepted_is_unexpected(ledger: JobBook, client: redis.Redis) -> None:
    """A lost reply that was answered by a second add leaves a job that nobody knows."""
    _tell(client, *ONE_LIFE)
    _judge(ledger, client)

    assert ledger.report().unexpected == ["'1' was never accepted"]
    ledger.check(unexpected=False)


def test_a_long_report_names_the_first_and_counts_the_rest(ledger: JobBook, client: redis.Redis) -> None:
    """A thousand lost jobs are readable."""
    ledger.accepted(*(f"job-{number:03}" for number in range(30)))
    _judge(ledger, client)

    text = str(ledger.report())

    assert text.startswith("lost, 30: 'job-000' is in no state")
    assert text.endswith("(and 10 more)")


def test_trimmed_events_make_the_books_incomplete(ledger: JobBook, client: redis.Redis) -> None:
    """Missing pages are a finding of their own; what they hide is not called illegal."""
    if client.info("server")["redis_version"].startswith("6."):
        return  # before 7.0 the server does not tell
    ledger.accepted("1")
    _tell(client, *ONE_LIFE)
    client.xtrim(EVENTS, maxlen=2, approximate=False)
    _judge(ledger, client)

    assert ledger.report().illegal == ["events were trimmed before they were read; the books are incomplete"]


def test_events_trimmed_between_two_readings_are_noticed(ledger: JobBook, client: redis.Redis) -> None:
    """A reader that is too slow must say so."""
    if client.info("server")["redis_version"].startswith("6."):
        return
    ledger.accepted("1")
    _tell(client, *ONE_LIFE[:2])
    assert ledger.read_events(client, "bull", "q") == 2
    _tell(client, *ONE_LIFE[2:])
    client.xtrim(EVENTS, maxlen=1, approximate=False)
    _judge(ledger, client)

    assert "events were trimmed before they were read; the books are incomplete" in ledger.report().illegal


def test_events_are_followed_while_a_run_goes_on(ledger: JobBook, redis_url: str) -> None:
    """Long runs write more events than the stream keeps; also RESP3 is understood."""
    ledger.accepted("1")
    with redis.Redis.from_url(redis_url, protocol=3) as writer, redis.Redis.from_url(redis_url, protocol=3) as reader:
        with ledger.following(reader, "bull", "q"):
            _tell(writer, *ONE_LIFE)
            ledger.wait_for_ends()

        ledger.check()


def test_waiting_for_an_end_that_does_not_come_shows_the_books(ledger: JobBook, client: redis.Redis) -> None:
    """A run that hangs must say on which job."""
    ledger.accepted("1")
    _tell(client, *ONE_LIFE[:3])
    ledger.read_events(client, "bull", "q")

    with pytest.raises(AssertionError, match=r"not all of 1 accepted jobs ended within 0.01 s\nstuck, 1: '1' was last"):
        ledger.wait_for_ends(timeout=0.01)


def test_following_survives_a_dead_server(ledger: JobBook) -> None:
    """Chaos tests kill the server while somebody reads."""
    ledger.accepted("1")
    with RedisServer.start(persistent=True) as server, redis.Redis.from_url(server.url, protocol=2) as reader:
        with ledger.following(reader, "bull", "q"):
            _tell(server.client(), *ONE_LIFE[:2])
            server.kill()
            server.restart()
            _tell(server.client(), *ONE_LIFE[2:])
            ledger.wait_for_ends()

        ledger.check()


def test_many_processes_write_one_file(ledger: JobBook, tmp_path: Path) -> None:
    """Lines of different writers never mix, and a killed writer keeps what it wrote."""
    code = """
import sys
from bullpen.testing import JobBook
with JobBook(sys.argv[1]) as ledger:
    for number in range(300):
        ledger.ran(f"{sys.argv[2]}-{number}", fence=number)
    print("written", flush=True)
    input()
"""
    children = [Child.code(code, str(tmp_path / "ledger"), str(writer)) for writer in range(3)]
    for child in children:
        child.wait_for("written")
        child.kill()
        child.close()

    assert len(ledger.runs) == 900
    assert ledger.runs[0].pid in {child.pid for child in children}
    assert len({(run.job_id, run.fence) for run in ledger.runs}) == 900


def test_a_line_that_is_being_written_is_not_read_yet(ledger: JobBook, tmp_path: Path) -> None:
    """A reader may come in the middle of a write."""
    ledger.ran("1", fence=1)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b'{"ran": "2", "fen')

    assert [run.job_id for run in ledger.runs] == ["1"]
    assert isinstance(ledger.runs[0], JobRun)
