"""What a log shows of jobs: nobody should have to ask the server why something failed."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from bullpen.queue import Job
from tests.queue import _process_handlers
from tests.queue._kit import Failing, Gate, Kit, nothing

SECRETS = "password=hunter2 at postgresql://bob:s3cret@db/shop"


class Refused(Exception):
    """An error of the program's own."""


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "bullpen.worker")
    return caplog


def at(lines: pytest.LogCaptureFixture, level: int) -> list[logging.LogRecord]:
    return [record for record in lines.records if record.name == "bullpen.worker" and record.levelno == level]


async def test_each_failed_attempt_is_one_warning_and_the_last_one_an_error(
    kit: Kit, lines: pytest.LogCaptureFixture
) -> None:
    """A handler that raises is the first thing that anybody looks for in a log."""
    job = await kit.queue().add("charge", attempts=3, backoff={"type": "fixed", "delay": 20})

    await kit.drain(Failing(Refused("no 1"), Refused("no 2"), Refused("no 3")), 1)

    first, second = at(lines, logging.WARNING)
    (last,) = at(lines, logging.ERROR)
    assert first.getMessage() == (
        f"job '{job.id}' (charge) of queue '{kit.name}' failed in attempt 1 of 3, "
        "the next one is in 0.02 s: Refused: no 1"
    )
    assert "attempt 2 of 3" in second.getMessage()
    assert last.getMessage() == (
        f"job '{job.id}' (charge) of queue '{kit.name}' failed finally in attempt 3 of 3 (exhausted): Refused: no 3"
    )
    assert first.exc_info is None
    assert last.exc_info is not None
    assert last.exc_info[0] is Refused
    for number, record in enumerate((first, second, last), 1):
        fields = vars(record)
        assert (fields["jobId"], fields["jobName"], fields["queue"]) == (job.id, "charge", kit.name)
        assert (fields["attempt"], fields["error"]) == (number, f"no {number}")
    assert vars(first)["retryInMs"] == 20


async def test_a_retry_without_a_pause_says_so(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    kit.seed("of another client", opts='{"attempts": 2}')

    await kit.drain(Failing(Refused("no")), 1)

    (warning,) = at(lines, logging.WARNING)
    assert "the next one is due at once: Refused: no" in warning.getMessage()


async def test_start_and_end_are_debug_lines_with_the_duration(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    job = await kit.queue().add("charge", attempts=1)

    await kit.drain(nothing, 1)

    start, end = at(lines, logging.DEBUG)
    assert start.getMessage() == f"job '{job.id}' (charge) of queue '{kit.name}' starts, attempt 1 of 1"
    assert re.search(rf"job '{job.id}' \(charge\) of queue '{kit.name}' completed after \d+ ms", end.getMessage())
    assert vars(end)["durationMs"] >= 0


async def test_nothing_is_logged_of_a_good_job_at_the_usual_level(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.INFO, "bullpen.worker")
    await kit.queue().add("charge")

    await kit.drain(nothing, 1)

    assert [record for record in lines.records if record.name == "bullpen.worker"] == []


async def test_a_dead_letter_tells_its_error(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    """The line about the dead letter alone says nothing of the reason."""
    await kit.queue().add("charge", attempts=1)

    await kit.drain(Failing(Refused("card expired")), 1, dead_letters=True)

    (error,) = at(lines, logging.ERROR)
    assert "card expired" in error.getMessage()
    (letter,) = at(lines, logging.WARNING)
    assert "Job sent to DLQ" in letter.getMessage()


@pytest.mark.leaves_queue_broken
async def test_a_lost_lock_is_one_warning(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    job = await kit.queue().add("charge")
    gate = Gate()
    told = await kit.work(gate)
    await gate.reached()
    kit.redis.set(f"{kit.base}{job.id}:lock", "somebody else")

    gate.open()
    await told.wait("lock_lost")

    (warning,) = at(lines, logging.WARNING)
    assert f"job '{job.id}' of queue '{kit.name}': outcome not written, another worker has it" in warning.getMessage()
    assert vars(warning)["jobId"] == job.id


async def test_a_stall_and_a_suspect_are_warnings(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    kit.seed("poor", stc=1, ats=1, to="active")

    told = await kit.work(nothing, stalled_interval=100)
    await told.wait("completed")
    await told.wait("stalled")  # told by another thread

    (suspected,) = told.of("suspect")
    assert suspected[0].id == "poor"
    warnings = at(lines, logging.WARNING)
    (stall,) = [record for record in warnings if "stalled and was returned to the queue" in record.getMessage()]
    (suspect,) = [record for record in warnings if record is not stall]
    assert (vars(stall)["jobId"], vars(stall)["jobName"]) == ("poor", "foreign")
    assert "job 'poor' (foreign) of queue" in stall.getMessage()
    assert "stalled 2 times and may have killed its workers; from now on it runs alone" in suspect.getMessage()
    assert vars(suspect)["jobName"] == "foreign"


def raise_with_secrets() -> None:
    try:
        raise ConnectionError(SECRETS)
    except ConnectionError as error:
        raise Refused(f"cannot charge: {SECRETS}") from error


async def fail_with_secrets(job: Job) -> None:
    raise_with_secrets()


async def test_a_program_with_its_own_logging_gets_the_traceback_without_secrets(
    kit: Kit, lines: pytest.LogCaptureFixture
) -> None:
    """The standard library's formatter knows nothing of our scrubbing."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        await kit.queue().add("charge", attempts=1)
        await kit.drain(fail_with_secrets, 1)
    finally:
        logging.getLogger().removeHandler(handler)

    text = stream.getvalue()
    assert "hunter2" not in text
    assert "s3cret" not in text
    assert "Traceback (most recent call last)" in text
    assert "in raise_with_secrets" in text
    assert "ConnectionError: password=*** at postgresql://***@db/shop" in text
    assert f"{Refused.__module__}.Refused: cannot charge: password=***" in text
    (record,) = at(lines, logging.ERROR)
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    assert "s3cret" not in str(record.exc_info[1])
    assert "s3cret" not in str(record.exc_info[1].__cause__)


async def test_the_stack_of_a_child_process_is_in_the_error_line(kit: Kit, lines: pytest.LogCaptureFixture) -> None:
    await kit.queue().add("charge", {"how": "own"}, attempts=1)

    await kit.drain(_process_handlers.failing, 1, processes=True)

    (error,) = at(lines, logging.ERROR)
    text = logging.Formatter().format(error)
    assert "_process_handlers.py" in text
    assert "Overdrawn: balance is 3" in text
    assert error.exc_info is not None
    assert error.exc_info[0] is not None
    assert error.exc_info[0].__name__ == "Overdrawn"


class Recording(Transport):
    """Keeps what would be sent to Sentry."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is not None:
            self.events.append(dict(event))


@pytest.fixture
def sentry() -> Iterator[Recording]:
    transport = Recording()
    sentry_sdk.init(
        dsn="https://public@sentry.invalid/1",
        transport=transport,
        default_integrations=False,
        integrations=[LoggingIntegration()],
    )
    yield transport
    sentry_sdk.get_client().close()
    sentry_sdk.init(default_integrations=False)  # without an address: nothing is recorded from now on


async def test_sentry_gets_each_final_failure_with_its_traceback_and_attempts(kit: Kit, sentry: Recording) -> None:
    """With nothing but its usual logging integration."""
    job = await kit.queue().add("charge", attempts=2, backoff={"type": "fixed", "delay": 10})

    await kit.drain(fail_with_secrets, 1)

    (event,) = sentry.events
    cause, error = event["exception"]["values"]
    assert (cause["type"], error["type"]) == ("ConnectionError", "Refused")
    assert error["value"] == "cannot charge: password=*** at postgresql://***@db/shop"
    assert error["stacktrace"]["frames"][-1]["function"] == "raise_with_secrets"
    assert (event["level"], event["logger"]) == ("error", "bullpen.worker")
    assert (event["extra"]["jobId"], event["extra"]["attempt"]) == (job.id, 2)
    (crumb,) = [crumb for crumb in event["breadcrumbs"]["values"] if crumb["category"] == "bullpen.worker"]
    assert "failed in attempt 1 of 2" in crumb["message"]
    assert "hunter2" not in crumb["message"]


async def test_a_count_of_attempts_that_nobody_can_have_made_is_not_repeated(
    kit: Kit, lines: pytest.LogCaptureFixture
) -> None:
    """Another client stored it, or somebody put a used-up job back in line."""
    kit.seed("odd", opts='{"attempts": 2}', atm="9007199254740990", attemptsMade="9007199254740990")

    await kit.drain(Failing(KeyError("id")), 1)

    (error,) = at(lines, logging.ERROR)
    assert "failed finally in an attempt beyond its 2 (exhausted): KeyError: 'id'" in error.getMessage()
    assert not any("9007199254740991" in line.getMessage() for line in lines.records)
