"""Run the code of one page of documentation, block after block, as a reader would.

`python -m tests.docs.run_page PAGE`, in the checkout.

- ```python: run in order in one module, `await` allowed. A block with `asyncio.run(` is a whole program and runs by
  itself; one that begins with `# name.py` or `# folder/name.py` becomes that file, one with `# at the end of name.py`
  is added to it.
- ```sh: each line is a command. `bullpen run`, `bullpen exporter` and `manage.py bullpen_worker` go on until the page
  ends.
- ```py: a program with another library, which is not installed here; it is only compiled.
- ```js: run by Node (PAGE_NODE, with packages in NODE_PATH) in the background, until it prints its first line; one that
  begins with `// name.cjs` becomes that file.
- `<!-- after: page.md -->`: the files of that page are there, and of those that it comes after.
- ```text: what the block before it printed; `…` stands for anything.

The working directory is new and empty, so the embedded server of the page is too. Where a page names the server
`localhost:6379`, a real one runs and its port is put in. Ports that a page serves on are
replaced by free ones: somebody else may use them here.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullpen.testing import RedisServer, free_port
from tests.docs._forks import Forks, PipedFork
from tests.forks import Tell

# Proved elsewhere (the Makefile, the wheel's tests, the settings' tests), or for another machine than this one.
NOT_RUN_HERE = (
    *("pip install", "python3 -m venv", ". .venv", "make ", "npm ", "export "),
    *("bullpen demo", "redis-cli ", "python -m asyncio", "mkdir ", "cd "),
)


_SERVES = {"run": b"taking jobs", "exporter": b"serving http"}
"""Commands that go on in the background, and what they say when they do."""


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    line: int
    source: str


def blocks_of(page: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(found[1], page[: found.start()].count("\n") + 1, found[2])


class Page:
    """A page that is being run."""

    def __init__(self, path: Path, port: int | None, commands: Forks) -> None:
        self._path, self._port, self._commands = path, port, commands
        self._served: defaultdict[str, int] = defaultdict(free_port)  # on the page -> here
        self._module: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""
        self._background: list[asyncio.subprocess.Process] = []
        self._running: list[PipedFork] = []
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("REDIS_")}

    async def run(self) -> None:
        try:
            for block in blocks_of(self._path.read_text()):
                try:
                    await self._run(block)
                except BaseException:
                    print(f"{self._path.name}, block at line {block.line}, failed:", file=sys.stderr)
                    raise
        finally:
            for process in self._background:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await process.wait()
            for fork in self._running:
                fork.signal(signal.SIGTERM)
                await asyncio.to_thread(fork.read, 90)

    async def _run(self, block: Block) -> None:
        source = block.source if self._port is None else block.source.replace("6379", str(self._port))
        source = re.sub(
            r"(127\.0\.0\.1:|--port )([89]\d{3})", lambda found: f"{found[1]}{self._served[found[2]]}", source
        )
        match block.language:
            case "python":
                await self._run_python(source, block.line)
            case "sh":
                self._printed = ""
                for command in source.replace("\\\n", " ").splitlines():
                    await self._run_command(command)
            case "js":
                if not write_file(source, Path.cwd()):
                    _write("worker.cjs", source)
                    await self._run_node("worker.cjs")
            case "text":
                self._compare(block.source)
            case "py":
                compile(block.source, str(self._path), "exec")  # `tests/compat/test_moving.py` runs its like
            case "toml" | "":
                pass
            case "json" | "mjs":
                pass  # the envelope of sealed payloads: `tests/interop/test_payloads.py` runs it
            case "sql":
                pass  # needs databases of both kinds: `tests/outbox/test_guide.py` runs it
            case other:
                raise AssertionError(f"nobody runs blocks in {other!r}")

    async def _run_python(self, source: str, line: int) -> None:
        if write_file(source, Path.cwd()):
            return
        if "asyncio.run(" in source:
            _write("program.py", source)
            self._printed = await self._finish(sys.executable, "program.py")
        else:
            printed = io.StringIO()
            code = compile(
                "\n" * line + source, str(self._path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
            with contextlib.redirect_stdout(printed):
                result = eval(code, self._module)
                if inspect.isawaitable(result):
                    await result
            self._printed = printed.getvalue()

    async def _run_command(self, command: str) -> None:
        command = command.partition("  #")[0].strip()
        if not command or command.startswith(("#", *NOT_RUN_HERE)):
            return
        program, *arguments = shlex.split(command)
        if arguments[:2] == ["manage.py", "bullpen_worker"]:
            await self._start(sys.executable, *arguments, until=b"taking jobs")
            return
        if program == "uvicorn":
            await self._start(sys.executable, "-m", program, *arguments, until=b"startup complete")
            return
        if program == "node":
            await self._run_node(arguments[0])
            return
        if program == "django-admin":
            program, arguments = "python", ["-m", "django", *arguments]
        if program == "python":
            self._printed += await self._finish(sys.executable, *arguments)
            return
        assert program == "bullpen", f"nobody runs {command!r}"
        started = self._commands.command(*arguments, env=self._environment, cwd=Path.cwd())
        if arguments[0] in _SERVES:
            self._running.append(started)
            told = await asyncio.to_thread(started.read, 90, _SERVES[arguments[0]])
            assert told, f"{command} does not work: {(started.output + started.errors).decode()}"
            return
        ended = await asyncio.to_thread(started.read, 90)
        out, errors = started.output.decode(), started.errors.decode()
        assert ended, f"{command} did not end:\n{out}{errors}"
        code = started.code()
        assert code == 0, f"{command} ended with {code}:\n{out}{errors}"
        self._printed += out

    async def _run_node(self, name: str) -> None:
        node = os.environ.get("PAGE_NODE", "node")
        if "worker" in name:  # goes on, and says when it is ready
            await self._start(node, name, until=b"\n")
        else:
            self._printed += await self._finish(node, name)

    async def _start(self, *words: str, until: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *words, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._background.append(process)
        assert process.stdout is not None
        seen = b""
        async with asyncio.timeout(90):
            while until not in seen:
                line = await process.stdout.readline()
                assert line, f"{words} ended before it said {until!r}: {seen.decode()}"
                seen += line

    async def _finish(self, *words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *words, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, errors = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode == 0, f"{words} ended with {process.returncode}:\n{out.decode()}{errors.decode()}"
        return out.decode()

    def _compare(self, expected: str) -> None:
        printed = "\n".join(line.rstrip() for line in self._printed.rstrip("\n").splitlines())
        pattern = ".*".join(re.escape(part) for part in expected.rstrip("\n").split("…"))
        assert re.fullmatch(pattern, printed), f"expected\n{expected}\nprinted\n{printed}"


def _write(name: str, source: str) -> None:
    Path(name).write_text(source)


def write_file(source: str, place: Path) -> bool:
    """Write a block that is a file, or belongs at the end of one; whether it is."""
    found = re.match(r"(?:#|//) (at the end of )?((?:\w+/)*\w+\.c?(?:py|js))\n", source)
    if found is None:
        return False
    path = place / found[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if found[1] else "w") as file:
        file.write(source)
    return True


def write_files_before(page: Path, place: Path) -> None:
    """The files that a page goes on with: those of the page that it comes after."""
    found = re.search(r"^<!-- after: (\S+) -->$", page.read_text(), re.MULTILINE)
    if found is not None:
        before = page.parent / found[1]
        write_files_before(before, place)
        for block in blocks_of(before.read_text()):
            if block.language == "python":
                write_file(block.source, place)


def run(words: list[str], _: Tell) -> int:
    """Run a page; its commands are forked from this process as it is now."""
    path = Path(words[0]).resolve()
    needs_server = "6379" in "".join(block.source for block in blocks_of(path.read_text()) if block.language != "sh")
    with contextlib.ExitStack() as stack:
        commands = Forks.here()
        stack.callback(commands.close)
        port = None
        if needs_server:
            port = int(stack.enter_context(RedisServer.start("valkey")).url.rpartition(":")[2])
        os.chdir(stack.enter_context(tempfile.TemporaryDirectory(prefix="bullpen-page-", ignore_cleanup_errors=True)))
        sys.path.insert(0, "")
        write_files_before(path, Path.cwd())
        asyncio.run(Page(path, port, commands).run())
    return 0


if __name__ == "__main__":
    run(sys.argv[1:], print)
