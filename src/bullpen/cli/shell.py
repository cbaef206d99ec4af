"""`bullpen shell`: Python with a program's app at hand and `await` at the prompt."""

from __future__ import annotations

import ast
import asyncio
import code
import inspect
import sys
from types import CodeType, FunctionType
from typing import Any

from bullpen.cli.arguments import AppArgument
from bullpen.cli.context import OnServer
from bullpen.cli.programs import find_object, load_app

__all__ = ["shell"]


def shell(at: OnServer, target: AppArgument) -> None:
    """Open a Python prompt with the app, its tasks, and 'await'.

    All names of the module are there; 'app' is the app, 'queue("name")' one of its queues.
    """
    from bullpen.wiring.servers import CommandLine, obeying

    with obeying(CommandLine(redis=at.redis, prefix=at.prefix)):
        app = load_app(target)
    module = find_object(target)[2]
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    tasks = ", ".join(name for each in app.tasks.values() for name in each)
    with asyncio.Runner() as runner:
        console = _Console({**names, "app": app, "queue": app.queue, "__name__": "__console__"}, runner)
        banner = f"app: {target}; tasks: {tasks or 'none'}; try: await queue('default').counts()"
        try:
            console.interact(banner if sys.stdin.isatty() else "", exitmsg="")
        finally:
            runner.run(app.aclose())


class _Console(code.InteractiveConsole):
    """A prompt whose statements may await; the loop runs while one does."""

    def __init__(self, names: dict[str, Any], runner: asyncio.Runner) -> None:
        super().__init__(names)
        self._names, self._runner = names, runner
        self.compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._begins = sys.stdin.isatty()

    def runcode(self, code: CodeType) -> None:
        try:
            found = FunctionType(code, self._names)()
            if inspect.iscoroutine(found):
                self._runner.run(found)
        except SystemExit:
            raise
        except BaseException:  # noqa: BLE001 - whatever is typed at the prompt
            self.showtraceback()

    def raw_input(self, prompt: str = "") -> str:
        return super().raw_input(prompt if self._begins else "")
