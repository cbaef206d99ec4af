"""Find the server that queues live on: the one that was named, the configured one, else the embedded one.

In: an address or none. Out: a `Connection` that connects later. An embedded server is started on first use, once per
process and directory, and kept until the process ends. Elsewhere: starting it (`bullpen.embedded`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bullpen.embedded import EmbeddedServer, Sync, acquire
from bullpen.errors import InvalidOption
from bullpen.redis import Connection
from bullpen.settings import Settings

__all__ = ["CommandLine", "command_line", "connect", "connect_to_configured", "obeying"]

_EMBEDDED: Final = "embedded://"
_servers: dict[tuple[Path, Sync | None], EmbeddedServer] = {}
_SYNC: Final = "?appendfsync="
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a person said at the prompt, which wins over what the code of the app says."""

    redis: str | None = None
    prefix: str | None = None


_NOTHING: Final = CommandLine()
_command_line: ContextVar[CommandLine] = ContextVar("bullpen_command_line", default=_NOTHING)


def command_line() -> CommandLine:
    """What holds for an app that is made now."""
    return _command_line.get()


@contextmanager
def obeying(told: CommandLine) -> Iterator[None]:
    """Around the import of a module: the apps that it makes use this server and prefix, whatever they name."""
    token = _command_line.set(told)
    try:
        yield
    finally:
        _command_line.reset(token)


def connect(url: str | None = None) -> Connection:
    """A connection to `url`, which may be `embedded://<dir>`; None: to what is configured, else the embedded server.

    `embedded://<dir>?appendfsync=always` lets that server sync before it answers.

    Does not connect yet. The embedded server is started on first use, and kept until this process ends.
    """
    if url is None:
        url = Settings.load().connection_url()
    if not url.startswith("embedded:"):
        return Connection(url)
    if not url.startswith(_EMBEDDED):
        raise InvalidOption("connection", "embedded://<dir>", url)
    named, asks, value = url.removeprefix(_EMBEDDED).partition(_SYNC)
    sync: Sync | None = None
    if asks:
        if value not in ("everysec", "always"):
            raise InvalidOption("connection", "appendfsync 'everysec' or 'always'", url)
        sync = "always" if value == "always" else "everysec"
    directory = Path(named).expanduser().absolute() if named else Settings.load().embedded.data_dir
    return Connection(partial(_embedded_url, directory, sync), revive=partial(_revive, directory, sync))


def connect_to_configured(settings: Settings) -> Connection:
    """A connection to what settings name. Where they name nothing, and nothing may be started, it says so on first use:
    a process that never uses it needs none."""
    if settings.has_redis():
        return connect(settings.connection_url())
    return Connection(settings.connection_url, revive=_nothing_to_start)


def _nothing_to_start() -> None:
    """Whoever has this is asked for the address first, outside of what counts as an outage."""


def _embedded_url(directory: Path, sync: Sync | None) -> str:
    with _starting:
        server = _servers.get((directory, sync))
        if server is None:
            server = _servers[directory, sync] = acquire(directory, appendfsync=sync)
        return server.url


def _revive(directory: Path, sync: Sync | None) -> None:
    _embedded_url(directory, sync)
    _servers[directory, sync].ensure_running()
