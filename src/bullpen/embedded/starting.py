"""Find the server of a directory, or start one under a supervisor, and wait until it answers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen._kernel.ownership import NO_FOLLOW
from bullpen.embedded.binary import dotted, find_binary, refuse_downgrade
from bullpen.embedded.directory import place_for_socket
from bullpen.embedded.locks import POLL_S, is_held
from bullpen.embedded.stamp import Stamp, Sync, Tcp
from bullpen.errors import EmbeddedError

_log = get_logger("bullpen.embedded")

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_COMPACT_BYTES = 512
"""Values up to this length leave a job's hash in the compact form, which servers give up beyond 64 bytes: jobs with 100
bytes of data take 40 % less memory, and no more time."""
_LARGEST_LOG_BYTES = 1024 * 1024
_ANSWER_DEADLINE_S = 1.0
_START_DEADLINE_S = 30.0


def find_or_start(directory: Path, tcp: Tcp | None, appendfsync: Sync | None) -> Stamp:
    """Return when a supervised server answers. The caller holds `start.lock` and uses the server already."""
    give_up, asked_to_end = time.monotonic() + _START_DEADLINE_S, False
    while True:
        stamp = Stamp.read(directory)
        if stamp is not None and is_supervised(directory):
            match _ask(stamp):
                case ServerAnswer.ALIVE:
                    return stamp
                case ServerAnswer.LOADING:
                    give_up = time.monotonic() + _START_DEADLINE_S
                case ServerAnswer.SILENT:
                    pass  # it ends, or has crashed a moment ago: its locks will tell
        elif not is_held(directory / "server.lock"):
            return _start(directory, tcp, appendfsync, stamp)
        elif stamp is not None and not asked_to_end:
            # Its supervisor was killed. Nobody would ever end it, so it ends now and a new one takes over its data.
            asked_to_end = True
            _ask(stamp, b"SHUTDOWN")
        if time.monotonic() > give_up:
            raise EmbeddedError(
                f"the embedded server in {directory} runs but has not answered for {_START_DEADLINE_S:.0f} s; "
                f"it may be frozen. The end of its log:\n{_end_of_log(directory)}"
            )
        time.sleep(POLL_S)


def runs(directory: Path, stamp: Stamp) -> bool:
    return is_supervised(directory) and _ask(stamp) is ServerAnswer.ALIVE


def is_supervised(directory: Path) -> bool:
    return is_held(directory / "supervisor.lock")


def sync_always(directory: Path, stamp: Stamp) -> Stamp:
    """Let a server that runs sync before it answers."""
    changed = replace(stamp, appendfsync="always")
    changed.write(directory)  # first: a server that is started again must not do less than was said
    reply = _converse(stamp, b"CONFIG SET appendfsync always")
    if not reply.endswith(b"+OK\r\n"):
        raise EmbeddedError(f"the embedded server in {directory} does not change to appendfsync 'always': {reply!r}")
    return changed


def _start(directory: Path, tcp: Tcp | None, appendfsync: Sync | None, before: Stamp | None) -> Stamp:
    binary = find_binary()
    refuse_downgrade(directory, before, binary)
    path = place_for_socket(directory, before)
    path.unlink(missing_ok=True)  # left behind by a server that was killed
    stamp = Stamp(
        binary.name,
        dotted(binary.version),
        str(path),
        tcp.port if tcp is not None else None,
        tcp.password if tcp is not None else None,
        appendfsync or (before.appendfsync if before is not None else "everysec"),
    )
    # Before the start: once the new server has written a byte, an older one must not touch the directory.
    stamp.write(directory)
    command = [str(binary.path), *_settings(directory, path, tcp, stamp.appendfsync)]
    began = time.monotonic()
    listener = _spawn_supervisor(directory, path, command)
    try:
        _wait_until_ready(directory, stamp, listener)
    finally:
        os.close(listener)
    telemetry.emit(
        "embedded.started",
        directory=str(directory),
        server=f"{stamp.name} {stamp.version}",
        took_ms=int((time.monotonic() - began) * 1000),
    )
    return stamp


def _settings(directory: Path, socket_path: Path, tcp: Tcp | None, appendfsync: Sync) -> list[str]:
    config = directory / "server.conf"
    first: list[str] = []
    if tcp is None:
        config.unlink(missing_ok=True)
    else:
        # In a private file and not on the command line, where every user of the machine could read it.
        escaped = "".join(f"\\x{byte:02x}" for byte in tcp.password.encode())
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f'requirepass "{escaped}"\n')
        first = [str(config)]
    return [
        *first,
        *("--port", str(tcp.port if tcp is not None else 0), "--bind", "127.0.0.1"),
        *("--unixsocket", str(socket_path), "--unixsocketperm", "700"),
        *("--dir", str(directory), "--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", str(directory / "server.log")),
        *("--hash-max-ziplist-value", str(_COMPACT_BYTES)),  # the name that servers of all versions know
    ]


def _spawn_supervisor(directory: Path, socket_path: Path, command: list[str]) -> int:
    """Start the supervisor; returns a descriptor that tells when it, or the server, has ended."""
    log = directory / "server.log"
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LARGEST_LOG_BYTES:
            log.replace(directory / "server.log.1")
    listener, teller = os.pipe()
    try:
        with log.open("ab") as errors:
            subprocess.run(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(directory), str(socket_path), *command],
                stdin=subprocess.DEVNULL,
                stdout=teller,
                stderr=errors,
                cwd=directory,
                start_new_session=True,  # Ctrl-C in the terminal of one user must not end the server of all
                timeout=_START_DEADLINE_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(listener)
        raise EmbeddedError(
            f"the supervisor of the embedded server cannot be started with {sys.executable!r}: {error}"
        ) from error
    finally:
        os.close(teller)
    os.set_blocking(listener, False)
    return listener


def _wait_until_ready(directory: Path, stamp: Stamp, listener: int) -> None:
    give_up, loading = time.monotonic() + _START_DEADLINE_S, False
    while True:
        match _ask(stamp):
            case ServerAnswer.ALIVE:
                return
            case ServerAnswer.LOADING:
                give_up = time.monotonic() + _START_DEADLINE_S
                if not loading:
                    loading = True
                    _log.info("the embedded server in %s reads its data", directory)
            case ServerAnswer.SILENT:
                pass
        try:
            os.read(listener, 100)  # "ended", or the end of the pipe: either way nobody is there
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(POLL_S)
                continue
            problem = f"did not answer within {_START_DEADLINE_S:.0f} s"
        else:
            problem = "did not start"
        raise EmbeddedError(
            f"the embedded server {stamp.name} {stamp.version} in {directory} {problem}. The end of its log:\n"
            f"{_end_of_log(directory)}"
        )


class ServerAnswer(Enum):
    SILENT = "silent"
    LOADING = "loading"
    ALIVE = "alive"


def _ask(stamp: Stamp, command: bytes = b"PING") -> ServerAnswer:
    """Send one command over the socket; any reply but "loading" is a sign of life, even an error (full disk)."""
    try:
        reply = _converse(stamp, command)
    except OSError as error:
        # A server that listens but has no room for one more connection is alive.
        return ServerAnswer.LOADING if error.errno == errno.EAGAIN else ServerAnswer.SILENT
    if not reply:
        return ServerAnswer.SILENT
    return ServerAnswer.LOADING if b"-LOADING" in reply else ServerAnswer.ALIVE


def _converse(stamp: Stamp, command: bytes) -> bytes:
    """The reply to one command, behind that to the password if there is one; empty when the server hung up."""
    lines = 1
    request = command + b"\r\n"
    if stamp.password:
        secret = stamp.password.encode()
        request = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(secret), secret) + request
        lines = 2
    reply = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_DEADLINE_S)
        connection.connect(stamp.socket)
        connection.sendall(request)
        while reply.count(b"\r\n") < lines:
            chunk = connection.recv(1024)
            if not chunk:
                return b""
            reply += chunk
    return reply


def _end_of_log(directory: Path) -> str:
    try:
        return (directory / "server.log").read_bytes()[-2000:].decode(errors="replace").strip() or "(empty)"
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
