"""Which tests are measured for the coverage goals: measuring makes Python half as fast again, and tells nothing new the
second time.

Measured are the functions of the units, and of the first case of each other test in the folders of the parts. Not
measured: what pytest and fixtures do around them; further cases; what tries the same code again beside other clients
and faults; what runs the same code many times over, with examples that Hypothesis makes (but for units) or because it
is marked `many`; the processes that a test starts, unless it is marked `measures_children`. In: a test. Out: whether
`coverage` watches while it runs. Without `coverage` nothing happens.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

import bullpen
from bullpen.errors import MissingExtra

CASES: Final = "tests/unit/"
"""Where each case is about another line, and takes no time."""
AGAIN: Final = tuple(f"tests/{folder}/" for folder in ("bench", "chaos", "docs", "first_hour", "interop", "static"))
"""Folders that run once more what others run, or nothing of ours."""
MANY: Final = ("chaos", "test_year", "test_isolation", "test_admin_scale")
"""Files that run the same many times over."""
_CHILDREN: Final = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "measures_children: the processes that the test starts count for the coverage")
    config.addinivalue_line("markers", "many: runs the same code many times over, and is not measured for the coverage")
    config.pluginmanager.register(_Measured(), "measured tests")


class _Measured:
    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._around = contextlib.ExitStack()
        self._watch: _Watch | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """From here to the end only tests are measured: collecting runs nothing of ours but imports, which one process
        makes before."""
        if sys.gettrace() is None:
            return
        if getattr(session.config, "workerinput", {}).get("workerid", "gw0") == "gw0" and not _only_deals(session):
            _import_everything()
        self._watch = _Watch(sys.gettrace(), threading.gettrace())
        self._around.enter_context(_watched_by(_Watch(None, None)))

    def pytest_unconfigure(self) -> None:
        self._around.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with _children_watched(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        if self._watch is None or not self._is_measured(pyfuncitem):
            return (yield)
        with _watched_by(self._watch):
            return (yield)

    def _is_measured(self, item: pytest.Function) -> bool:
        function = item.function  # a contract has one function for all that keep it
        test = f"{function.__module__}.{function.__qualname__}"
        is_new = test not in self._seen
        self._seen.add(test)
        is_generated = getattr(function, "is_hypothesis_test", False) and not item.nodeid.startswith(CASES)
        is_many = is_generated or item.get_closest_marker("many") is not None
        return _is_measured(item.nodeid, is_new) and not is_many


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who is told of each line: here, and in threads that are started from now on."""

    here: Any
    threads: Any


@contextlib.contextmanager
def _watched_by(watch: _Watch) -> Iterator[None]:
    before = _Watch(sys.gettrace(), threading.gettrace())
    sys.settrace(watch.here)
    threading.settrace(watch.threads)
    try:
        yield
    finally:
        sys.settrace(before.here)
        threading.settrace(before.threads)


def _only_deals(session: pytest.Session) -> bool:
    """Whether other processes run the tests and this one gives them out."""
    return session.config.pluginmanager.has_plugin("dsession")


def _import_everything() -> None:
    for module in pkgutil.walk_packages(bullpen.__path__, "bullpen."):
        # What belongs to a project of Django needs that project's settings.
        is_of_project = module.name.startswith("bullpen.integrations.django.")
        if not is_of_project and not module.name.endswith("__main__") and ".migrations" not in module.name:
            with contextlib.suppress(ImportError, MissingExtra):  # whoever needs it says so
                importlib.import_module(module.name)


def _is_measured(test: str, is_new: bool) -> bool:
    file = test.partition("::")[0]
    if file.startswith(CASES):
        return True
    return is_new and not file.startswith(AGAIN) and not any(word in file for word in MANY)


@contextlib.contextmanager
def _children_watched(item: pytest.Item) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        if item.get_closest_marker("measures_children") is None:
            for name in _CHILDREN:
                environment.delenv(name, raising=False)
        yield
