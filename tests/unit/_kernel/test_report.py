"""One line for people and one event for machines, with the same habits everywhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.report import Reporter


def test_a_line_carries_its_fields_and_leaves_out_absent_ones(caplog: pytest.LogCaptureFixture) -> None:
    """A JSON line with `"urn": null` would match a search for messages that have one."""
    reporter = Reporter("bullpen.test")

    with caplog.at_level(logging.INFO, "bullpen.test"):
        reporter.log(logging.INFO, "100 % done", jobId="7", urn=None, count=0)

    [record] = caplog.records
    assert record.getMessage() == "100 % done"
    assert (vars(record)["jobId"], vars(record)["count"]) == ("7", 0)
    assert "urn" not in vars(record)


def test_an_error_brings_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("broken")

    Reporter("bullpen.test").log(logging.ERROR, "it failed", error)

    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[1] is error


def test_every_event_has_the_common_fields() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    forget = telemetry.subscribe(lambda event, fields: seen.append((event, fields)))

    Reporter("bullpen.test", transport="memory").emit("transport.checked", is_connected=True)

    forget()
    assert seen == [("transport.checked", {"transport": "memory", "is_connected": True})]
