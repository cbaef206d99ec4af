"""`bullpen exporter`: metrics for Prometheus from a process that is not a worker, so they survive every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from bullpen.cli.context import DatabaseOption, ServiceOnServer
from bullpen.cli.serve import on_signals, run_until
from bullpen.cli.tree import Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ops.exporter import Exporter


@dataclass(frozen=True, kw_only=True)
class ServiceOnBoth(ServiceOnServer):
    """A program that stays, on a server of queues and a database."""

    database: DatabaseOption = None


async def exporter(
    at: ServiceOnBoth,
    http: Annotated[
        str, Option(metavar="HOST:PORT", help="Serve /metrics, /livez and /readyz at this address.")
    ] = "127.0.0.1:9465",
) -> None:
    """Serve metrics of all queues of a server, also those of Node, and of the ledger, until SIGTERM or Ctrl-C.

    It needs no application, runs no jobs and changes nothing. One per server and prefix is enough.
    """
    from bullpen._kernel.logs import get_logger
    from bullpen.app import Bullpen
    from bullpen.http.ops import OpsApp
    from bullpen.http.serve import HttpService, parse_address
    from bullpen.ops.health import Health
    from bullpen.settings import Settings

    at.start_logging()
    logger = get_logger("bullpen.exporter")
    settings = Settings.load(redis_url=at.redis, redis_prefix=at.prefix, ledger_url=at.database)
    async with Bullpen(settings=settings) as app:
        made = _exporter(app)
        # Without checks: it is ready while the server is away, because that is what it tells.
        service = HttpService(OpsApp(Health().report, made.collect), *parse_address(http), public=at.http_public)
        stopped = on_signals()
        named = {"redis": f"the server of the queues under the prefix {app.prefix}", "ledger": "the ledger"}
        logger.info("reporting on %s", " and ".join(named[source.name] for source in made.sources))
        try:
            await run_until(stopped, service)
        finally:
            await made.aclose()
    logger.info("stopped")


def _exporter(app: Bullpen) -> Exporter:
    from bullpen.ops.exporter import Exporter, LedgerSource, ServerSource, Source

    settings = app.settings
    sources: list[Source] = []
    if settings.has_redis() or not settings.has_ledger():
        settings.connection_url()  # says what is missing, before anything is served
        sources.append(ServerSource(app.connection, app.prefix))
    if settings.has_ledger():
        stuck_ms = settings.alerts.run_stuck_ms
        sources.append(LedgerSource(app.ledger, **({"run_stuck_ms": stuck_ms} if stuck_ms else {})))
    return Exporter(sources)
