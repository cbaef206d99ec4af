"""The features that an application uses: outbox, messages, runs, projectors, workflows, alerts.

In: what the program asks for (`use_outbox`, …), and what the app opens by its settings. Out: each made once, run as a
service, with its metrics, checks and dead letters known to the app. Elsewhere: making each (its module beside this
one), running them (`running`), showing them (`observing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from bullpen._kernel.container import Container
from bullpen._kernel.service import Service
from bullpen.errors import InvalidOption
from bullpen.redis import Connection
from bullpen.wiring.observing import Observing
from bullpen.wiring.resources import Resources
from bullpen.wiring.running import Services, role_of

if TYPE_CHECKING:  # each is loaded when it is first used: it needs an extra, or most commands need none of it
    from bullpen.messages import Messages
    from bullpen.ops.alerts import Watcher
    from bullpen.outbox import Endpoints, EventRoutes, Outbox, Projector, ProjectorOptions, Route
    from bullpen.plugins.messaging import MessagingClient
    from bullpen.plugins.metrics import MessagingMetrics
    from bullpen.ports.dead_letters import DeadLetterStore
    from bullpen.ports.source import EventSource
    from bullpen.runs import Runs
    from bullpen.wiring.workflows import Workflows
    from bullpen.worker import Worker
    from bullpen.worker.around import Around
    from bullpen.worker.options import WorkerArguments
    from bullpen.workflow.metrics import WorkflowMetrics
    from bullpen.workflow.service import Workflow

__all__ = ["AppFeatures"]

AnyWorkflow = TypeVar("AnyWorkflow", bound="Workflow[Any, Any, Any, Any]")


class AppFeatures:
    """Those of one app. An attribute is None until the program uses the feature."""

    def __init__(self, resources: Resources, around: Callable[[], Around], container: Container) -> None:
        self._resources, self._around = resources, around
        self.services = Services(
            self.count_running, lambda: around().started(), lambda seconds: around().limit_end(seconds)
        )
        self.observing = Observing(resources, self.workers_here, self.needs_redis)
        self.container = container
        self.workers: dict[str, Worker] = {}
        self._make_worker: dict[str, Callable[[], Worker]] = {}
        self.outbox: Outbox | None = None
        self._endpoints: Endpoints | None = None
        self.messages: Messages | None = None
        self.runs: Runs | None = None
        self.watcher: Watcher | None = None
        self.projectors: dict[str, Projector] = {}
        self.letter_stores: list[DeadLetterStore] = []
        self._workflows: Workflows | None = None
        self._messaging_metrics: MessagingMetrics | None = None
        self._workflow_metrics: WorkflowMetrics | None = None
        self._records = False

    # ---- using them ---------------------------------------------------------------------------------------------

    def add_worker(self, queue: str, handler: Callable[..., Any], **options: Unpack[WorkerArguments]) -> Worker:
        """One per queue: two handlers would each get a random half of the jobs."""
        if queue in self.workers:
            raise InvalidOption("queue", f"a queue without a worker in this app; {queue!r} has one", queue)
        from bullpen.worker import Worker

        opened = self._resources
        given: WorkerArguments = {"codec": opened.codec, **options}
        self._make_worker[queue] = partial(
            Worker, queue, handler, connection=opened.connection, prefix=opened.prefix, **given
        )
        worker = self.workers[queue] = self.new_worker(queue)
        self.services.add(worker)
        return worker

    @property
    def workers_declared(self) -> tuple[str, ...]:
        """The queues whose jobs handlers and tasks of this app run."""
        return tuple(self._make_worker)

    def new_worker(self, queue: str) -> Worker:
        """A worker as the program declared it. Each works once, from its start to its end."""
        worker = self._make_worker[queue]()
        worker.surround(self._around())
        return worker

    def use_outbox(self) -> Outbox:
        if self.outbox is None:
            from bullpen.outbox.endpoints import ENDPOINTS
            from bullpen.wiring.outbox import OutboxService, make_outbox

            opened = self._resources
            connection = opened.connection if opened.has_redis else None
            self.outbox = make_outbox(opened.settings, opened.ledger, connection, opened.prefix, opened.codec)
            for name, route in self._alert_routes().items():
                self.outbox.route(name, route)
            # Always: a process that dispatches must not take the messages of endpoints for misspelt ones.
            self.outbox.route(ENDPOINTS, self.endpoints.route)
            self.observing.add(self.outbox.metrics)
            self.services.add(OutboxService(self.outbox, opened.prepare))
        return self.outbox

    @property
    def endpoints(self) -> Endpoints:
        if self._endpoints is None:
            from bullpen.wiring.endpoints import make_endpoints

            opened = self._resources
            self._endpoints = make_endpoints(opened.settings, opened.ledger, opened.codec)
        return self._endpoints

    def _alert_routes(self) -> dict[str, Route]:
        settings = self._resources.settings
        if not settings.alerts.has_target:
            return {}
        from bullpen.wiring.alerts import alert_routes

        return alert_routes(settings)

    def use_messages(self) -> Messages:
        if self.messages is None:
            from bullpen.messages.metrics import MessageMetrics
            from bullpen.wiring.messages import MessageService, make_messages
            from bullpen.wiring.ops import check_messages

            opened = self._resources
            made = make_messages(opened.settings, opened.ledger, lambda: opened.connection, opened.prefix)
            self.messages = made
            self._count_messaging()
            self.observing.add_listening(
                MessageMetrics(lambda: [(kind.name, channel) for kind in made.occasions for channel in made.routes])
            )
            check_messages(self.observing.health, made, lambda: self.services.runs("messages"))
            self.services.add(MessageService(made, opened.prepare))
        return self.messages

    def use_runs(self) -> Runs:
        if self.runs is None:
            from bullpen.wiring.runs import RunsService, make_runs

            self.use_outbox()
            opened = self._resources
            self.runs = make_runs(opened.settings, opened.ledger, opened.connection, opened.prefix, self.container)
            self.services.add(RunsService(self.runs, opened.prepare, self.workers))
        return self.runs

    def use_alerts(self) -> Watcher:
        if self.watcher is None:
            from bullpen.wiring.alerts import AlertService, make_watcher

            opened = self._resources
            self.watcher = make_watcher(
                opened.settings, opened.ledger, self.connection_in_use, opened.prefix, lambda: self.letter_stores
            )
            self.observing.add(self.watcher)
            self.services.add(AlertService(self.watcher, opened.ledger, opened.settings, opened.prepare))
        return self.watcher

    def add_projector(
        self, routes: EventRoutes, source: EventSource | None, name: str, options: ProjectorOptions | None
    ) -> Projector:
        from bullpen.wiring.projector import make_projector

        if name in self.projectors:
            raise InvalidOption("name", "a name that no other projector of this app has", name)
        opened = self._resources
        made = make_projector(opened.settings, opened.ledger, opened.prepare, routes, source, name, options)
        self.projectors[name] = made.projector
        self.observing.add(made.metrics)
        self.observing.health.add(f"projector {name}", made.check, needed=lambda: self.services.runs("projector"))
        self.services.add(made)
        return made.projector

    @property
    def workflows(self) -> Workflows:
        if self._workflows is None:
            from bullpen.wiring.workflows import Workflows

            opened = self._resources
            self._workflows = Workflows(
                opened.settings, lambda: opened.connection, opened.prefix, self.container, self.workers.__contains__
            )
        return self._workflows

    def adopt(self, workflow: AnyWorkflow) -> AnyWorkflow:
        """Run a workflow that was registered, count and check it."""
        if self._workflow_metrics is None:  # with the first one: an app without workflows counts nothing
            from bullpen.workflow.metrics import WorkflowMetrics

            self._workflow_metrics = WorkflowMetrics(lambda: self.workflows.all)
            self.observing.add_listening(self._workflow_metrics)
            self._count_messaging()
        self.services.add(workflow)
        self.observing.health.add(
            f"workflow {workflow.name}",
            workflow.check,
            needed=lambda: not self.services.is_running or workflow in self.services.all,
        )
        self.letter_stores += self.workflows.dead_letters_of(workflow)
        return workflow

    def _count_messaging(self) -> None:
        """One collector for all clients of this app, whatever they carry."""
        if self._messaging_metrics is None:
            from bullpen.plugins.metrics import MessagingMetrics

            self._messaging_metrics = MessagingMetrics(self._messaging_clients)
            self.observing.add_listening(self._messaging_metrics)

    def record(self, services: Sequence[Service]) -> None:
        """Keep the history of the workers among these services, and tell what they do."""
        workers = [worker for worker in self.workers.values() if worker in services]
        if self._records or not workers or not self._resources.settings.dashboard.history:
            return
        from bullpen.ops.recorder import Recorder

        self._records = True
        self.services.add(Recorder(lambda: workers))

    # ---- what of them is here -----------------------------------------------------------------------------------

    def _messaging_clients(self) -> list[MessagingClient[Any]]:
        from bullpen.plugins.messaging import MessagingClient

        made: list[object] = [] if self.messages is None else [self.messages.made_messaging]
        if self._workflows is not None:
            made += [workflow.client for workflow in self._workflows.all]
        return [client for client in made if isinstance(client, MessagingClient)]

    def _taking_workers(self, *, here_only: bool = False) -> list[Worker]:
        """Those that take events and orders for the clients of this app, or of them those on its own server."""
        transports: list[Any] = [client.transport for client in self._messaging_clients()]
        own = self._resources.made_connection
        return [
            worker
            for transport in transports
            if hasattr(transport, "workers") and (not here_only or transport.connection is own)
            for worker in transport.workers
        ]

    def message_queues(self) -> list[str]:
        """Queues of the app's own server whose jobs are events of workflows or orders of messages."""
        return [worker.queue_name for worker in self._taking_workers(here_only=True)]

    def workers_here(self) -> tuple[Worker, ...]:
        """Those that run in this process, for handlers, workflows and messages; with `only` of other parts they run
        elsewhere, and show no life here."""
        own = tuple(self.workers.values()) if self.services.runs("worker") else ()
        return (*own, *self._taking_workers())

    def count_running(self) -> int:
        """Jobs and events that a stop waits for."""
        flows = [] if self._workflows is None else self._workflows.all
        return sum(worker.running for worker in self.workers.values()) + sum(flow.running for flow in flows)

    # ---- who uses the server of the queues ----------------------------------------------------------------------

    def needs_redis(self) -> bool:
        """Whether the parts that run here use the server of the queues; or whether the program may add jobs."""
        opened = self._resources
        if not self.services.is_running:
            return bool(opened.queues or self.workers) or (opened.made_ledger is None and not self.services.all)
        runs = self.services.runs
        by_messages = runs("messages") and opened.settings.messages.transport == "bullmq"
        return bool(self.workers_here()) or (runs("outbox") and opened.has_redis) or by_messages

    def uses_redis(self) -> bool:
        """Whether a part that `run` runs here uses the server of the queues."""
        return any(self._is_on_redis(service) for service in self.services.all)

    def _is_on_redis(self, service: Service) -> bool:
        match role_of(service):
            case "outbox":
                return self._resources.has_redis
            case "messages":
                return self._resources.settings.messages.transport == "bullmq"
            case "worker":
                from bullpen.worker import Worker

                by_workflow = self._workflows is not None and self._workflows.is_on_redis(service)
                return isinstance(service, Worker) or getattr(service, "uses_redis", False) or by_workflow
        return False

    def connection_in_use(self) -> Connection | None:
        """For those who look at queues: None where there is no server, or where nobody here has a use for one."""
        opened = self._resources
        if not opened.has_redis:
            return None
        is_open = opened.made_connection is not None or opened.settings.redis.url is not None
        works = [service for service in self.services.all if role_of(service) not in ("alerts", "http")]
        return opened.connection if is_open or not works or self.uses_redis() else None

    # ---- the end ------------------------------------------------------------------------------------------------

    def other_dead_letters(self) -> list[DeadLetterStore]:
        """Stores of dead letters that are neither queues of the server nor the outbox: those of transports, and those
        that were added."""
        from bullpen.wiring.dead_letters import message_dead_letters

        return [*self.letter_stores, *message_dead_letters(self._resources.settings, self.messages)]

    async def aclose(self) -> None:
        await self.observing.aclose()
        if self.outbox is not None:
            await self.outbox.aclose()
        if self._endpoints is not None:
            await self._endpoints.aclose()
        if self.messages is not None:
            await self.messages.aclose()
        if self.runs is not None:
            await self.runs.aclose()
