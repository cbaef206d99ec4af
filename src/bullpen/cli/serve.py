"""`bullpen serve`: an ASGI application in a process of its own, behind the limits of the HTTP service."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import typer

from bullpen.app import Bullpen
from bullpen.cli.common import HttpPublicOption, LogFormatOption, LogLevelOption, WrongCommand, speak_as_told, wait_for
from bullpen.cli.run_app import find_object


def serve(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:APPLICATION", help="Where the ASGI application is."),
    ],
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve it here.")] = "127.0.0.1:9466",
    http_public: HttpPublicOption = False,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "console",
) -> None:
    """Serve an ASGI application until SIGTERM or Ctrl-C, apart from the workers. It takes no jobs."""
    speak_as_told(log_level, log_format)
    wait_for(_serve(_application(target), http, public=http_public))


def _application(target: str) -> Any:
    module_name, name, _, found = find_object(target)
    if isinstance(found, Bullpen) or not callable(found):
        raise WrongCommand(f"{module_name!r} has no ASGI application called {name!r}")
    return found


async def _serve(application: Any, address: str, *, public: bool) -> None:
    from bullpen.http.serve import HttpService, parse_address

    service = HttpService(application, *parse_address(address), public=public, lifespan=True, extra="http")
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    running = asyncio.create_task(service.run())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await service.close()
    await running
