"""Every service of the package is started and stopped in any order: it ends, leaves nothing, and says what is wrong."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import re
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

import bullpen
from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen._kernel.service import BaseService
from bullpen.app import Bullpen
from bullpen.http.serve import HttpService
from bullpen.messages import Messages, MessageSender
from bullpen.messages.enqueuer import Scheduler
from bullpen.ops.recorder import Recorder
from bullpen.outbox import DeliveryWorkers, Dispatcher, EventRoutes, Projector
from bullpen.plugins._consumer import MessagingConsumer
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.bindings import AnyEvent, AnyTransport
from bullpen.ports.channel import Accepted, Message
from bullpen.ports.source import SourceEvent
from bullpen.ports.transport import Receipt
from bullpen.queue import Job
from bullpen.runs import Run, RunMaintenance, RunWorker
from bullpen.settings import Settings
from bullpen.wiring.alerts import AlertService
from bullpen.wiring.messages import MessageService
from bullpen.wiring.outbox import OutboxService
from bullpen.wiring.projector import ProjectorService
from bullpen.wiring.runs import RunsService
from bullpen.wiring.schedules import ScheduleService
from bullpen.worker import Worker
from bullpen.workflow import Workflow
from tests.workflow.kit import Event, Shelf, define

# Workers look at queues that nobody has added to.
pytestmark = pytest.mark.leaves_queue_broken

ENOUGH_S = 30.0
ORDERS = AnyTransport(events=[AnyEvent(source="orders", event=Event.PAY)])
S = TypeVar("S")


class Startable(Protocol):
    """What the suite calls."""

    async def start(self) -> None: ...
    async def run(self, *, signals: bool | None = None) -> None: ...
    async def close(self, timeout: int | timedelta | None = None) -> None: ...


# How each is made ---------------------------------------------------------------------------------------------------


def found(app: Bullpen, kind: type[S]) -> S:
    return next(service for service in app.services if isinstance(service, kind))


def with_outbox(app: Bullpen) -> Bullpen:
    app.use_outbox().route("webhook:*", Nowhere())
    return app


class Nowhere:
    """A channel to nowhere."""

    async def send(self, message: Message) -> Accepted:
        return Accepted()

    async def check(self) -> Any: ...

    async def aclose(self) -> None: ...


def routes() -> EventRoutes:
    made = EventRoutes()

    @made.on("payment.*", to="webhook:partner", since="beginning")
    def payment(event: SourceEvent) -> dict[str, Any]:
        return {}

    return made


def with_messages(app: Bullpen) -> Messages:
    messages = app.use_messages()
    if not messages.routes:
        messages.channel("email", after_crash="same_key")(ignore)
        messages.occasion("birthday", text="Hello {name}")
    return messages


async def ignore(_: Any) -> None:
    """Handles everything."""


async def handle(job: Job) -> None:
    """Handles every job."""


async def handle_run(run: Run) -> None:
    """Handles every run."""


def with_runs(app: Bullpen) -> Bullpen:
    app.use_runs().handler(handle_run)
    return app


def schedules(app: Bullpen) -> ScheduleService:
    @app.task("ticks", every="1h")
    async def tick() -> None: ...

    app.choose()
    return found(app, ScheduleService)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that nobody asks."""


def consumer(_: Bullpen) -> MessagingConsumer[Receipt]:
    client, reports = MemoryClient(), MessagingReports("Memory")
    return MessagingConsumer(
        client.transport, client, "orders", ignore, concurrency=1, ordered=False, timeout_ms=None, reports=reports
    )


def recorder(app: Bullpen) -> Recorder:
    workers = [app.worker("work", handle)]
    return Recorder(lambda: workers)


MAKERS: dict[type[Any], Callable[[Bullpen], Startable]] = {
    AlertService: lambda app: (app.use_alerts(), found(app, AlertService))[1],
    DeliveryWorkers: lambda app: with_outbox(app).outbox.workers(),
    Dispatcher: lambda app: with_outbox(app).outbox.dispatcher(),
    HttpService: lambda app: HttpService(hello, "127.0.0.1", 0),
    MessageSender: lambda app: with_messages(app).sender(),
    MessageService: lambda app: (with_messages(app), found(app, MessageService))[1],
    Messages: with_messages,
    MessagingConsumer: consumer,
    OutboxService: lambda app: found(with_outbox(app), OutboxService),
    Projector: lambda app: Projector(app.ledger, SqlEvents(app.ledger), routes()),
    ProjectorService: lambda app: (app.projector(routes()), found(app, ProjectorService))[1],
    Recorder: recorder,
    RunMaintenance: lambda app: app.use_runs().maintenance(),
    RunWorker: lambda app: with_runs(app).runs.worker(),
    RunsService: lambda app: found(with_runs(app), RunsService),
    ScheduleService: schedules,
    Scheduler: lambda app: with_messages(app).scheduler(),
    Worker: lambda app: app.worker("work", handle),
    Workflow: lambda app: app.workflow(define(shelf=Shelf()), events=ORDERS),
}


def is_service(kind: Any) -> bool:
    """Whether a class of the package can be run and closed."""
    return (
        inspect.isclass(kind)
        and kind.__module__.startswith("bullpen.")
        and not getattr(kind, "_is_protocol", False)
        and "signals" in _parameters(kind, "run")
        and "timeout" in _parameters(kind, "close")
    )


def _parameters(kind: type[Any], method: str) -> set[str]:
    found = getattr(kind, method, None)
    return set(inspect.signature(found).parameters) if callable(found) else set()


def test_the_suite_knows_every_service() -> None:
    """A service that is added is stopped here in every way, too."""
    # What belongs to a project of Django needs that project's settings.
    skipped = re.compile(r"bullpen\.(testing|cli\.demo|ledger\.migrations|integrations\.django\.)|.*__main__")
    names = [each.name for each in pkgutil.walk_packages(bullpen.__path__, "bullpen.") if not skipped.match(each.name)]
    kinds = {kind for name in names for kind in vars(importlib.import_module(name)).values() if is_service(kind)}

    assert kinds - {BaseService} == set(MAKERS)


@pytest.fixture
async def app(redis_url: str, sqlite_url: str, tmp_path: Path) -> AsyncIterator[Bullpen]:
    environ = {
        "BULLPEN_REDIS_URL": redis_url,
        "BULLPEN_DATABASE_URL": sqlite_url,
        "BULLPEN_MESSAGES_TRANSPORT": "memory",
        "BULLPEN_TRANSPORT": "memory",
        "BULLPEN_ALERTS_EMAIL": "ops@example.com",
        "BULLPEN_SMTP_URL": "smtp+plain://127.0.0.1:1",
        "BULLPEN_SMTP_SENDER": "bullpen@example.com",
    }
    app = Bullpen(settings=Settings.load(environ=environ, start=tmp_path))
    yield app
    await app.aclose()


NAMES = {kind.__name__: kind for kind in sorted(MAKERS, key=lambda kind: kind.__name__)}


@pytest.fixture(params=NAMES)
async def service(request: pytest.FixtureRequest, app: Bullpen) -> AsyncIterator[Startable]:
    service = MAKERS[NAMES[request.param]](app)
    async with asyncio.timeout(ENOUGH_S):
        yield service
        await service.close(0)
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(_name_of(service))]
    assert left == []


def _name_of(service: Any) -> str:
    name = getattr(service, "_name_in_logs", None)
    return f"bullpen {name}" if name else "bullpen outbox"


# What is done to each -----------------------------------------------------------------------------------------------


async def has_begun(service: Startable) -> asyncio.Task[None]:
    """`run` under way, and the service works."""
    await service.start()
    running = asyncio.create_task(service.run(signals=False))
    for _ in range(20):  # it finds the service started, and waits for its end
        await asyncio.sleep(0)
    return running


async def refuses(service: Startable) -> None:
    with pytest.raises(AlreadyStopped, match="stopped"):
        await service.run(signals=False)
    with pytest.raises(AlreadyStopped, match="stopped"):
        await service.start()


async def test_starting_twice_starts_once(service: Startable) -> None:
    await asyncio.gather(service.start(), service.start())
    await service.start()

    await service.close()
    await refuses(service)


async def test_run_ends_when_it_is_closed(service: Startable) -> None:
    running = await has_begun(service)
    assert not running.done()

    await service.close()
    await running


async def test_closed_before_it_started_it_does_not_start(service: Startable) -> None:
    """A signal may come before everything has begun."""
    await service.close()
    await service.close()

    await refuses(service)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 20])
async def test_closed_while_it_starts_it_stops(service: Startable, steps: int) -> None:
    running = asyncio.create_task(service.run(signals=False))
    for _ in range(steps):
        await asyncio.sleep(0)

    await service.close()

    [ended] = await asyncio.gather(running, return_exceptions=True)
    assert ended is None or isinstance(ended, AlreadyStopped)
    await refuses(service)


async def test_closing_many_times_at_once_and_again_is_one_close(service: Startable) -> None:
    running = await has_begun(service)

    await asyncio.gather(*(service.close() for _ in range(3)), service.close(5_000), service.close(0))
    await service.close()

    await running


async def test_a_close_without_time_ends_it(service: Startable) -> None:
    running = await has_begun(service)

    await service.close(0)

    await running


async def test_a_close_may_be_hurried(service: Startable) -> None:
    running = await has_begun(service)
    closing = asyncio.create_task(service.close(timedelta(minutes=1)))
    await asyncio.sleep(0)

    await service.close(0)

    await closing
    await running


async def test_a_cancelled_run_can_be_closed(service: Startable) -> None:
    """Whoever cancels the task that runs it must not be left with a service that nobody stops."""
    running = await has_begun(service)

    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()
    await service.close()
    await refuses(service)


async def test_a_close_whose_caller_is_cancelled_goes_on(service: Startable) -> None:
    running = await has_begun(service)
    closing = asyncio.create_task(service.close())
    await asyncio.sleep(0)

    closing.cancel()
    await asyncio.wait([closing])

    await running


@pytest.mark.parametrize("service", [name for name in NAMES if issubclass(NAMES[name], BaseService)], indirect=True)
async def test_what_fails_inside_ends_it_and_run_raises_it(service: BaseService) -> None:
    """The others have tests of their own for a crash."""
    running = await has_begun(service)

    async def break_down() -> None:
        raise RuntimeError("broken inside")

    service._spawn(break_down())

    with pytest.raises(RuntimeError, match="broken inside"):
        await running
    assert isinstance(service.crash, RuntimeError)
    with pytest.raises(RuntimeError, match="broken inside"):
        await service.start()
