"""`bullpen exporter`: numbers for Prometheus from a process that is no worker, so that they outlive every worker."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from bullpen._kernel.logs import get_logger
from bullpen.app import Bullpen
from bullpen.cli.common import (
    HttpPublicOption,
    LogFormatOption,
    LogLevelOption,
    PrefixOption,
    RedisOption,
    speak_as_told,
    wait_for,
)
from bullpen.cli.outbox import DatabaseOption
from bullpen.ops.exporter import Exporter, LedgerSource, ServerSource, Source
from bullpen.ops.health import Health
from bullpen.settings import Settings

logger = get_logger("bullpen.exporter")


def exporter(
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve /metrics, /livez and /readyz here.")
    ] = "127.0.0.1:9465",
    http_public: HttpPublicOption = False,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "console",
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    database: DatabaseOption = None,
) -> None:
    """Serve the numbers of all queues of a server, Node's too, and of the ledger, until SIGTERM or Ctrl-C.

    It needs no application and takes no jobs. One per server and prefix is enough. It changes nothing.
    """
    speak_as_told(log_level, log_format)
    settings = Settings.load(redis_url=redis, redis_prefix=prefix, ledger_url=database)
    wait_for(_serve(settings, http, public=http_public))


async def _serve(settings: Settings, address: str, *, public: bool) -> None:
    from bullpen.http.ops import OpsApp
    from bullpen.http.serve import HttpService, parse_address

    async with Bullpen(settings=settings) as app:
        exporter = _exporter(app)
        # Without checks: it is ready while the server is away, because that is what it tells.
        service = HttpService(OpsApp(Health().report, exporter.collect), *parse_address(address), public=public)
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        named = {"redis": f"the server of the queues under the prefix {app.prefix}", "ledger": "the ledger"}
        logger.info("telling of %s", " and ".join(named[source.name] for source in exporter.sources))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(service.run())
                await stopped.wait()
                await service.close()
        finally:
            await exporter.aclose()
    logger.info("stopped")


def _exporter(app: Bullpen) -> Exporter:
    settings = app.settings
    sources: list[Source] = []
    if settings.has_redis() or not settings.has_ledger():
        settings.connection_url()  # says what is missing, before anything is served
        sources.append(ServerSource(app.connection, app.prefix))
    if settings.has_ledger():
        stuck_ms = settings.alerts.run_stuck_ms
        sources.append(LedgerSource(app.ledger, **({"run_stuck_ms": stuck_ms} if stuck_ms else {})))
    return Exporter(sources)
