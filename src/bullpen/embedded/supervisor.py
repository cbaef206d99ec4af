"""The process that runs the bundled server as its child, and ends it when the last user is gone.

Run as a program, isolated and without site-packages, which halves its start; so it imports nothing of ours. Arguments:
the data directory, the path of the server's socket, the server's command. It forks at once, so that the starter
collects the first process and never has a child it did not ask for. The server gets SIGTERM when its supervisor dies
(on Linux; elsewhere the next user ends it). PR_SET_PDEATHSIG follows the thread that forked: here the main thread,
which waits until the server is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1
_LAST_RESORT_S = 60


def main(directory: str, socket_path: str, *command: str) -> None:
    if os.fork():
        os._exit(0)
    supervising, serving, users = (_open_lock(directory, name) for name in ("supervisor", "server", "users"))
    fcntl.flock(supervising, fcntl.LOCK_EX)
    fcntl.flock(serving, fcntl.LOCK_EX)
    server = _start(directory, command, serving)
    os.close(serving)  # the server has its own copy, which lives exactly as long as it does

    def end_server(*_: object) -> None:
        server.terminate()
        server.send_signal(signal.SIGCONT)  # a frozen process takes the other signal only when it goes on
        last_resort = threading.Timer(_LAST_RESORT_S, server.kill)
        last_resort.daemon = True
        last_resort.start()

    def wait_for_last_user() -> None:
        fcntl.flock(users, fcntl.LOCK_EX)
        end_server()

    signal.signal(signal.SIGTERM, end_server)
    signal.signal(signal.SIGINT, end_server)
    threading.Thread(target=wait_for_last_user, daemon=True).start()
    code = server.wait()
    with contextlib.suppress(OSError):  # whoever started us no longer listens
        os.write(1, f"ended {code}\n".encode())
    for tidy, path in ((os.unlink, socket_path), (os.rmdir, os.path.dirname(socket_path))):
        with contextlib.suppress(OSError):  # gone already; or the data directory, which is never empty
            tidy(path)
    os._exit(0)


def _open_lock(directory: str, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(os.path.join(directory, f"{name}.lock"), flags, 0o600)


def _start(directory: str, command: tuple[str, ...], serving: int) -> subprocess.Popen[bytes]:
    libc, supervisor = _libc(), os.getpid()

    def die_with_supervisor() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:
                os._exit(1)  # it died before the request was made

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        cwd=directory,
        pass_fds=(serving,),
        preexec_fn=die_with_supervisor,  # noqa: PLW1509 - there are no threads yet
    )


def _libc() -> Any:
    """The C library, on Linux; loaded before the fork."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        return ctypes.CDLL(None)
    except (ImportError, OSError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
