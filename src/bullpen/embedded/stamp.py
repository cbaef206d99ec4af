"""What a data directory says about its server: which one wrote it last, and where it listens."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from bullpen.errors import EmbeddedError, InvalidOption, require

Sync = Literal["everysec", "always"]
"""When the server brings its file to the disk: once a second, or before it answers."""
SYNCS: Final = ("everysec", "always")
STAMP_FILE: Final = "server.json"
ELSEWHERE: Final = "choose another directory with BULLPEN_DATA_DIR"


@dataclass(frozen=True, slots=True)
class Tcp:
    port: int
    password: str

    @classmethod
    def check(cls, port: int | None, password: str | None) -> Tcp | None:
        if port is None:
            require(
                "password", password is None, "None without tcp_port: the socket is protected by its directory", "…"
            )
            return None
        is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
        require("tcp_port", is_port, "a port from 1 to 65535", port)
        if not isinstance(password, str) or not password:
            shown = type(password).__name__ if password is not None else None  # a secret is never shown
            raise InvalidOption("password", "a password, because every user of this machine can reach tcp_port", shown)
        return cls(port, password)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which server wrote the directory last, and where it listens. Kept when it has ended, to refuse a downgrade."""

    name: str
    version: str
    socket: str
    tcp_port: int | None = None
    password: str | None = None
    appendfsync: Sync = "everysec"

    @property
    def tcp(self) -> Tcp | None:
        return Tcp(self.tcp_port, self.password) if self.tcp_port is not None and self.password else None

    @property
    def credentials(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    @classmethod
    def read(cls, directory: Path) -> Stamp | None:
        try:
            stored: Any = json.loads((directory / STAMP_FILE).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise EmbeddedError(f"{directory / STAMP_FILE} cannot be read ({error}); {ELSEWHERE}") from error
        try:
            if stored["stamp"] != "bullpen":
                raise KeyError("stamp")
            path = str(directory / stored["socket"])
            sync: Sync = "always" if stored.get("appendfsync") == "always" else "everysec"
            return cls(str(stored["name"]), str(stored["version"]), path, stored["tcp_port"], stored["password"], sync)
        except (KeyError, TypeError, AttributeError) as error:
            raise EmbeddedError(f"{directory / STAMP_FILE} was not written by bullpen; {ELSEWHERE}") from error

    def write(self, directory: Path) -> None:
        path = Path(self.socket)
        # By its name alone if it lies in the directory, which may be moved, with a running server in it or without.
        stored = {"stamp": "bullpen", **asdict(self), "socket": path.name if path.parent == directory else self.socket}
        unfinished = directory / f"{STAMP_FILE}.{secrets.token_hex(4)}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # it may hold the password
        with os.fdopen(descriptor, "w") as file:
            json.dump(stored, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(directory / STAMP_FILE)
