"""Fixtures for tests of programs that use bullpen; loaded by pytest wherever bullpen is installed.

In: `bullpen_app = "shop:app"` in pytest's configuration, or a fixture `bullpen_target` that returns the app. Out: the
fixture `bullpen_app`, that app on a private server which is empty when the test begins. Nothing is imported or started
before a test asks for it, and no test leaves a data directory behind. Async tests run with pytest-asyncio, with anyio,
or with neither. Elsewhere: what a test can do (`app`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.testing.app import AppTester
    from bullpen.testing.proxy import FaultProxy
    from bullpen.testing.servers import RedisServer

_DATA_DIR: Final = "BULLPEN_DATA_DIR"
_OURS: Final = "bullpen_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("bullpen_app", "the app that the fixture bullpen_app tests: module:name", default="")


def pytest_configure(config: pytest.Config) -> None:
    # A queue that a test makes without an address would start a server in the project, whose jobs the next run meets.
    if _DATA_DIR in os.environ:
        return
    directory = Path(tempfile.gettempdir()) / f"bullpen-pytest-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[_DATA_DIR] = str(directory)

    def forget() -> None:
        os.environ.pop(_DATA_DIR, None)
        shutil.rmtree(directory, ignore_errors=True)  # its server ends with this process

    config.add_cleanup(forget)


@pytest.fixture(scope="session")
def bullpen_server() -> Iterator[RedisServer]:
    """The private server of this test process: with pytest-xdist each has its own."""
    from bullpen.testing.servers import RedisServer

    with RedisServer.start() as server:
        yield server


@pytest.fixture
def bullpen_faults(bullpen_server: RedisServer) -> Iterator[FaultProxy]:
    """Stands between the app and its server in this test: delays, cuts, and loses requests and replies."""
    from bullpen.testing.proxy import FaultProxy

    with FaultProxy(bullpen_server) as proxy:
        yield proxy


@pytest.fixture
def bullpen_target(pytestconfig: pytest.Config) -> Bullpen:
    """The app to test; override it to say which. By default that of the ini option `bullpen_app`."""
    from bullpen.app import Bullpen

    named = pytestconfig.getini("bullpen_app")
    if not named:  # an empty app would run nothing, and tests that expect nothing would pass
        raise pytest.UsageError(
            'which app is tested? Set bullpen_app = "module:name" in the configuration of pytest '
            "([tool.pytest.ini_options] of pyproject.toml), or override the fixture bullpen_target"
        )
    module, _, name = named.partition(":")
    found = getattr(importlib.import_module(module), name or "app", None)
    if not isinstance(found, Bullpen):
        raise pytest.UsageError(f"bullpen_app: {named!r} is no Bullpen; write module:name")
    return found


@pytest.fixture
def bullpen_app(
    request: pytest.FixtureRequest, bullpen_server: RedisServer, bullpen_target: Bullpen
) -> Iterator[AppTester]:
    """The app under test: what was enqueued, running it, time, crashes. Its server is empty when the test begins."""
    from bullpen.testing.app import AppTester

    bullpen_server.flush()
    has_faults = "bullpen_faults" in request.fixturenames
    url = request.getfixturevalue("bullpen_faults").url if has_faults else bullpen_server.url
    tester = AppTester(bullpen_target, url, direct_url=bullpen_server.url)
    yield tester
    tester.close()


# ---- coroutines -----------------------------------------------------------------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let go of connections in the loop of the test: fixtures end when it is closed."""
    if isinstance(item, pytest.Function) and _OURS in item.fixturenames and inspect.iscoroutinefunction(item.obj):
        item.obj = _closing(item.obj)


def _closing(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        tester: AppTester = kwargs[_OURS]
        try:
            await test(*args, **kwargs)
        finally:
            await tester.aclose()

    return run


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine that no other plug-in runs."""
    if _OURS not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
