"""The garbage collector rests while the tests are collected, and never looks at them again.

Thousands of tests and all the modules they import stay until the end of the process, so looking through them, again
and again, finds nothing. What a test makes later is looked at as ever: a connection that is left open is found.
"""

from __future__ import annotations

import gc

import pytest


def pytest_configure() -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # the few cycles that are garbage already stay too: finding them takes longer than they are worth
    gc.enable()


def pytest_unconfigure() -> None:
    gc.enable()  # where the collecting failed
