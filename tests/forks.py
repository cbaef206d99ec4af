"""Processes that begin with everything imported: a Python program without the half second that its imports take.

One process imports all and forks for each request; what it forks has streams, directory and environment of its own, and
its exit code, or the signal that ended it, is told. In: what to call, words, streams. Out: a `Fork`; a `WarmChild`,
which is a `Child` that was forked; or what `run` tells of a program that has ended. Nothing is measured in a fork.
Elsewhere: forks on terminals (`tests.flows._warm`), pages and their commands (`tests.docs._forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, Self

from bullpen.testing import Child

_REPOSITORY = Path(__file__).parents[1]
_LONGEST_REQUEST = 200_000
_MEASURED = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
# What programs import only when they need it; here once for all.
PRELOADED = ("bullpen.app", "bullpen.cli.commands", "bullpen.ledger", "bullpen.runs", "bullpen.messages",
             "bullpen.outbox", "bullpen.workflow", "bullpen.wiring.ledger", "bullpen.wiring.messages",
             "bullpen.wiring.outbox", "bullpen.wiring.runs", "bullpen.ledger.migrate", "alembic.command", "aiosqlite",
             "rich.live", "rich.progress", "rich.table", "uvloop")  # fmt: skip


Ran = subprocess.CompletedProcess[str]
Tell = Callable[[int], object]
"""Tells a number to whoever asked for the fork."""


class Fork:
    """A forked process, seen from the one that asked for it: its id at once, its exit code when it has ended."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())

    def lines(self) -> list[int]:
        """Every number that was told, to the end; the last one is the exit code."""
        return [int(line) for line in self._status]

    def code(self, timeout: float | None = None) -> int | None:
        """The exit code once it has ended, negative when a signal ended it; None when time is up."""
        if not select.select([self._status], [], [], timeout)[0]:
            return None
        return int(self._status.readline() or -signal.SIGKILL)  # nothing: it went with the process that forks

    def signal(self, number: int, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def close(self) -> None:
        self._status.close()


class ForkServer:
    """The way to a process that forks on demand."""

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests, self._process = requests, process
        self._lock = threading.Lock()

    @classmethod
    def launch(cls, *modules: str, env: Mapping[str, str] | None = None, stream: int = subprocess.DEVNULL) -> Self:
        """Start a process that imports `modules` besides the usual ones. Some look at import whether `stream` is a
        terminal."""
        ours, theirs = socket.socketpair()
        clean = {name: value for name, value in (os.environ if env is None else env).items() if name not in _MEASURED}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *modules],
            cwd=_REPOSITORY,
            env={**clean, "PYTHONUNBUFFERED": "1"},
            stdin=stream,
            stdout=stream,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return cls(ours, process)

    @classmethod
    def here(cls) -> Self:
        """Fork this process, which has no threads yet, into one that forks."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            try:
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours)

    def start(
        self, call: str, *words: str, streams: Sequence[int], env: Mapping[str, str], cwd: Path, session: bool = True
    ) -> Fork:
        """Call `module:function` with words and a `Tell`, in a process whose stdin, stdout and stderr are `streams`.

        These are closed here. With `session` it has a session and group of its own, and a terminal as stdin is its own.
        """
        status, told = os.pipe()
        request = {"call": call, "words": words, "env": dict(env), "cwd": str(cwd), "session": session}
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, told])
            answer = self._requests.recv(1)
        for descriptor in {*streams, told}:
            os.close(descriptor)
        assert answer == b"+", "the process that forks has died"
        return Fork(status)

    def close(self) -> None:
        self._requests.close()  # it ends when nobody can ask any more
        if self._process is not None:
            self._process.wait(60)


class WarmChild(Child):
    """A `Child` that was forked instead of started, where the command is a Python program.

    Where processes are measured for the coverage it is started like any other.
    """

    merged: ClassVar = False
    """Whether stderr goes where stdout goes."""

    def _start(self, env: Mapping[str, str], cwd: Path | None) -> Any:
        python, *words = self._command
        is_measured = any(env.get(name) for name in _MEASURED)
        if python == sys.executable and words[0] in ("-m", "-c") and not is_measured:
            return _ForkedProcess(words, env, cwd or Path.cwd(), merged=self.merged)
        if self.merged:
            self._command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *self._command]
        return super()._start(env, cwd)


class MergedChild(WarmChild):
    """A `WarmChild` whose stdout and stderr are read as one."""

    merged = True


def run(words: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float = 50) -> Ran:
    """Run a Python program (`-m module …`, `-c code …` or `file …`) to its end, as `subprocess.run` does."""
    if any(env.get(name) for name in _MEASURED):
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=env, cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        streams = (os.open(os.devnull, os.O_RDONLY), os.dup(out.fileno()), os.dup(errors.fileno()))
        fork = _programs().start("tests.forks:program", *words, streams=streams, env=env, cwd=cwd)
        with contextlib.closing(fork):
            code = fork.code(timeout)
            if code is None:
                fork.signal(signal.SIGKILL, group=True)
                raise subprocess.TimeoutExpired(list(words), timeout)
        for stream in (out, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read().decode(), errors.read().decode())


class _ForkedProcess:
    """What `Child` uses of a `Popen`."""

    def __init__(self, words: list[str], env: Mapping[str, str], cwd: Path, *, merged: bool) -> None:
        (given, stdin), (out, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        if merged:
            os.dup2(stdout, stderr)
        self.args = words
        self._fork = _programs().start("tests.forks:program", *words, streams=(given, stdout, stderr), env=env, cwd=cwd)
        self.pid = self._fork.pid
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(out, "rb")
        self.stderr: IO[bytes] = os.fdopen(errors, "rb")
        self.returncode: int | None = None
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        with self._asking:
            if self.returncode is None:
                self._ask(0)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            with self._asking:
                if self.returncode is None:
                    self._ask(0.2)
            if self.returncode is None and give_up is not None and time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._fork.signal(number)

    def _ask(self, timeout: float) -> None:
        self.returncode = self._fork.code(timeout)
        if self.returncode is not None:
            self._fork.close()


@cache
def _programs() -> ForkServer:
    """For this process; it ends with it."""
    server = ForkServer.launch()
    atexit.register(server.close)
    return server


# In the process that forks ------------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    assert threading.active_count() == 1, "threads do not survive a fork"
    ended, tell = os.pipe()
    for descriptor in (ended, tell):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told: dict[int, int] = {}
    while True:
        watched: list[Any] = [requests, ended]
        ready = select.select(watched, [], [])[0]
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 1_000)
            _tell_codes(told)
        if requests not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 4)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            for descriptor in (ended, tell, *told.values()):
                os.close(descriptor)
            _run(*descriptors, **json.loads(request))
        told[pid] = descriptors[3]
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        requests.send(b"+")


def _tell_codes(told: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            descriptor = told.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(descriptor, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(descriptor)


def _run(
    given: int, out: int, errors: int, told: int, *,
    call: str, words: list[str], env: dict[str, str], cwd: str, session: bool,
) -> NoReturn:  # fmt: skip
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if session:
            os.setsid()
            if os.isatty(given):
                fcntl.ioctl(given, termios.TIOCSCTTY, 0)  # or Ctrl-C would signal nobody
        os.write(told, f"{os.getpid()}\n".encode())
        os.set_inheritable(told, False)
        for number, descriptor in enumerate((given, out, errors)):
            os.dup2(descriptor, number)
        for descriptor in {given, out, errors}:
            os.close(descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[0] = cwd
        module, _, name = call.partition(":")
        function = getattr(importlib.import_module(module), name)
        code = exit_code(function, words, lambda number: os.write(told, f"{number}\n".encode()))
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of Python: other threads are waited for
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def exit_code(function: Callable[..., int | None], *arguments: Any) -> int:
    """Call a function as an entry point does."""
    try:
        code = function(*arguments) or 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # as Python ends by it
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()  # as Python would
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def program(words: list[str], _: Tell) -> None:
    """`python -m module …`, `python -c code …` or `python file …`."""
    if words[0] not in ("-m", "-c"):
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    how, what, *arguments = words
    if how == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *arguments]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(what, "<string>", "exec"), main.__dict__)


def command(words: list[str], _: Tell) -> int:
    """`bullpen …`."""
    from bullpen.cli import commands

    return commands.run(words)


def main() -> None:
    from bullpen.cli import commands

    for module in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(module)
    commands.tree()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
