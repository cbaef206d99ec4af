"""The composition root: one object that holds settings, connection, queues and everything that runs.

In: settings and what the program registers (workers, or any `Service`). Out: all of it running until a signal, and
closed in the right order. This is the public face; the parts behind it are in `bullpen.wiring`: what the
app opens (`resources`), what it uses (`features`, `tasks`), what it shows (`observing`), how it runs (`running`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, overload

from bullpen._kernel.container import Container
from bullpen._kernel.duration import check_texts
from bullpen.errors import NotConfigured
from bullpen.ports.metrics import Metric, MetricSource
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.wiring.features import AppFeatures
from bullpen.wiring.resources import Resources
from bullpen.wiring.running import ROLES, Service
from bullpen.wiring.servers import connect
from bullpen.wiring.tasks import TaskQueues

if TYPE_CHECKING:  # loaded when it is first used: it needs an extra, or most commands need none of it
    from bullpen._kernel.injection import Lifetime
    from bullpen._kernel.rates import RateLimit
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages
    from bullpen.ops.actions import Actions, Actor
    from bullpen.ops.alerts import Watcher
    from bullpen.ops.dead_letters import DeadLetterConsole
    from bullpen.ops.health import Health
    from bullpen.outbox import Endpoints, EventRoutes, Outbox, Projector, ProjectorOptions
    from bullpen.ports.dead_letters import DeadLetterStore
    from bullpen.ports.source import EventSource
    from bullpen.queue import Job
    from bullpen.queue.arguments import QueueArguments, TaskArguments
    from bullpen.queue.batch import BatchOptions
    from bullpen.queue.batch_tasks import BatchTaskMaker
    from bullpen.queue.codec import Codec
    from bullpen.queue.schedulers import Reconciled
    from bullpen.queue.tasks import TaskMaker, Unique
    from bullpen.runs import Runs
    from bullpen.wiring.audit import AuditTrail
    from bullpen.wiring.channels import Channels
    from bullpen.wiring.workflows import (
        BullMQRegistration,
        KafkaRegistration,
        RegisterOptions,
        WorkflowOptions,
        Workflows,
    )
    from bullpen.worker import Worker
    from bullpen.worker.around import Around
    from bullpen.worker.auto import Concurrency
    from bullpen.worker.options import WorkerArguments
    from bullpen.workflow.definition import Definition
    from bullpen.workflow.service import Workflow

__all__ = ["ROLES", "Bullpen", "Service", "connect"]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
Provides = Callable[..., T] | Callable[..., Awaitable[T]] | Callable[..., AsyncIterator[T]] | Callable[..., Iterator[T]]
_NOTHING: Final[Any] = object()
AnyHook = TypeVar("AnyHook", bound=Callable[..., Any])
AnyMiddleware = TypeVar(
    "AnyMiddleware",
    bound=Callable[
        ..., AbstractAsyncContextManager[Any] | AbstractContextManager[Any] | AsyncIterator[Any] | Iterator[Any]
    ],
)


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
        self._resources = Resources(connection, prefix, settings, codec)
        self._container = Container()
        self._made_around: Around | None = None
        self._features = AppFeatures(self._resources, lambda: self.around, self._container)
        self._services = self._features.services
        self._tasks = TaskQueues(self._resources, self._features.add_worker, lambda: self.outbox)

    @property
    def settings(self) -> Settings:
        """What is configured."""
        return self._resources.settings

    @property
    def prefix(self) -> str:
        """First part of every key of this app's queues."""
        return self._resources.prefix

    @property
    def connection(self) -> Connection:
        """The connection that all queues and workers of this app share."""
        return self._resources.connection

    @property
    def codec(self) -> Codec | None:
        """How queues and workers of this app store job data; None: as they are."""
        return self._resources.codec

    @property
    def ledger(self) -> Ledger:
        """The SQL ledger that is configured, else a SQLite file beside the embedded server's data. Connects later."""
        return self._resources.ledger

    @property
    def made_ledger(self) -> Ledger | None:
        """The ledger, if a part of this app has named it."""
        return self._resources.made_ledger

    @property
    def outbox(self) -> Outbox:
        """What `use_outbox` made."""
        return _used(self._features.outbox, "outbox")

    def use_outbox(self) -> Outbox:
        """Messages and jobs that leave if and only if a transaction commits. An app that uses its outbox runs it.

        Jobs (`add_in_transaction`) need no more than that; for other targets say `outbox.route(type, channel)`. Safe to
        call twice.
        """
        return self._features.use_outbox()

    @property
    def endpoints(self) -> Endpoints:
        """Where the tenants want their events to be sent: rows, made and changed while everything runs.

        `app.outbox.publish` stores a message for each of them; an app that uses its outbox delivers them.
        """
        return self._features.endpoints

    @property
    def messages(self) -> Messages:
        """What `use_messages` made."""
        return _used(self._features.messages, "messages")

    def use_messages(self) -> Messages:
        """Messages at nine in the morning where the recipient lives. An app that uses them runs their parts. Safe to
        call twice."""
        return self._features.use_messages()

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
        return self._features.add_projector(routes, source, name, options)

    @property
    def projectors(self) -> tuple[Projector, ...]:
        return tuple(self._features.projectors.values())

    @property
    def channels(self) -> Channels:
        """Makes channels with what is configured: `app.outbox.route("kafka:*", app.channels.kafka())`."""
        from bullpen.wiring.channels import Channels

        return Channels(self.settings)

    @property
    def runs(self) -> Runs:
        """What `use_runs` made: `@app.runs.handler` runs them, `app.runs.service` submits them. Several handlers have
        names: `@app.runs.handler("report")`."""
        return _used(self._features.runs, "runs")

    def use_runs(self) -> Runs:
        """Charged, long operations. An app that uses them dispatches its outbox, which their jobs leave by, and looks
        after runs. Safe to call twice."""
        return self._features.use_runs()

    @property
    def alerts(self) -> Watcher:
        """What `use_alerts` made."""
        return _used(self._features.watcher, "alerts")

    def use_alerts(self) -> Watcher:
        """Send alerts when work is stuck, configured by `BULLPEN_ALERTS_…`; add targets with `add_target`.

        An app with a configured target does so when it runs. Safe to call twice.
        """
        return self._features.use_alerts()

    @property
    def has_outbox(self) -> bool:
        """Whether `run` delivers the outbox."""
        return self._features.outbox is not None

    async def prepare(self) -> None:
        """Make the tables of the default ledger; refuse a configured one that is not ready or not safe.

        `run` does it before the outbox begins; a program that only stores may call it once at its start.
        """
        await self._resources.prepare()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._features.workers.values())

    def new_workers(self) -> list[Worker]:
        """Workers as this app declares them, not started: a worker works once, and a test needs one for each run."""
        made = [self._features.new_worker(queue) for queue in self._features.workers_declared]
        for worker in made:
            self._tasks.attend(worker)
        return made

    def watch_adds(
        self, after_add: Callable[[], Awaitable[None]], after_add_sync: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Within this context, call these when runs of tasks were stored, before the caller goes on. For tests."""
        return self._tasks.watched(after_add, after_add_sync)

    @property
    def uses_redis(self) -> bool:
        """Whether a part that `run` runs here uses the server of the queues."""
        return self._features.uses_redis()

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
        return self._resources.queue(name, **defaults)

    def worker(self, queue: str, handler: Callable[..., Any], **options: Unpack[WorkerArguments]) -> Worker:
        """Let `handler` run the jobs of a queue when the app runs. `options` are those of `Worker`, checked now.

        One per queue: two handlers would each get a random half of the jobs.
        """
        return self._features.add_worker(queue, handler, **options)

    def handler(self, queue: str, **options: Unpack[WorkerArguments]) -> Callable[[AnyHandler], AnyHandler]:
        """As `worker`, for decorating the handler."""

        def register(handler: AnyHandler) -> AnyHandler:
            self.worker(queue, handler, **options)
            return handler

        return register

    # ---- around jobs and processes ------------------------------------------------------------------------------

    def on_startup(self, hook: AnyHook) -> AnyHook:
        """Call this function, plain or `async def`, when a process starts that runs this app: before its first job.

        That is each process of `bullpen run` (`app.run()`) and each child process of a worker with `processes=True`; a
        process that only adds jobs says `async with app.started()`. The function may take the app. What it raises ends
        the process. Hooks run in the order of their registration.
        """
        self.around.on_startup(hook)
        return hook

    def on_shutdown(self, hook: AnyHook) -> AnyHook:
        """Call this function when such a process ends: after its last job, while the app's queues still work.

        In the opposite order of registration, each if what was registered before it could be started. A process that is
        killed runs none.
        """
        self.around.on_shutdown(hook)
        return hook

    def lifespan(self, hook: AnyHook) -> AnyHook:
        """Both in one, for a function that yields once: what stands before its `yield` runs at the start, what stands
        after it at the end."""
        self.around.lifespan(hook)
        return hook

    def started(self) -> AbstractAsyncContextManager[None]:
        """`async with app.started()`: run the hooks here, as `run` does. Within another such context it does nothing
        more."""
        return self.around.started()

    @overload
    def middleware(self, middleware: AnyMiddleware, /) -> AnyMiddleware: ...

    @overload
    def middleware(
        self, middleware: None = None, /, *, queues: Collection[str] = (), batches: bool = False
    ) -> Callable[[AnyMiddleware], AnyMiddleware]: ...

    @overload
    def middleware(
        self, middleware: AnyMiddleware, /, *, queues: Collection[str] = (), batches: bool = False
    ) -> AnyMiddleware: ...

    def middleware(self, middleware: Any = None, *, queues: Collection[str] = (), batches: bool = False) -> Any:
        """Run each job of this app's handlers and tasks inside of this context.

            @app.middleware
            async def watched(job: Job) -> AsyncIterator[None]:
                started = time.monotonic()
                try:
                    yield
                finally:
                    print(job.name, time.monotonic() - started)

        A function of the job that yields once, plain or `async def`, or one that returns a context manager. What the
        handler raises comes out of the `yield`; an error that is not raised on completes the job with None. The first
        one registered is the outermost. `queues` names those it is for; all unless given. A handler that takes batches
        needs `batches=True`: it may then get a `JobBatch`.

        Around a plain handler, asynchronous middleware runs on the loop, and plain middleware inside of it in the
        handler's own thread.
        """

        queues = check_texts("queues", queues)

        def register(made: AnyMiddleware) -> AnyMiddleware:
            self.around.add(made, queues, batches=batches)
            return made

        return register if middleware is None else register(middleware)

    @property
    def around(self) -> Around:
        """Hooks, middleware and providers; for child processes of workers."""
        if self._made_around is None:
            from bullpen.worker.around import Around

            self._made_around = Around(self, self._container)
        return self._made_around

    @overload
    def task(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        strict: bool = False,
        unique: Unique | None = None,
        unique_key: Callable[..., str] | None = None,
        timeout: int | timedelta | None = None,
        rate_limit: RateLimit | None = None,
        on_success: Callable[[Job, Any], Any] | None = None,
        on_failure: Callable[[Job, str], Any] | None = None,
        batch: None = None,
        **options: Unpack[TaskArguments],
    ) -> TaskMaker: ...
    @overload
    def task(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        strict: bool = False,
        unique: Unique | None = None,
        unique_key: Callable[..., str] | None = None,
        on_success: Callable[[Job, Any], Any] | None = None,
        on_failure: Callable[[Job, str], Any] | None = None,
        batch: BatchOptions,
        **options: Unpack[TaskArguments],
    ) -> BatchTaskMaker: ...
    def task(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        strict: bool = False,
        unique: Unique | None = None,
        unique_key: Callable[..., str] | None = None,
        timeout: int | timedelta | None = None,
        rate_limit: RateLimit | None = None,
        on_success: Callable[[Job, Any], Any] | None = None,
        on_failure: Callable[[Job, str], Any] | None = None,
        batch: BatchOptions | None = None,
        **options: Unpack[TaskArguments],
    ) -> TaskMaker | BatchTaskMaker:
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

        `timeout` is how long one attempt may take. `rate_limit=RateLimit(10, 1_000)` starts this task ten times per
        second over all workers; runs beyond that wait, with no attempt counted. `on_success(job, result)` and
        `on_failure(job, reason)`, plain or `async def`, are called in the worker's process when the end is stored: at
        most once, never if the process dies just then. What must follow is a task of its own: see `chain`.

        With `batch=BatchOptions(size=50)` the function takes a list: `async def store(rows: list[Row])`. A run is one
        item, `await store.add(Row(...))`, with its own attempts and result; the function gets up to 50 of them, and
        returns a list of their results, in which an exception fails that run alone, or nothing. `unique_key` and `lane`
        get the item.
        """
        made = self._tasks.maker(
            queue,
            name=name,
            strict=strict,
            unique=unique,
            unique_key=unique_key,
            timeout=timeout,
            rate_limit=rate_limit,
            on_success=on_success,
            on_failure=on_failure,
            batch=batch,
            **options,
        )
        return cast("TaskMaker", made)

    def task_queue(self, queue: str, **worker_options: Unpack[WorkerArguments]) -> None:
        """How the worker of a queue of tasks runs, if not 20 at a time with dead letters; before its first task."""
        self._tasks.configure(queue, worker_options)

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The names of the tasks of each queue."""
        return self._tasks.names

    async def reconcile_schedules(self, *, prune: bool = False) -> dict[str, Reconciled]:
        """Store the schedulers of all tasks as the code declares them; `run` does it at its start.

        Returns per queue what was changed, and which are no longer declared; with `prune` those are removed.
        """
        return await self._tasks.schedules.reconcile(prune=prune)

    @property
    def workflows(self) -> Workflows:
        """All workflows of this app."""
        return self._features.workflows

    def workflow(
        self, definition: Definition[T, P, E, S], **options: Unpack[WorkflowOptions[T, P, E, S]]
    ) -> Workflow[T, P, E, S]:
        """Make a workflow of a definition; `run` consumes its events.

        Its events come from one transport: `bullmq=`, `kafka=` or `rabbitmq=`, here or in the definition, or `events=`
        with the transport that `BULLPEN_TRANSPORT` names. Further options: `name`; `client` (your own) or
        `client_options` (of the client that is made); `locks`; `service`, a subclass of `Workflow` to make; `strict`,
        which refuses what lint only warns of.
        """
        return self._features.adopt(self.workflows.add(definition, **options))

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
        return self._features.adopt(
            self.workflows.register(
                name,
                definition,
                imports=[app._features.container for app in imports or ()],
                providers=providers,
                kafka=kafka,
                bullmq=bullmq,
                **options,
            )
        )

    @overload
    def provide(self, *, scope: Lifetime = "process") -> Callable[[AnyHook], AnyHook]: ...

    @overload
    def provide(self, kind: AnyHook, /, *, scope: Lifetime = "process") -> AnyHook: ...

    @overload
    def provide(self, kind: type[T], provider: T | Provides[T], *, scope: Lifetime = "process") -> None: ...

    def provide(self, kind: Any = None, provider: Any = _NOTHING, *, scope: Lifetime = "process") -> Any:
        """Let functions of this app ask for an object of this type: `session: Session = Depends()`.

            @app.provide(scope="job")
            async def session(pool: Pool) -> AsyncIterator[Session]:
                async with pool.session() as opened:
                    yield opened

        `provider` is the object itself, or what makes or yields it: a class, or a function, plain or `async def`, whose
        own parameters are found by their types. As a decorator, the type is what the function says it returns. One of
        `scope="process"` is made once, when it is first asked for, and what stands after its `yield` runs when the
        process ends; one of `scope="job"` is made for each job that asks for it and ends with the job, within whose
        errors come out of its `yield`. `get` finds what has no end, for classes and workflows too.
        """
        if provider is not _NOTHING:
            self.around.injector.provide(kind, provider, scope)
            return None

        from bullpen._kernel.injection import kind_made_by

        def register(made: AnyHook) -> AnyHook:
            self.around.injector.provide(kind_made_by(made), made, scope)
            return made

        return register if kind is None else register(kind)

    def override(self, wanted: type[Any] | Callable[..., Any], provider: Any) -> AbstractContextManager[None]:
        """For tests: `with app.override(Session, fake)`: within it, whoever asks for this type, or for what this
        function makes, gets this object, or what this function makes for each job."""
        return self.around.injector.override(wanted, provider)

    @overload
    def get(self, wanted: type[T]) -> T: ...

    @overload
    def get(self, wanted: str) -> Any: ...

    def get(self, wanted: type[T] | str) -> T | Any:
        """A workflow by its name or type, a transport's client by its type, or what a provider gives.

        Raises NotConfigured when nothing fits, or more than one thing does.
        """
        return self._features.container.get(wanted)

    def add(self, service: Service) -> None:
        """Let `run` run this too; at once if the app runs already."""
        self._services.add(service)

    def add_metrics(self, source: MetricSource) -> None:
        """Let `metrics` show these too."""
        self._features.observing.add(source)

    async def dead_letters(
        self, *, tenant_id: str | None = None, queues: Sequence[str] | None = None
    ) -> DeadLetterConsole:
        """One console for everything that failed finally: queues of the server, the outbox, and stores that were
        added. For a tenant it shows and touches that tenant's only. `queues` names the dead-letter queues to show;
        without it all are searched for, over all keys of the server."""
        from bullpen.wiring.dead_letters import installed_ledger, make_console

        names = None if queues is None else check_texts("queues", queues)
        opened, features = self._resources, self._features
        ledger = installed_ledger(lambda: self.ledger) if opened.has_ledger else None
        added = self.other_dead_letters()
        connection = features.connection_in_use() if ledger is not None or added else self.connection
        return await make_console(
            *(connection, self.prefix, ledger, added, tenant_id),
            message_queue=self.settings.rabbitmq.queue_name,
            run_queues=[] if features.runs is None else [route.queue.name for route in features.runs.routes.all],
            names=names,
        )

    async def trail(self) -> AuditTrail:
        """Where is written down who did what: the ledger if there is one, else streams of the server."""
        from bullpen.queue.audit import AuditStreams
        from bullpen.wiring.audit import AuditTrail
        from bullpen.wiring.dead_letters import installed_ledger, ready_ledger

        opened = self._resources
        ledger = await ready_ledger(installed_ledger(lambda: self.ledger) if opened.has_ledger else None)
        return AuditTrail(ledger, AuditStreams(self.connection, self.prefix) if opened.has_redis else None)

    async def actions(self, actor: Actor) -> Actions:
        """What people do to queues and jobs by hand: each is written to the trail before it is done."""
        from bullpen.ops.actions import Actions

        return Actions(self.queue, await self.trail(), actor)

    def other_dead_letters(self) -> list[DeadLetterStore]:
        """Stores of dead letters that are neither queues of the server nor the outbox: those of transports, and those
        that were added."""
        return self._features.other_dead_letters()

    def add_dead_letters(self, store: DeadLetterStore) -> None:
        """Let `dead_letters` show these too: those of a transport, or your own."""
        self._features.letter_stores.append(store)

    @property
    def health(self) -> Health:
        """What is checked of this process; add your own checks with `app.health.add(name, check)`."""
        return self._features.observing.health

    def observe(self) -> None:
        """Let `metrics` also show queues and workers. From then on each job costs a little more."""
        opened, features = self._resources, self._features
        features.observing.observe(
            lambda: (*opened.queues, *features.workers, *features.message_queues()), lambda: self.tasks
        )

    async def metrics(self) -> list[Metric]:
        """What the parts of this app count, under the names that dashboards know."""
        return await self._features.observing.collect()

    async def run(
        self,
        *,
        signals: bool = True,
        concurrency: Concurrency | None = None,
        only: Collection[str] = (),
        prune_schedules: bool = False,
    ) -> None:
        """Run everything until it is stopped. When one part cannot continue, all stop and its error is raised.

        `concurrency` replaces that of every worker: how many fit is known where the program is started; "auto" finds
        out. `only` names the parts to run (see `ROLES`); the others run in other processes. `prune_schedules` removes
        schedulers that no task declares any more.

        The first SIGTERM or SIGINT stops gracefully: running jobs may finish. A second one hurries: they are cancelled
        and given back.
        """
        self.choose(only)
        if self._tasks.made_schedules is not None:
            self._tasks.made_schedules.prune = prune_schedules
        if concurrency is not None:
            for worker in self.workers:
                worker.concurrency = concurrency
        try:
            await self._services.run(signals=signals)
        finally:
            await self.aclose()

    def choose(self, only: Collection[str] = ()) -> tuple[Service, ...]:
        """Keep the parts that this process runs, all if none is named, and return their services.

        `run` does it; who wants to know before calls it before. Raises InvalidOption for a part that does not exist,
        NotConfigured for one that this app does not have.
        """
        only = check_texts("only", only)
        if self.settings.alerts.has_target:
            self.use_alerts()
        if self.tasks and (keeper := self._tasks.schedules) not in self.services:
            self.add(keeper)
        self._services.keep_only(only)
        self._features.record(self.services)
        return self.services

    async def leave_loop(self) -> None:
        """Send what queues still hold and close what belongs to the running event loop; in another loop the app's
        queues work again. For tests, where each has a loop of its own."""
        await self._resources.leave_loop()

    async def stop(self, timeout: int | timedelta | None = None) -> None:
        """End `run` gracefully; `timeout` is that of `Worker.close`."""
        await self._services.stop(timeout)

    async def aclose(self) -> None:
        """Stop what runs, send what queues still hold, then let go of the connections. Safe to call twice."""
        await self.stop()
        await self._resources.close_queues()
        await self._features.aclose()
        await self._resources.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _used(part: T | None, name: str) -> T:
    """Reading a property starts nothing: a program calls what its app runs."""
    if part is None:
        raise NotConfigured(f"this app does not use {name}; call app.use_{name}() where the app is made")
    return part
