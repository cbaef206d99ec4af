"""The composition root: one object that holds settings, connection, queues and everything that runs.

In: settings and what the program registers (workers, or any `Service`). Out: all of it running until a signal, and
closed in the right order.
Elsewhere: reading settings (`bullpen.settings`), finding or starting the server (`bullpen.wiring.servers`), running
services together (`bullpen.wiring.running`), making the parts (their modules in `bullpen.wiring`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, overload

from bullpen._kernel.container import Container
from bullpen._kernel.duration import check_texts
from bullpen._kernel.ids import check_queue_name
from bullpen._kernel.logs import get_logger
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ports.metrics import Metric, MetricSource
from bullpen.queue import Queue
from bullpen.queue.arguments import QueueArguments, TaskArguments
from bullpen.queue.codec import Codec, check_codec
from bullpen.queue.tasks import Task, TaskMaker, TaskSet, Unique
from bullpen.redis import Connection
from bullpen.settings import Origin, Settings
from bullpen.wiring.running import ROLES, Service, Services, role_of
from bullpen.wiring.servers import command_line, connect, connect_to_configured
from bullpen.worker import Worker
from bullpen.worker.options import WorkerArguments

if TYPE_CHECKING:  # needs an extra, and is loaded when it is first asked for
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages
    from bullpen.messages.metrics import MessageMetrics
    from bullpen.ops.actions import Actions, Actor
    from bullpen.ops.alerts import Watcher
    from bullpen.ops.dead_letters import DeadLetterConsole
    from bullpen.ops.health import Health
    from bullpen.ops.metrics import WorkerMetrics
    from bullpen.outbox import EventRoutes, Outbox, Projector, ProjectorOptions, Route
    from bullpen.plugins.messaging import MessagingClient
    from bullpen.plugins.metrics import MessagingMetrics
    from bullpen.ports.dead_letters import DeadLetterStore
    from bullpen.ports.source import EventSource
    from bullpen.queue.schedulers import Reconciled
    from bullpen.queue.sync import Queue as SyncQueue
    from bullpen.runs import Runs
    from bullpen.wiring.audit import AuditTrail
    from bullpen.wiring.channels import Channels
    from bullpen.wiring.ops import QueueViews
    from bullpen.wiring.schedules import ScheduleService
    from bullpen.wiring.workflows import (
        BullMQRegistration,
        KafkaRegistration,
        RegisterOptions,
        WorkflowOptions,
        Workflows,
    )
    from bullpen.workflow.definition import Definition
    from bullpen.workflow.metrics import WorkflowMetrics
    from bullpen.workflow.service import Workflow

__all__ = ["ROLES", "Bullpen", "Service", "connect"]

logger = get_logger("bullpen.app")

_FROM_CODE: Final = Origin("argument", "redis_url")
_TASK_WORKER: Final[WorkerArguments] = {"concurrency": 20, "dead_letters": True}
T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


class Bullpen:
    """One application: its settings, its connection, its queues and the workers that `run` starts.

        app = Bullpen()

        @app.handler("emails", concurrency=20)
        async def send(job: Job) -> None: ...

    Making one neither connects nor starts anything, so it may stand at the top of a module; `bullpen run module:app`
    runs it.
    """

    def __init__(
        self,
        connection: str | Connection | None = None,
        *,
        prefix: str | None = None,
        settings: Settings | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`connection`, `prefix` and `codec` win over the settings, which are loaded unless given; what `bullpen run`
        was told wins over both."""
        told = command_line()
        if told.redis is not None:
            _report_replaced(connection, settings)
            connection = told.redis
        prefix = told.prefix or prefix
        url = connection if isinstance(connection, str) else None
        self.settings = (
            Settings.load(redis_url=url, redis_prefix=prefix)
            if settings is None
            else settings.with_redis(url=told.redis, prefix=told.prefix)
        )
        self.prefix = prefix or self.settings.redis.prefix
        """First part of every key of this app's queues."""
        self._url = url
        self._connection = connection if isinstance(connection, Connection) else None
        self._owns_connection = self._connection is None
        self._codec = check_codec(codec)
        self._owns_codec = codec is None
        self._has_codec = codec is not None
        self._queues: dict[str, Queue] = {}
        self._sync_queues: dict[str, SyncQueue] = {}
        self._workers: dict[str, Worker] = {}
        self._task_sets: dict[str, TaskSet] = {}
        self._task_workers: dict[str, WorkerArguments] = {}
        self._schedules: ScheduleService | None = None
        self._services = Services(self._count_running)
        self._metric_sources: list[MetricSource] = []
        self._ledger: Ledger | None = None
        self._outbox: Outbox | None = None
        self._workflows: Workflows | None = None
        self._container = Container()
        self._messages: Messages | None = None
        self._message_metrics: MessageMetrics | None = None
        self._safe_runs: Runs | None = None
        self._projectors: dict[str, Projector] = {}
        self._letter_stores: list[DeadLetterStore] = []
        self._watcher: Watcher | None = None
        self._health: Health | None = None
        self._views: QueueViews | None = None
        self._observed: WorkerMetrics | None = None
        self._messaging_metrics: MessagingMetrics | None = None
        self._workflow_metrics: WorkflowMetrics | None = None

    @property
    def connection(self) -> Connection:
        """The connection that all queues and workers of this app share."""
        if self._connection is None:
            self._connection = connect(self._url) if self._url else connect_to_configured(self.settings)
        return self._connection

    @property
    def codec(self) -> Codec | None:
        """How queues and workers of this app store job data; None: as they are."""
        if not self._has_codec:
            from bullpen.wiring.codec import make_codec

            self._codec, self._has_codec = make_codec(self.settings), True
        return self._codec

    @property
    def _has_redis(self) -> bool:
        return not self._owns_connection or self._url is not None or self.settings.has_redis()

    def _connection_in_use(self) -> Connection | None:
        """For those who look at queues: None where there is no server, or where nobody here has a use for one."""
        if not self._has_redis:
            return None
        is_open = self._connection is not None or self.settings.redis.url is not None
        works = [service for service in self.services if role_of(service) not in ("alerts", "http")]
        return self.connection if is_open or not works or self.uses_redis else None

    @property
    def ledger(self) -> Ledger:
        """The SQL ledger that is configured, else a SQLite file beside the embedded server's data. Connects later."""
        if self._ledger is None:
            from bullpen.wiring.ledger import make_ledger

            self._ledger = make_ledger(self.settings)
        return self._ledger

    @property
    def made_ledger(self) -> Ledger | None:
        """The ledger, if a part of this app has named it."""
        return self._ledger

    @property
    def outbox(self) -> Outbox:
        """What `use_outbox` made."""
        return _used(self._outbox, "outbox")

    def use_outbox(self) -> Outbox:
        """Messages and jobs that leave if and only if a transaction commits. An app that uses its outbox runs it.

        Jobs (`add_in_transaction`) need no more than that; for other targets say `outbox.route(type, channel)`. Safe to
        call twice.
        """
        if self._outbox is None:
            from bullpen.wiring.outbox import OutboxService, make_outbox

            connection = self.connection if self._has_redis else None
            self._outbox = make_outbox(self.settings, self.ledger, connection, self.prefix, self.codec)
            for name, route in self._alert_routes().items():
                self._outbox.route(name, route)
            self.add_metrics(self._outbox.metrics)
            self.add(OutboxService(self._outbox, self.prepare))
        return self._outbox

    @property
    def messages(self) -> Messages:
        """What `use_messages` made."""
        return _used(self._messages, "messages")

    def use_messages(self) -> Messages:
        """Messages at nine in the morning where the recipient lives. An app that uses them runs their parts. Safe to
        call twice."""
        if self._messages is None:
            from bullpen.messages.metrics import MessageMetrics
            from bullpen.wiring.messages import MessageService, make_messages
            from bullpen.wiring.ops import check_messages

            self._messages = make_messages(self.settings, self.ledger, lambda: self.connection, self.prefix)
            self._count_messaging()
            made = self._messages
            self._message_metrics = MessageMetrics(
                lambda: [(kind.name, channel) for kind in made.occasions for channel in made.routes]
            )
            self.add_metrics(self._message_metrics)
            check_messages(self.health, self._messages, lambda: self._services.runs("messages"))
            self.add(MessageService(self._messages, self.prepare))
        return self._messages

    def projector(
        self,
        routes: EventRoutes,
        *,
        source: EventSource | None = None,
        name: str = "default",
        options: ProjectorOptions | None = None,
    ) -> Projector:
        """Let `run` turn events into messages of the outbox, by these routes.

        `source` is the event store of the settings unless given: `ESDB_CONNECTION_STRING`, else the ledger's own
        (`app.ledger.events`). The messages leave through the outbox (`use_outbox`), in this process or another.
        """
        from bullpen.wiring.projector import make_projector

        if name in self._projectors:
            raise InvalidOption("name", "one that no other projector of this app has", name)
        made = make_projector(self.settings, self.ledger, self.prepare, routes, source, name, options)
        self._projectors[name] = made.projector
        self.add_metrics(made.metrics)
        self.health.add(f"projector {name}", made.check, needed=lambda: self._services.runs("projector"))
        self.add(made)
        return made.projector

    @property
    def projectors(self) -> tuple[Projector, ...]:
        return tuple(self._projectors.values())

    @property
    def channels(self) -> Channels:
        """Makes channels with what is configured: `app.outbox.route("kafka:*", app.channels.kafka())`."""
        from bullpen.wiring.channels import Channels

        return Channels(self.settings)

    @property
    def runs(self) -> Runs:
        """What `use_runs` made: `@app.runs.handler` runs them, `app.runs.service` submits them. Several handlers have
        names: `@app.runs.handler("report")`."""
        return _used(self._safe_runs, "runs")

    def use_runs(self) -> Runs:
        """Charged, long operations. An app that uses them dispatches its outbox, which their jobs leave by, and looks
        after runs. Safe to call twice."""
        if self._safe_runs is None:
            from bullpen.wiring.runs import RunsService, make_runs

            self.use_outbox()
            self._safe_runs = make_runs(self.settings, self.ledger, self.connection, self.prefix, self._container)
            self.add(RunsService(self._safe_runs, self.prepare, self._workers))
        return self._safe_runs

    @property
    def alerts(self) -> Watcher:
        """What `use_alerts` made."""
        return _used(self._watcher, "alerts")

    def use_alerts(self) -> Watcher:
        """Tell people when work is stuck, as `BULLPEN_ALERTS_…` says; more with `add_target`.

        An app with a configured target does so when it runs. Safe to call twice.
        """
        if self._watcher is None:
            from bullpen.wiring.alerts import AlertService, make_watcher

            self._watcher = make_watcher(
                self.settings, self.ledger, self._connection_in_use, self.prefix, lambda: self._letter_stores
            )
            self.add_metrics(self._watcher)
            self.add(AlertService(self._watcher, self.ledger, self.settings, self.prepare))
        return self._watcher

    def _alert_routes(self) -> dict[str, Route]:
        if not self.settings.alerts.has_target:
            return {}
        from bullpen.wiring.alerts import alert_routes

        return alert_routes(self.settings)

    @property
    def has_outbox(self) -> bool:
        """Whether `run` delivers the outbox."""
        return self._outbox is not None

    async def prepare(self) -> None:
        """Make the tables of the default ledger; refuse a configured one that is not ready or not safe.

        `run` does it before the outbox begins; a program that only stores may call it once at its start.
        """
        from bullpen.wiring.ledger import prepare

        await prepare(self.ledger, self.settings)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def _workers_here(self) -> tuple[Worker, ...]:
        """Those that run in this process, for handlers, workflows and messages; with `only` of other parts they run
        elsewhere, and show no life here."""
        own = self.workers if self._services.runs("worker") else ()
        return (*own, *self._taking_workers())

    def _needs_redis(self) -> bool:
        """Whether the parts that run here use the server of the queues; or whether the program may add jobs."""
        if not self.is_running:
            return bool(self._queues or self._workers) or (self._ledger is None and not self.services)
        runs = self._services.runs
        by_messages = runs("messages") and self.settings.messages.transport == "bullmq"
        return bool(self._workers_here()) or (runs("outbox") and self._has_redis) or by_messages

    @property
    def uses_redis(self) -> bool:
        """Whether a part that `run` runs here uses the server of the queues."""
        return any(self._is_on_redis(service) for service in self.services)

    def _is_on_redis(self, service: Service) -> bool:
        match role_of(service):
            case "outbox":
                return self._has_redis
            case "messages":
                return self.settings.messages.transport == "bullmq"
            case "worker":
                by_workflow = self._workflows is not None and self._workflows.is_on_redis(service)
                return isinstance(service, Worker) or getattr(service, "uses_redis", False) or by_workflow
        return False

    @property
    def is_running(self) -> bool:
        """Whether `run` is under way."""
        return self._services.is_running

    @property
    def services(self) -> tuple[Service, ...]:
        """What `run` runs."""
        return self._services.all

    def queue(self, name: str, **defaults: Unpack[QueueArguments]) -> Queue:
        """The queue of this name, one object for all callers. `defaults` are those of `Queue`, given the first time."""
        known = self._queues.get(name)
        if known is None:
            given: QueueArguments = {"codec": self.codec, **defaults}
            known = self._queues[name] = Queue(name, connection=self.connection, prefix=self.prefix, **given)
        elif defaults:
            raise InvalidOption(f"queue {name!r}", "its defaults where it is first named, and only there", defaults)
        return known

    def _sync_queue(self, name: str) -> SyncQueue:
        known = self._sync_queues.get(name)
        if known is None:
            from bullpen.queue.sync import Queue as SyncQueue

            known = self._sync_queues[name] = SyncQueue(
                name, connection=self.connection, prefix=self.prefix, codec=self.codec
            )
        return known

    def worker(self, queue: str, handler: Callable[..., Any], **options: Unpack[WorkerArguments]) -> Worker:
        """Let `handler` run the jobs of a queue when the app runs. `options` are those of `Worker`, checked now.

        One per queue: two handlers would each get a random half of the jobs.
        """
        if queue in self._workers:
            raise InvalidOption("queue", f"a queue without a worker in this app; {queue!r} has one", queue)
        given: WorkerArguments = {"codec": self.codec, **options}
        worker = Worker(queue, handler, connection=self.connection, prefix=self.prefix, **given)
        self._workers[queue] = worker
        self.add(worker)
        return worker

    def handler(self, queue: str, **options: Unpack[WorkerArguments]) -> Callable[[AnyHandler], AnyHandler]:
        """As `worker`, for decorating the handler."""

        def register(handler: AnyHandler) -> AnyHandler:
            self.worker(queue, handler, **options)
            return handler

        return register

    def task(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        strict: bool = False,
        unique: Unique | None = None,
        unique_key: Callable[..., str] | None = None,
        **options: Unpack[TaskArguments],
    ) -> TaskMaker:
        """Make a task of a function: its runs are jobs of `queue`, and the app's worker for that queue runs them.

            @app.task("emails", attempts=5)
            async def send_welcome(to: str, greeting: str = "Hello") -> str: ...

            await send_welcome.add(to="ada@example.com")

        The job's name is `name` or the function's, its data an object of the parameters, so that Node can add one too.
        A first parameter of type `Job` gets the job. Data that does not fit fails for good; fields that no parameter
        takes are ignored unless `strict`. `options` are job options, `durability` and `replace_finished`.

        With `every="5m"` or `cron="0 9 * * 1-5", tz="Europe/Berlin"`, and others of `ScheduleArguments`, the task also
        runs by itself: `run` stores a scheduler with the task's name and keeps it as the code says.

        `unique="pending"` lets runs with the same arguments be one until it has ended, `unique=timedelta(hours=1)` for
        so long. `unique_key`, a function of the same parameters, says which arguments count: runs with the same text
        are one.
        """
        check_queue_name(queue)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            tasks = self._task_sets.get(queue) or TaskSet(queue)
            made: Task[..., Any] = Task(
                function,
                handlers=tasks,
                open_queue=partial(self.queue, queue),
                open_sync=partial(self._sync_queue, queue),
                open_outbox=lambda: self.outbox,
                name=name,
                strict=strict,
                unique=unique,
                unique_key=unique_key,
                **options,
            )
            tasks.add(made)
            if queue not in self._task_sets:
                wanted: WorkerArguments = {**_TASK_WORKER, **self._task_workers.get(queue, {})}
                self.worker(queue, tasks, **wanted)
                self._task_sets[queue] = tasks
            return made

        return cast("TaskMaker", register)

    def task_queue(self, queue: str, **worker_options: Unpack[WorkerArguments]) -> None:
        """How the worker of a queue of tasks runs, if not 20 at a time with dead letters; before its first task."""
        if queue in self._task_sets or queue in self._task_workers:
            raise InvalidOption(
                f"task_queue {queue!r}", "said once, before the first task of the queue", worker_options
            )
        self._task_workers[queue] = worker_options

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The names of the tasks of each queue."""
        return {queue: tasks.names for queue, tasks in self._task_sets.items()}

    async def reconcile_schedules(self, *, prune: bool = False) -> dict[str, Reconciled]:
        """Store the schedulers of all tasks as the code declares them; `run` does it at its start.

        Returns per queue what was changed, and which are no longer declared; with `prune` those are removed.
        """
        return await self._keep_schedules().reconcile(prune=prune)

    def _keep_schedules(self) -> ScheduleService:
        if self._schedules is None:
            from bullpen.wiring.schedules import ScheduleService

            self._schedules = ScheduleService(self._task_sets.values, self._borrowed_queue)
        return self._schedules

    @asynccontextmanager
    async def _borrowed_queue(self, name: str) -> AsyncIterator[Queue]:
        """The program's own queue with its defaults, or one for this moment: the program may still say its defaults."""
        if (known := self._queues.get(name)) is not None:
            yield known
            return
        async with Queue(name, connection=self.connection, prefix=self.prefix, codec=self.codec) as queue:
            yield queue

    @property
    def workflows(self) -> Workflows:
        """All workflows of this app."""
        if self._workflows is None:
            from bullpen.wiring.workflows import Workflows

            self._workflows = Workflows(
                self.settings, lambda: self.connection, self.prefix, self._container, self._workers.__contains__
            )
        return self._workflows

    def workflow(
        self, definition: Definition[T, P, E, S], **options: Unpack[WorkflowOptions[T, P, E, S]]
    ) -> Workflow[T, P, E, S]:
        """Make a workflow of a definition; `run` consumes its events.

        Its events come from one transport: `bullmq=`, `kafka=` or `rabbitmq=`, here or in the definition, or `events=`
        with the transport that `BULLPEN_TRANSPORT` names. Further options: `name`; `client` (your own) or
        `client_options` (of the client that is made); `locks`; `service`, a subclass of `Workflow` to make; `strict`,
        which refuses what lint only warns of.
        """
        return self._adopt(self.workflows.add(definition, **options))

    def register(
        self,
        name: str,
        definition: Definition[T, P, E, S],
        imports: Sequence[Bullpen] | None = None,
        providers: Mapping[type[Any], Any] | None = None,
        kafka: KafkaRegistration | None = None,
        bullmq: BullMQRegistration | None = None,
        **options: Unpack[RegisterOptions[T, P, E, S]],
    ) -> Workflow[T, P, E, S]:
        """As `workflow`, for definitions that hold the events while registration switches the transport on.

        `kafka` is `{"enabled": …, "client_id": …, "brokers": …}`, `bullmq` is `{"enabled": …, "config": {…}}`. Without
        one that is enabled the workflow starts no consumers, says so, and is not healthy. `providers` maps types to
        objects or to what makes them, for classes among entity and actions; those of the apps in `imports` serve too.
        """
        return self._adopt(
            self.workflows.register(
                name,
                definition,
                imports=[app._container for app in imports or ()],
                providers=providers,
                kafka=kafka,
                bullmq=bullmq,
                **options,
            )
        )

    def _adopt(self, workflow: Workflow[T, P, E, S]) -> Workflow[T, P, E, S]:
        if self._workflow_metrics is None:  # with the first one: an app without workflows counts nothing
            from bullpen.workflow.metrics import WorkflowMetrics

            self._workflow_metrics = WorkflowMetrics(lambda: self.workflows.all)
            self.add_metrics(self._workflow_metrics)
            self._count_messaging()
        self.add(workflow)
        self.health.add(
            f"workflow {workflow.name}",
            workflow.check,
            needed=lambda: not self.is_running or workflow in self._services.all,
        )
        for store in self.workflows.letters_of(workflow):
            self.add_dead_letters(store)
        return workflow

    def provide(self, kind: type[T], provider: T | Callable[..., T]) -> None:
        """Let `get` find an object of this type: the object itself, or what makes it, once."""
        self._container.provide(kind, provider)

    @overload
    def get(self, wanted: type[T]) -> T: ...

    @overload
    def get(self, wanted: str) -> Any: ...

    def get(self, wanted: type[T] | str) -> T | Any:
        """A workflow by its name or type, a transport's client by its type, or what a provider gives.

        Raises NotConfigured when nothing fits, or more than one thing does.
        """
        return self._container.get(wanted)

    def add(self, service: Service) -> None:
        """Let `run` run this too; at once if the app runs already."""
        self._services.add(service)

    def add_metrics(self, source: MetricSource) -> None:
        """Let `metrics` show these too."""
        self._metric_sources.append(source)

    async def dead_letters(
        self, *, tenant_id: str | None = None, queues: Sequence[str] | None = None
    ) -> DeadLetterConsole:
        """One console for everything that failed finally: queues of the server, the outbox, and stores that were
        added. For a tenant it shows and touches that tenant's only. `queues` names the dead-letter queues to show;
        without it all are searched for, over all keys of the server."""
        from bullpen.wiring.dead_letters import installed_ledger, make_console

        names = None if queues is None else check_texts("queues", queues)
        has_ledger = self._ledger is not None or self.settings.has_ledger()
        ledger = installed_ledger(lambda: self.ledger) if has_ledger else None
        added = self.other_letters()
        queue = self.settings.rabbitmq.queue_name
        connection = self._connection_in_use() if ledger is not None or added else self.connection
        runs = [] if self._safe_runs is None else [route.queue.name for route in self._safe_runs.routes.all]
        return await make_console(
            connection, self.prefix, ledger, added, tenant_id, message_queue=queue, run_queues=runs, names=names
        )

    async def trail(self) -> AuditTrail:
        """Where is written down who did what: the ledger if there is one, else streams of the server."""
        from bullpen.queue.audit import AuditStreams
        from bullpen.wiring.audit import AuditTrail
        from bullpen.wiring.dead_letters import installed_ledger, ready_ledger

        has_ledger = self._ledger is not None or self.settings.has_ledger()
        ledger = await ready_ledger(installed_ledger(lambda: self.ledger) if has_ledger else None)
        return AuditTrail(ledger, AuditStreams(self.connection, self.prefix) if self._has_redis else None)

    async def actions(self, actor: Actor) -> Actions:
        """What people do to queues and jobs by hand: each is written to the trail before it is done."""
        from bullpen.ops.actions import Actions

        return Actions(self.queue, await self.trail(), actor)

    def other_letters(self) -> list[DeadLetterStore]:
        """Stores of dead letters that are neither queues of the server nor the outbox: those of transports, and those
        that were added."""
        from bullpen.wiring.dead_letters import message_letters

        return [*self._letter_stores, *message_letters(self.settings, self._messages)]

    def add_dead_letters(self, store: DeadLetterStore) -> None:
        """Let `dead_letters` show these too: those of a transport, or your own."""
        self._letter_stores.append(store)

    @property
    def health(self) -> Health:
        """What is checked of this process; add your own checks with `app.health.add(name, check)`."""
        if self._health is None:
            from bullpen.ops.health import Health
            from bullpen.wiring.ops import check_connection, check_ledger, check_workers

            self._health = Health()
            check_connection(self._health, lambda: self.connection, self._needs_redis)
            check_ledger(self._health, lambda: self._ledger)
            check_workers(self._health, self._workers_here)
        return self._health

    def observe(self) -> None:
        """Let `metrics` also show queues and workers. From then on each job costs a little more."""
        if self._views is not None:
            return
        from bullpen.ops.metrics import LateWakeups, QueueMetrics, WorkerMetrics
        from bullpen.wiring.ops import QueueViews

        self._views = QueueViews(
            lambda: (*self._queues, *self._workers, *self._message_queues()),
            lambda name: Queue(name, connection=self.connection, prefix=self.prefix),
        )
        self._observed = WorkerMetrics(self._workers_here, lambda: self.tasks)
        self.add_metrics(self._observed)
        self.add_metrics(LateWakeups())
        self.add_metrics(QueueMetrics(self._views))

    def _count_messaging(self) -> None:
        """One collector for all clients of this app, whatever they carry."""
        if self._messaging_metrics is None:
            from bullpen.plugins.metrics import MessagingMetrics

            self._messaging_metrics = MessagingMetrics(self._messaging_clients)
            self.add_metrics(self._messaging_metrics)

    def _messaging_clients(self) -> list[MessagingClient[Any]]:
        from bullpen.plugins.messaging import MessagingClient

        made: list[object] = [] if self._messages is None else [self._messages.made_messaging]
        if self._workflows is not None:
            made += [workflow.client for workflow in self._workflows.all]
        return [client for client in made if isinstance(client, MessagingClient)]

    def _message_queues(self) -> list[str]:
        """Queues of the app's own server whose jobs are events of workflows or orders of messages."""
        return [worker.queue_name for worker in self._taking_workers(here_only=True)]

    def _taking_workers(self, *, here_only: bool = False) -> list[Worker]:
        """Those that take events and orders for the clients of this app, or of them those on its own server."""
        transports: list[Any] = [client.transport for client in self._messaging_clients()]
        return [
            worker
            for transport in transports
            if hasattr(transport, "workers") and (not here_only or transport.connection is self._connection)
            for worker in transport.workers
        ]

    async def metrics(self) -> list[Metric]:
        """What the parts of this app count, under the names that dashboards know."""
        from bullpen.wiring.ops import collect_all

        return await collect_all(self._metric_sources)

    async def run(
        self,
        *,
        signals: bool = True,
        concurrency: int | None = None,
        only: Collection[str] = (),
        prune_schedules: bool = False,
    ) -> None:
        """Run everything until it is told to stop. When one part cannot go on, all stop and its error is raised.

        `concurrency` replaces that of every worker: how many fit is known where the program is started. `only` names
        the parts to run (see `ROLES`); the others run in other processes. `prune_schedules` removes schedulers that no
        task declares any more.

        The first SIGTERM or SIGINT stops gracefully: running jobs may finish. A second one hurries: they are cancelled
        and given back.
        """
        self.choose(only)
        if self._schedules is not None:
            self._schedules.prune = prune_schedules
        if concurrency is not None:
            for worker in self._workers.values():
                worker.concurrency = concurrency
        try:
            await self._services.run(signals=signals)
        finally:
            await self.aclose()

    def choose(self, only: Collection[str] = ()) -> tuple[Service, ...]:
        """Keep the parts that this process is to run, all if none is named, and tell which services they are.

        `run` does it; who wants to know before calls it before. Raises InvalidOption for a part that does not exist,
        NotConfigured for one that this app does not have.
        """
        only = check_texts("only", only)
        if self.settings.alerts.has_target:
            self.use_alerts()
        if self._task_sets and (keeper := self._keep_schedules()) not in self.services:
            self.add(keeper)
        self._services.keep_only(only)
        return self.services

    async def stop(self, timeout: int | timedelta | None = None) -> None:
        """End `run` gracefully; `timeout` is that of `Worker.close`."""
        await self._services.stop(timeout)

    def _count_running(self) -> int:
        flows = [] if self._workflows is None else self._workflows.all
        return sum(worker.running for worker in self._workers.values()) + sum(flow.running for flow in flows)

    async def aclose(self) -> None:
        """Stop what runs, send what queues still hold, then let go of the connections. Safe to call twice."""
        await self.stop()
        for queue in self._queues.values():
            await queue.close()
        for blocking in self._sync_queues.values():
            blocking.close()
        if self._views is not None:
            await self._views.aclose()
        for listener in (self._observed, self._messaging_metrics, self._message_metrics, self._workflow_metrics):
            if listener is not None:
                listener.close()
        if self._outbox is not None:
            await self._outbox.aclose()
        if self._messages is not None:
            await self._messages.aclose()
        if self._safe_runs is not None:
            await self._safe_runs.aclose()
        if self._ledger is not None:
            await self._ledger.aclose()
        if self._codec is not None and self._owns_codec:
            await self._codec.aclose()
        if self._connection is not None and self._owns_connection:
            await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _used(part: T | None, name: str) -> T:
    """Reading a property starts nothing: what an app runs stands in the program as a call."""
    if part is None:
        raise NotConfigured(f"this app does not use {name}; call app.use_{name}() where the app is made")
    return part


def _report_replaced(connection: str | Connection | None, settings: Settings | None) -> None:
    """A server that somebody wrote down and that is not used: nobody should have to find that out."""
    if connection is None and settings is not None and settings.origins.get("redis.url") == _FROM_CODE:
        connection = settings.redis.url
    if connection is not None:
        named = connection if isinstance(connection, Connection) else connect(connection)
        logger.info("--redis is used instead of %r, which the code names", named)
