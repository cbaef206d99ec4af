"""The event loops that the tests of timers and wake-ups run on, each test on all of them: `@pytest.mark.every_loop`.

asyncio's own; uvloop, which `bullpen run` uses where it is installed and whose timers count whole milliseconds; and one
whose timers all fire early, as a loop may do by the resolution of its clock. And each connection of asyncio's own loop
knows the test that opened it: one that is left open is found by the garbage collector, in whichever test comes then.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from asyncio import selector_events
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Final, TypeVarTuple, Unpack

import pytest

EARLY_S: Final = 0.0005

Ts = TypeVarTuple("Ts")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class EarlyLoop(asyncio.SelectorEventLoop):
    """Every timer fires half a millisecond before its time, and the loop's clock shows it."""

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when - EARLY_S, callback, *args, context=context)


def _factories() -> dict[str, LoopFactory]:
    found: dict[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop, "early": EarlyLoop}
    if importlib.util.find_spec("uvloop") is not None:
        found["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return found


FACTORIES: Final = _factories()
_ONE: Final[dict[str, LoopFactory]] = {"asyncio": asyncio.new_event_loop}


def _name_the_test_of_each_connection() -> None:
    transport = selector_events._SelectorTransport  # type: ignore[attr-defined]  # asyncio's own, told nowhere else
    made, described = transport.__init__, transport.__repr__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._extra["test"] = os.environ.get("PYTEST_CURRENT_TEST")

    transport.__init__ = make
    transport.__repr__ = lambda self: f"{described(self)} of {self._extra.get('test')}"


def pytest_configure(config: pytest.Config) -> None:
    _name_the_test_of_each_connection()
    config.addinivalue_line(
        "markers", "every_loop: run the test on asyncio's loop, on uvloop, and on a loop whose timers fire early"
    )


def loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """For the hook `pytest_asyncio_loop_factories` of a folder that has such tests. Not for all: where it is asked,
    what a session shares on its loop is made anew for each test."""
    return _ONE if item.get_closest_marker("every_loop") is None else FACTORIES
