"""`bullpen run`: run the workers of an application, in this process or in several that are watched over."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import click

from bullpen._kernel.logs import get_logger
from bullpen.cli.arguments import AppArgument
from bullpen.cli.completion import words
from bullpen.cli.context import ServiceOnServer, WrongCommand
from bullpen.cli.programs import load_app
from bullpen.cli.tree import Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ports.bindings import Binding

logger = get_logger("bullpen.run")

_THREADS_END_WITHIN_S: Final = 1.0
"""For all threads together; one that is idle needs no time of its own but its turn on a busy machine."""
_PARTS: Final = ("worker", "outbox", "projector", "messages", "alerts")


def run(
    at: ServiceOnServer,
    target: AppArgument,
    processes: Annotated[int, Option(min=1, help="Number of worker processes; one that dies is restarted.")] = 1,
    concurrency: Annotated[
        str | None,
        Option(metavar="N|auto", help="Jobs at a time per worker; overrides the code. auto: as many as fit."),
    ] = None,
    http: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help="Serve /livez, /readyz and /metrics at this address; each further process uses the next port.",
        ),
    ] = None,
    dashboard: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Serve the web dashboard at this address too.")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="PART",
            help=f"Run only this part: {', '.join(_PARTS)}. May be repeated.",
            complete=words(*_PARTS),
        ),
    ] = None,
    prune_schedules: Annotated[
        bool, Option("--prune-schedules", help="Remove schedules that no task declares any more.")
    ] = False,
    reload: Annotated[
        bool, Option("--reload", help="Start again when a Python file below this directory changes. For development.")
    ] = False,
    told: Annotated[list[str] | None, Option(hidden=True)] = None,
    lifeline: Annotated[int | None, Option(hidden=True)] = None,
    slot: Annotated[int, Option(hidden=True)] = 1,
) -> None:
    """Run the workers of an application until SIGTERM or Ctrl-C.

    The first signal waits for running jobs, a second one gives them back, a third one stops at once (exit code 143).
    """
    from bullpen.wiring.servers import CommandLine, obeying

    most = _read_concurrency(concurrency)
    at.start_logging()
    # Through the environment as well: for queues that the module makes itself, and for child processes, whose command
    # lines everybody on the machine may read. They are `--told` which of the two came from ours.
    for variable, value in (("BULLPEN_REDIS_URL", at.redis), ("BULLPEN_PREFIX", at.prefix)):
        if value is not None:
            os.environ[variable] = value
    given = [*(told or []), *(["redis"] if at.redis else []), *(["prefix"] if at.prefix else [])]
    if processes > 1 or reload:
        from bullpen.cli.code_changes import CodeChanges
        from bullpen.cli.supervisor import Supervisor

        changes = CodeChanges(Path.cwd()) if reload else None
        options = ["--log-level", at.log_level, "--log-format", at.log_format]
        options += [*(["--concurrency", concurrency] if concurrency else [])]
        options += ["--http", http] if http else []
        options += ["--http-public"] if at.http_public else []
        options += ["--dashboard", dashboard] if dashboard else []
        options += ["--prune-schedules"] if prune_schedules else []
        options += [word for part in only or () for word in ("--only", part)]
        options += [word for name in given for word in ("--told", name)]
        raise click.exceptions.Exit(asyncio.run(Supervisor(["run", target, *options], processes, changes).run()))
    with obeying(
        CommandLine(
            redis=os.environ["BULLPEN_REDIS_URL"] if "redis" in given else None,
            prefix=os.environ["BULLPEN_PREFIX"] if "prefix" in given else None,
        )
    ):
        app = load_app(target)
    if http is not None:
        _serve(app, http, slot, public=at.http_public)
    if dashboard is not None and slot == 1:  # one is enough for all processes
        from bullpen.cli.dashboard import make_service

        app.add(make_service(app, dashboard, public=at.http_public))
    _run_here(app, most, lifeline, only or [], prune_schedules=prune_schedules)


def _read_concurrency(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise WrongCommand(f"--concurrency: a number of at least 1, or auto, not {text!r}")
    return int(text)


def _serve(app: Bullpen, address: str, slot: int, *, public: bool) -> None:
    from bullpen.http.ops import OpsApp
    from bullpen.http.serve import HttpService, parse_address

    host, port = parse_address(address)
    app.observe()
    pages = OpsApp(app.health.report, app.metrics)
    app.add(HttpService(pages, host, port and port + slot - 1, public=public))


def _run_here(
    app: Bullpen,
    concurrency: int | Literal["auto"] | None,
    lifeline: int | None,
    only: list[str],
    *,
    prune_schedules: bool,
) -> None:
    from bullpen.settings import misspelt_variables

    async def main() -> None:
        if lifeline is not None:
            _stop_without(lifeline, app)
        told = _what_runs(app, only)
        for name, meant in misspelt_variables().items():
            logger.warning("%s is not a setting and has no effect; did you mean %s?", name, meant)
        # In a thread: the embedded server may have to be started before it has an address.
        logger.info("%s%s", told, await asyncio.to_thread(_where, app))
        await app.run(concurrency=concurrency, only=only, prune_schedules=prune_schedules)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())
    logger.info("stopped")
    _leave_behind_stuck_threads()


def _what_runs(app: Bullpen, only: list[str]) -> str:
    """A sentence about what this process runs; raises for parts that the app does not have, before anything is
    started."""
    from bullpen.wiring.running import role_of

    roles = {role_of(service) for service in app.choose(only)}
    sources = [worker.queue_name for worker in app.workers] if "worker" in roles else []
    sources += ["the outbox"] if "outbox" in roles else []
    sources += [f"workflow {workflow.name}" for workflow in app.workflows.all] if "worker" in roles else []
    others = ", ".join(role for role in ("projector", "messages", "alerts") if role in roles)
    taking = f"taking jobs from {', '.join(sources)}" if sources else ""
    return "; ".join(text for text in (taking, f"running {others}" if others else "") if text)


def _where(app: Bullpen) -> str:
    """The servers in use, so that the first log line shows whether they are the right ones."""
    from bullpen._kernel.addresses import show_address
    from bullpen.wiring.running import role_of

    servers = [_redis(app)] if app.uses_redis else []
    roles = {role_of(service) for service in app.services}
    brokers = [
        (binding.label, address)
        for binding in [workflow.binding for workflow in app.workflows.all if "worker" in roles]
        if binding is not None
        for address in _addresses(binding)
    ]
    if "messages" in roles and app.settings.messages.transport == "rabbitmq":
        brokers += [("RabbitMQ", url) for url in app.settings.rabbitmq.urls]
    for label in dict.fromkeys(label for label, _ in brokers):
        found = dict.fromkeys(show_address(address) for each, address in brokers if each == label)
        servers.append(f"{label} {', '.join(found)}")
    if app.made_ledger is not None:
        # Without the driver, which nobody wrote down.
        servers.append("ledger " + re.sub(r"^([a-z]+)[+][a-z0-9]+:", r"\1:", app.made_ledger.database.address))
    return f" on {', '.join(servers)}" if servers else ""


def _addresses(binding: Binding[Any]) -> Iterable[str]:
    """Where a workflow's broker is, if that is another server than that of the queues."""
    from bullpen.ports.bindings import Kafka, RabbitMQ

    match binding:
        case RabbitMQ():
            return [binding.urls] if isinstance(binding.urls, str) else binding.urls
        case Kafka():
            return binding.broker_list()
        case _:
            return ()


def _redis(app: Bullpen) -> str:
    address = app.connection.address
    node = getattr(address, "node", address)  # behind sentinels
    database = f", database {node.db}" if hasattr(node, "db") else ""  # a cluster has only one
    return f"{address}{database}, prefix {app.prefix}"


def _stop_without(lifeline: int, app: Bullpen) -> None:
    """Stop when the other end of the pipe is closed: the supervisor has died and cannot stop this process any more."""
    loop = asyncio.get_running_loop()

    def on_end() -> None:
        loop.remove_reader(lifeline)
        logger.warning("the supervisor has died; stopping")
        stopping.append(loop.create_task(app.stop()))

    stopping: list[asyncio.Task[None]] = []
    loop.add_reader(lifeline, on_end)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed (the extra `fast`)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _leave_behind_stuck_threads() -> None:
    """A `def` handler that does not return cannot be stopped; Python would wait for its thread for ever."""
    patience = time.monotonic() + _THREADS_END_WITHIN_S
    stuck = []
    for each in threading.enumerate():
        if not each.daemon and each is not threading.main_thread():
            each.join(max(0.0, patience - time.monotonic()))  # an idle one has been told to end, and is about to
            if each.is_alive():
                stuck.append(each)
    if stuck:
        logger.warning("exiting although %d handler threads do not stop", len(stuck))
        logging.shutdown()
        os._exit(0)
