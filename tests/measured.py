"""Which tests are measured for the coverage goals: measuring makes Python half as fast again, and tells nothing new the
second time.

Measured are the units, and the first case of each other test in the folders of the parts. Not measured: its further
cases; what tries the same code again beside other clients and faults; what runs the same code many times over, with
examples that Hypothesis makes (but for units) or because it is marked `many`; the processes that a test starts, unless
it is marked `measures_children`. In: a test. Out: whether `coverage` watches while it runs. Without `coverage` nothing
happens.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from typing import Final

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
        self._collecting = contextlib.ExitStack()

    def pytest_sessionstart(self) -> None:
        """Collecting is not measured: it runs nothing of ours but imports, which are all made before."""
        if sys.gettrace() is not None:
            _import_everything()
            self._collecting.enter_context(_unwatched())

    def pytest_collection_finish(self) -> None:
        self._collecting.close()

    def pytest_unconfigure(self) -> None:
        self._collecting.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._watched(item), _children_watched(item):
            return (yield)

    @contextlib.contextmanager
    def _watched(self, item: pytest.Item) -> Iterator[None]:
        function = getattr(item, "function", None)  # a contract has one function for all that keep it
        test = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', item.nodeid)}"
        is_new = test not in self._seen
        self._seen.add(test)
        is_generated = getattr(function, "is_hypothesis_test", False) and not item.nodeid.startswith(CASES)
        is_many = is_generated or item.get_closest_marker("many") is not None
        with contextlib.nullcontext() if _is_measured(item.nodeid, is_new) and not is_many else _unwatched():
            yield


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    watching, watching_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(watching)
        threading.settrace(watching_threads)


def _import_everything() -> None:
    for module in pkgutil.walk_packages(bullpen.__path__, "bullpen."):
        if not module.name.endswith("__main__") and ".migrations" not in module.name:
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
