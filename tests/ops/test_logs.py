"""Log lines for machines and for people: the same fields everywhere, nothing secret in any of them."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

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


def test_a_line_for_people_tells_each_thing_once() -> None:
    plain = logs.ConsoleFormatter(colour=False)
    coloured = logs.ConsoleFormatter(colour=True)

    line = plain.format(record("Job sent to DLQ: 7", logging.WARNING, jobId="7", tenantId="acme"))

    assert line.endswith("bullpen.test: Job sent to DLQ: 7 tenantId=acme")
    assert coloured.format(record("bad", logging.ERROR)).startswith("\x1b[31m")
    assert "\x1b" not in coloured.format(record("fine"))


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
