"""`bullpen dashboard`: the pages in a process of their own, on the own machine unless asked for otherwise."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bullpen._kernel.ownership import NO_FOLLOW, Distrusted, read_trusted
from bullpen.cli import show
from bullpen.cli.context import LogLevelOption, ServiceOnServer, WrongCommand, interruptible
from bullpen.cli.serve import on_signals, run_until
from bullpen.cli.tree import Argument, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen, Service
    from bullpen.settings import DashboardSettings

_MODES = (
    "none (only on the own machine), token, passwords or proxy; set BULLPEN_DASHBOARD_ACCESS to one of the last three"
)


@dataclass(frozen=True, kw_only=True)
class QuietService(ServiceOnServer):
    """Its address is all that a person at a terminal wants to see."""

    log_level: LogLevelOption = "warning"


async def dashboard(
    at: QuietService,
    target: Annotated[
        str | None,
        Argument("[MODULE:APP]", "Also show the parts of this app; nothing of it is run."),
    ] = None,
    http: Annotated[str, Option(metavar="HOST:PORT", help="Serve the pages at this address.")] = "127.0.0.1:9467",
    add_user: Annotated[
        str | None,
        Option(metavar="NAME", help="Only ask for a password and store it in the password file."),
    ] = None,
    role: Annotated[str, Option(help="With --add-user: viewer, operator or admin.")] = "viewer",
    queues: Annotated[
        str | None,
        Option(metavar="PATTERNS", help="With --add-user: the role holds for these queues only, with commas: mail-*."),
    ] = None,
) -> None:
    """Serve the web dashboard until SIGTERM or Ctrl-C. It runs no jobs.

    Without arguments it shows the queues of the configured or embedded server, to this machine only.
    """
    from bullpen.app import Bullpen
    from bullpen.cli.programs import load_app
    from bullpen.wiring.servers import CommandLine, obeying

    at.start_logging()
    with obeying(CommandLine(redis=at.redis, prefix=at.prefix)):
        app = Bullpen() if target is None else load_app(target)
    if add_user is not None:
        _add_user(app.settings.dashboard, add_user, role, queues)
        return
    stopped = on_signals()
    async with app:
        await run_until(stopped, make_service(app, http, public=at.http_public))


def make_service(app: Bullpen, address: str, *, public: bool) -> Service:
    """The pages as a service that listens already; prints where. Raises WrongCommand for an address of others without
    an access mode."""
    from bullpen.dashboard import Dashboard, make_dashboard
    from bullpen.http.serve import HttpService, parse_address

    settings = app.settings.dashboard
    if public and settings.access == "none":
        raise WrongCommand(f"other machines can connect to {address}, so set an access mode: {_MODES}")
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
    show.say(f"dashboard: http://{shown}:{service.port}")
    if settings.token is not None and settings.token != app.settings.dashboard.token:
        show.say(f"token: {settings.token}")
    return service


def _add_user(settings: DashboardSettings, name: str, role: str, queues: str | None) -> None:
    """Write one user to the file, which only its owner may read."""
    from bullpen.dashboard.access import Role, hash_password

    if settings.passwords is None:
        raise WrongCommand("set BULLPEN_DASHBOARD_PASSWORDS to the path of the password file")
    if role not in set(Role):
        raise WrongCommand(f"{role!r} is not a role; write {', '.join(Role)}")
    with interruptible():
        password = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if len(password) < 8:
        raise WrongCommand("a password has at least 8 characters")
    path: Path = settings.passwords
    try:
        known_users = read_trusted(path)
    except Distrusted as reason:
        raise WrongCommand(f"{path} {reason}; choose another file") from None
    content: dict[str, Any] = (
        {"key": secrets.token_hex(32), "users": {}} if known_users is None else json.loads(known_users)
    )
    known = content["users"].get(name, {})
    changed: dict[str, Any] = {"password": hash_password(password), "role": role}
    if queues is not None:
        changed["queues"] = [each.strip() for each in queues.split(",") if each.strip()]
    content["users"][name] = {**known, **changed}
    # A name that nobody can guess: what another user of the machine put there would be his, and the keys with it.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    temporary.replace(path)
    show.say(f"{name} may log in as {role}")
