"""Turns wait by timers, and `bullpen run` uses uvloop where it is installed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.loops import LoopFactory, loop_factories


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    return loop_factories(item)
