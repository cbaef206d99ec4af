"""Moving from Celery, RQ and arq while both libraries run: no message is lost, and none is run twice.

The real other library sends and takes the messages, with some that are due later and some that fail once. Each library
is in an environment of its own, because it pins versions that others do not want. A hundred messages each, thousands
with BULLPEN_TEST_LONG.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from bullpen import Backoff, Bullpen
from bullpen.testing import Child, RedisServer
from tests.environments import EnvironmentMissing, other_environment

HERE = Path(__file__).parent / "moving"
ROOT = Path(__file__).resolve().parents[2]
MESSAGES: Final = 10_000 if os.environ.get("BULLPEN_TEST_LONG") else 100
PATIENCE_S: Final = 600 if os.environ.get("BULLPEN_TEST_LONG") else 120


@dataclass(frozen=True, slots=True)
class Library:
    """One of those that teams come from."""

    name: str
    requirement: str
    worker: Sequence[str]
    """The command behind the interpreter; `{}` is a name for the worker."""
    ready: str


LIBRARIES: Final = (
    Library(
        "celery",
        "celery[redis]==5.7.0",
        ("-m", "celery", "-A", "celery_shop", "worker", "--pool", "threads", "-c", "4", "-n", "{}@here", "-l", "INFO"),
        r"\bready\.",
    ),
    Library("rq", "rq==2.12.0", ("rq_shop.py", "work", "{}"), "ready"),
    Library("arq", "arq==0.28.0", ("arq_shop.py", "work"), "ready"),
)


@dataclass(slots=True)
class Shop:
    """A server, the other library's programs, and what has run."""

    library: Library
    python: Path
    server: RedisServer

    def worker(self, name: str, *, forwards: bool, wait: bool = False, visibility_s: int = 3600) -> Child:
        words = [word.format(name) for word in self.library.worker]
        more = {"SHOP_FORWARD": "wait" if wait else "yes"} if forwards else {}
        child = self.start(*words, **more, SHOP_VISIBILITY_S=str(visibility_s))
        child.wait_for(self.library.ready, timeout=60)
        return child

    async def produce(self, first: int, last: int) -> None:
        child = self.start(f"{self.library.name}_shop.py", str(first), str(last))
        code = await asyncio.to_thread(child.wait, PATIENCE_S)
        assert code == 0, child.output
        child.close()

    def start(self, *words: str, **environ: str) -> Child:
        """One of the programs, with its errors among its output."""
        known = {
            "SHOP_REDIS": self.server.url,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)]),
            "PYTHONWARNINGS": "ignore",
        }
        command = ["sh", "-c", 'exec "$0" "$@" 2>&1', str(self.python), *words]
        return Child(command, env={**known, **environ}, cwd=HERE)

    async def until_ran(self, count: int) -> Counter[str]:
        """Wait until as many messages have run; what ran them, and how often."""
        client = self.server.client()
        async with asyncio.timeout(PATIENCE_S):
            while int(client.llen("shop:ran")) < count:  # noqa: ASYNC110  # the list is on a server
                await asyncio.sleep(0.05)
        return Counter(each.decode() for each in client.lrange("shop:ran", 0, -1) if isinstance(each, bytes))


@asynccontextmanager
async def bullpen_worker(server: RedisServer) -> AsyncIterator[None]:
    """The task where it moved to, run here."""
    app = Bullpen(server.url)
    client = server.client()

    @app.task("receipts", attempts=5, backoff=Backoff.fixed(50))
    def send_receipt(number: int, *, to: str = "ada") -> str:
        if number % 10 == 0 and client.sadd("shop:tried", number):
            raise ConnectionError("try again")
        client.rpush("shop:ran", f"bullpen {number}")
        return f"receipt {number} to {to}"

    running = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await running


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def shop(request: pytest.FixtureRequest, start_server: Callable[[], RedisServer]) -> Shop:
    library: Library = request.param
    try:
        python = other_environment(library.name, library.requirement, "redis")
    except EnvironmentMissing as missing:
        pytest.skip(str(missing))
    return Shop(library, python, start_server())


only_celery = pytest.mark.parametrize("shop", LIBRARIES[:1], ids=lambda library: library.name, indirect=True)


async def test_each_message_runs_once_while_both_libraries_work(shop: Shop) -> None:
    """The day of the switch: an old worker, a worker that forwards, and producers that know of nothing."""
    async with AsyncExitStack() as stack:
        stack.enter_context(shop.worker("old", forwards=False))
        stack.enter_context(shop.worker("new", forwards=True))
        await stack.enter_async_context(bullpen_worker(shop.server))
        await shop.produce(0, MESSAGES)
        ran = await shop.until_ran(MESSAGES)

    numbers = Counter(int(each.split()[1]) for each in ran.elements())
    assert numbers == Counter(range(MESSAGES))
    assert {each.split()[0] for each in ran} == {shop.library.name, "bullpen"}


@pytest.mark.long  # Celery gives back what a dead worker held after a minute and a half, whatever its settings say
@only_celery
async def test_a_forwarder_that_is_killed_forgets_and_doubles_nothing(shop: Shop) -> None:
    """It may die between the add and the acknowledgment: the message comes again and finds its job. RQ and arq give it
    to nobody else by themselves."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bullpen_worker(shop.server))
        first = stack.enter_context(shop.worker("first", forwards=True, visibility_s=3))
        producing = asyncio.create_task(shop.produce(0, MESSAGES))
        await shop.until_ran(MESSAGES // 4)
        first.close()  # SIGKILL
        stack.enter_context(shop.worker("second", forwards=True, visibility_s=3))
        await producing
        ran = await shop.until_ran(MESSAGES)

    assert Counter(int(each.split()[1]) for each in ran.elements()) == Counter(range(MESSAGES))


@only_celery
async def test_callers_that_wait_for_celery_get_the_result_of_the_job(shop: Shop) -> None:
    """Chains and callers are moved last; until then `wait` hands the result on. Other tasks run in Celery as before."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bullpen_worker(shop.server))
        stack.enter_context(shop.worker("new", forwards=True, wait=True))
        asking = stack.enter_context(shop.start("celery_shop.py", "ask"))
        code = await asyncio.to_thread(asking.wait, PATIENCE_S)

    assert (code, asking.output.splitlines()) == (0, ["receipt 3 to grace", "8", "receipt 5 to ada"])
