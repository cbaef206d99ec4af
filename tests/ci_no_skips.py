"""In CI a skipped test is a failed test.

At home a test may skip because a server or a tool is missing on the machine. In CI (`CI=true`) everything is installed,
so a skip there means that a part of the product was not tested at all, and nobody would notice.

Loaded by `addopts` in pyproject.toml. Expected failures (`xfail`) are not skips and stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def _must_not_skip() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true"}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # pytest keeps the reason of a skip as (path, line, text).
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _turn_into_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and _must_not_skip():
        report.longrepr = f"skipped, which CI does not allow: {_reason(report)}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _turn_into_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself, by `importorskip` or at import, hides all of its tests."""
    report = yield
    _turn_into_failure(report)
    return report
