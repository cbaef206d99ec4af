"""Which tests are measured for the coverage goals: measuring makes Python half as fast again, and tells nothing new the
second time.

Measured is the first case of each test in the folders of the parts. Not measured: the further cases of a test with
parameters; what tries the same code again beside other clients and faults; the processes that a test
starts, unless it is marked `measures_children`. In: a test. Out: whether `coverage` watches while it runs. Without
`coverage` nothing happens.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

import pytest

AGAIN: Final = tuple(f"tests/{folder}/" for folder in ("bench", "chaos", "docs", "first_hour", "interop"))
"""Folders that run once more what others run."""
MANY: Final = ("chaos", "test_year", "test_isolation", "test_admin_scale")
"""Files that run the same many times over."""
_CHILDREN: Final = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "measures_children: the processes that the test starts count for the coverage")
    config.pluginmanager.register(_Measured(), "measured tests")


class _Measured:
    def __init__(self) -> None:
        self._seen: set[str] = set()

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
        watching, watching_threads = sys.gettrace(), threading.gettrace()
        if watching is None or (is_new and not _is_repeated(item.nodeid)):
            yield
            return
        sys.settrace(None)
        threading.settrace(None)
        try:
            yield
        finally:
            sys.settrace(watching)
            threading.settrace(watching_threads)


def _is_repeated(test: str) -> bool:
    file = test.partition("::")[0]
    return file.startswith(AGAIN) or any(word in file for word in MANY)


@contextlib.contextmanager
def _children_watched(item: pytest.Item) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        if item.get_closest_marker("measures_children") is None:
            for name in _CHILDREN:
                environment.delenv(name, raising=False)
        yield
