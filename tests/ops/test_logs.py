"""Log lines for machines and for people: the same fields everywhere, nothing secret in any of them."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.log_formats import PrintableFormatter
from bullpen._kernel.logs import get_logger
from bullpen.errors import JobNotFound
from bullpen.ops import logs

PLANTED = (
    "password=hunter2hunter2",
    "redis://user:s3cr3tpass@host/0",
    "Bearer abcdefghijklmnop",
    "ada.lovelace@example.com",
    "whsec_c2VjcmV0c2VjcmV0",
)
SECRETS = ("hunter2hunter2", "s3cr3tpass", "abcdefghijklmnop", "ada.lovelace", "c2VjcmV0c2VjcmV0")


def record(
    message: str, level: int = logging.INFO, raised: BaseException | None = None, **extra: Any
) -> logging.LogRecord:
    made = logging.LogRecord("bullpen.test", level, __file__, 1, message, (), None)
    if raised is not None:
        try:
            raise raised
        except type(raised):
            made.exc_info = sys.exc_info()
    vars(made).update(extra)
    return made


@pytest.mark.requirement("X-24", "O-65", "R-36", "R-39")
def test_json_has_the_union_of_fields_in_one_order() -> None:
    everything: dict[str, Any] = {name: f"the {name}" for name in reversed(logs.FIELDS) if name != "message"}
    line = json.loads(logs.JsonFormatter().format(record("Job processed", **everything, attempts=3, absent=None)))

    assert [name for name in line if name in logs.FIELDS] == list(logs.FIELDS)
    assert {name: line[name] for name in everything} == everything
    assert (line["message"], line["level"], line["logger"], line["attempts"]) == (
        "Job processed",
        "info",
        "bullpen.test",
        3,
    )
    assert line["timestamp"].endswith("+00:00")
    assert "absent" not in line
    assert "stack" not in line


@pytest.mark.requirement("W-74", "O-70")
@pytest.mark.parametrize(
    "formatter", [logs.JsonFormatter(), logs.ConsoleFormatter(colour=False)], ids=["json", "console"]
)
def test_nothing_secret_is_written_wherever_it_stands(formatter: logging.Formatter) -> None:
    text = " ".join(PLANTED)
    line = formatter.format(record(f"sending to {text}", raised=ValueError(text), error=text, queue=text))

    assert [secret for secret in SECRETS if secret in line] == []
    assert "ValueError" in line
    assert "Traceback" in line


def test_a_line_for_people_has_the_fields_of_its_job_and_tells_the_rest_once() -> None:
    """Whoever searches for `jobId=7` must find every line of that job, also one that happens to say "17 s"."""
    plain = logs.ConsoleFormatter(colour=False)
    coloured = logs.ConsoleFormatter(colour=True)

    line = plain.format(record("Job 7 waited 17 s: no", logging.WARNING, jobId="7", tenantId="acme", error="no", of=1))

    assert line.endswith("bullpen.test: Job 7 waited 17 s: no jobId=7 tenantId=acme of=1")
    named = plain.format(record("OUTBOX_DELIVER SUCCESS tenantId=acme", tenantId="acme", jobId="7"))
    assert named.endswith("OUTBOX_DELIVER SUCCESS tenantId=acme jobId=7"), "what the text names so is not repeated"
    assert coloured.format(record("bad", logging.ERROR)).startswith("\x1b[31m")
    assert "\x1b" not in coloured.format(record("fine"))


@pytest.mark.parametrize("where", ["message", "field", "error"])
@pytest.mark.parametrize("kind", ["console", "coloured", "printable"])
def test_nobody_writes_a_line_of_his_own_making(where: str, kind: str) -> None:
    """A job's name or an error with a line break in it looked like a record of ours."""
    forged = "x\n2026-11-18 11:00:00.000 ERROR [1] bullpen.worker: all is lost"
    formatter = {
        "console": logs.ConsoleFormatter(colour=False),
        "coloured": logs.ConsoleFormatter(colour=True),
        "printable": PrintableFormatter("%(asctime)s %(levelname)s %(message)s"),
    }[kind]
    made = logging.LogRecord("shop", logging.INFO, "", 1, forged if where == "message" else "ready", None, None)
    if where == "field":
        made.jobName = forged
    if where == "error":
        made.exc_info = (ValueError, ValueError(forged), None)

    lines = formatter.format(made).splitlines()

    assert [line for line in lines[1:] if not line.startswith("    ")] == []


@pytest.mark.parametrize("as_json", [True, False])
def test_a_long_text_is_cut_before_it_is_scrubbed(as_json: bool) -> None:
    """Of a million characters that somebody chose, scrubbing made four seconds in which nothing else moved."""
    formatter = logs.JsonFormatter() if as_json else logs.ConsoleFormatter(colour=False)
    hostile = "name=password " * 80_000
    logger = get_logger("bullpen.test.long")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    try:
        logger.warning("failed: %s", hostile, extra={"reason": hostile})
    finally:
        logger.removeHandler(handler)
    foreign = logging.LogRecord("foreign", logging.INFO, "", 1, hostile, None, (ValueError, ValueError(hostile), None))

    assert len(out.getvalue()) < 50_000
    assert len(formatter.format(foreign)) < 50_000


def _luhn(digits: str) -> str:
    """The same number with the check digit of a card."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = int(digit) * 2 if place % 2 == 0 else int(digit)
        total += doubled - 9 if doubled > 9 else doubled
    return f"{digits}{-total % 10}"


IDS = st.one_of(
    st.uuids(version=4).map(str),
    st.uuids(version=4).map(lambda one: one.hex),
    st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=26, max_size=26),  # ULID
    st.integers(0, 10**19).map(str),
    st.integers(10**14, 10**18 - 1).map(lambda one: _luhn(str(one))),  # 16 to 19 digits, as cards have
    st.sampled_from(("sk-", "pk_", "ghp_", "AKIA", "order-", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.")).flatmap(
        lambda head: st.text("0123456789abcdefABCDEF", min_size=10, max_size=30).map(lambda tail: head + tail)
    ),
)
QUEUES = st.one_of(IDS, st.sampled_from(("reset-password", "token", "secret", "api-key")))


@given(job_id=IDS, queue=QUEUES, as_json=st.booleans())
def test_ids_and_queue_names_are_never_hidden(job_id: str, queue: str, as_json: bool) -> None:
    """A random id may look like a card's number or a key, and a queue may be called `token`: the line that says which
    job failed must say it, whichever formatter shows it. A secret beside it is hidden all the same."""
    written, theirs = io.StringIO(), io.StringIO()
    ours = logging.StreamHandler(written)
    ours.setFormatter(logs.JsonFormatter() if as_json else logs.ConsoleFormatter(colour=False))
    own = logging.StreamHandler(theirs)  # a program's own formatter
    lines, users = get_logger("bullpen.test.ids"), logging.getLogger("shop.ids")
    fields = {"jobId": job_id, "jobName": "mail", "queue": queue}
    for logger in (lines, users):
        logger.handlers, logger.propagate = [ours, own], False
        logger.setLevel(logging.INFO)

    lines.error("job %r (%s) of queue %r: %s", job_id, "mail", queue, ValueError("password=hunter2"), extra=fields)
    lines.error("queue %r: %s", queue, JobNotFound(queue, job_id), extra={"jobId": job_id, "queue": queue})
    lines.error("queue %r: it is back", queue)
    lines.error(f"dead letter of {job_id} at redis://bob:s3cretpass@host", extra=fields)
    users.error(f"charging for {job_id} with password=hunter2", extra=fields)

    shown = written.getvalue().splitlines()
    if as_json:
        entries = [json.loads(line) for line in shown]
        assert {entry["jobId"] for entry in entries if "jobId" in entry} == {job_id}
        assert {entry["queue"] for entry in entries if "queue" in entry} == {queue}
        shown = [entry["message"] for entry in entries]
    else:
        assert all(f"jobId={job_id}" in line for line in (*shown[:2], *shown[3:]))
    assert f"job '{job_id}' (mail) of queue '{queue}': password=***" in shown[0]
    assert f"queue '{queue}': job '{job_id}' of queue '{queue}' does not exist" in shown[1]
    assert f"queue '{queue}': it is back" in shown[2]
    assert f"dead letter of {job_id} at redis://***@host" in shown[3]
    assert f"charging for {job_id} with password=***" in shown[4]
    for seen in (written, theirs):
        assert "s3cretpass" not in seen.getvalue()
    assert f"job '{job_id}' (mail) of queue '{queue}': password=***" in theirs.getvalue()
    assert f"dead letter of {job_id} at redis://***@host" in theirs.getvalue()


def test_configuring_replaces_what_was_there() -> None:
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    try:
        logs.configure(stream, level=logging.WARNING, as_json=True)
        logging.getLogger("bullpen.shop").info("not wanted")
        logging.getLogger("bullpen.shop").warning("wanted", extra={"queue": "mails"})
    finally:
        logging.getLogger().handlers[:] = before
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["queue"] == "mails"
