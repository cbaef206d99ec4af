"""`bullpen serve`: an ASGI application in a process of its own, behind the limits of the HTTP service."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated, Any

from bullpen.cli.context import ServiceOptions, WrongCommand
from bullpen.cli.tree import Argument, Option

if TYPE_CHECKING:
    from bullpen.app import Service as RunningService


async def serve(
    at: ServiceOptions,
    target: Annotated[str, Argument("MODULE:APPLICATION", "Where the ASGI application is.")],
    http: Annotated[str, Option(metavar="HOST:PORT", help="Serve it at this address.")] = "127.0.0.1:9466",
) -> None:
    """Serve an ASGI application until SIGTERM or Ctrl-C. It runs no jobs."""
    from bullpen.http.serve import HttpService, parse_address

    at.start_logging()
    stopped = on_signals()
    service = HttpService(
        _application(target), *parse_address(http), public=at.http_public, lifespan=True, extra="http"
    )
    await run_until(stopped, service)


def _application(target: str) -> Any:
    from bullpen.app import Bullpen
    from bullpen.cli.programs import find_object

    module_name, name, _, found = find_object(target)
    if isinstance(found, Bullpen) or not callable(found):
        raise WrongCommand(f"{module_name!r} has no ASGI application named {name!r}")
    return found


def on_signals() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C; from before an address is printed: who reads it may stop us at once."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


async def run_until(stopped: asyncio.Event, service: RunningService) -> None:
    """Run a service until it is stopped or fails."""
    running = asyncio.create_task(service.run())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await service.close()
    await running
