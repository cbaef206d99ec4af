"""`bullpen dashboard`: the pages in a process of their own, on the own machine unless told otherwise."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from bullpen._kernel.logs import get_logger
from bullpen.app import Bullpen, Service
from bullpen.cli.common import (
    HttpPublicOption,
    LogFormatOption,
    LogLevelOption,
    PrefixOption,
    RedisOption,
    WrongCommand,
    out,
    speak_as_told,
    wait_for,
)
from bullpen.cli.run_app import load_app
from bullpen.settings import DashboardSettings
from bullpen.wiring.servers import CommandLine, obeying

logger = get_logger("bullpen.dashboard")

_MODES = (
    "none (only on the own machine), token, passwords or proxy; set BULLPEN_DASHBOARD_ACCESS to one of the last three"
)


def dashboard(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:APP]", help="Also show what this app has; nothing of it is run."),
    ] = None,
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve the pages here.")] = "127.0.0.1:9467",
    http_public: HttpPublicOption = False,
    add_user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only ask for a password and write it to the file of passwords."),
    ] = None,
    role: Annotated[str, typer.Option(help="With --add-user: viewer, operator or admin.")] = "viewer",
    log_level: LogLevelOption = "warning",
    log_format: LogFormatOption = "console",
    redis: RedisOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Serve the web dashboard until SIGTERM or Ctrl-C. It takes no jobs.

    Without arguments it shows the queues of the configured server, or of the embedded one, on the own machine.
    """
    speak_as_told(log_level, log_format)
    with obeying(CommandLine(redis=redis, prefix=prefix)):
        app = Bullpen() if target is None else load_app(target)
    if add_user is not None:
        _add_user(app.settings.dashboard, add_user, role)
        return
    wait_for(_serve(app, http, public=http_public))


def make_service(app: Bullpen, address: str, *, public: bool) -> Service:
    """The pages as a service that listens already; prints where. Raises WrongCommand for an address of others without
    an access mode."""
    from bullpen.dashboard import Dashboard, make_dashboard
    from bullpen.http.serve import HttpService, parse_address

    settings = app.settings.dashboard
    if public and settings.access == "none":
        raise WrongCommand(f"others may connect to {address}, so it needs an access mode: {_MODES}")
    if settings.access == "token" and settings.token is None:
        settings = replace(settings, token=secrets.token_urlsafe(24))

    class DashboardService(HttpService):
        """Ends open streams before it waits for answers."""

        def __init__(self, pages: Dashboard, host: str, port: int) -> None:
            super().__init__(pages, host, port, public=public, extra="dashboard")
            self._pages = pages

        async def run(self, *, signals: bool | None = None) -> None:
            await self._pages.start()
            await super().run(signals=signals)

        async def close(self, timeout: int | timedelta | None = None) -> None:
            await self._pages.aclose()
            await super().close(timeout)

    host, port = parse_address(address)
    service = DashboardService(make_dashboard(app, settings=settings), host, port)
    shown = f"[{host}]" if ":" in host else host
    out.print(f"dashboard: http://{shown}:{service.port}", markup=False)
    if settings.token is not None and settings.token != app.settings.dashboard.token:
        out.print(f"token: {settings.token}", markup=False)
    return service


async def _serve(app: Bullpen, address: str, *, public: bool) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the address is printed: who reads it may stop it at once
        loop.add_signal_handler(number, stopped.set)
    async with app:
        service = make_service(app, address, public=public)
        running = asyncio.create_task(service.run())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await service.close()
        await running


def _add_user(settings: DashboardSettings, name: str, role: str) -> None:
    """Write one user to the file, which nobody else may read."""
    from bullpen.dashboard.access import Role, hash_password

    if settings.passwords is None:
        raise WrongCommand("set BULLPEN_DASHBOARD_PASSWORDS to the path of the file of passwords")
    if role not in set(Role):
        raise WrongCommand(f"{role!r} is no role; write {', '.join(Role)}")
    password = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if len(password) < 8:
        raise WrongCommand("a password has at least 8 characters")
    path: Path = settings.passwords
    content: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"key": secrets.token_hex(32), "users": {}}
    )
    known = content["users"].get(name, {})
    content["users"][name] = {**known, "password": hash_password(password), "role": role}
    temporary = path.with_name(f"{path.name}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    temporary.replace(path)
    out.print(f"{name} may come in as {role}", markup=False)
