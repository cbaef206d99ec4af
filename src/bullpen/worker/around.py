"""What runs around jobs and around a process: middleware, and hooks at the start and the end.

In: context managers and functions that a program registers. Out: each job of a queue runs inside of the middleware of
that queue, the first registered outermost; hooks run once in each process that runs jobs.
Elsewhere: running handlers (`handlers`, `children`), registering (`bullpen.app`), middleware that we bring
(`bullpen.middleware`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeGuard, cast

from bullpen._kernel.execute import run_async
from bullpen._kernel.outcome import Raised, Result
from bullpen.errors import InvalidOption

__all__ = ["Around", "Context", "Enter", "Layer", "Layers"]

Context = AbstractAsyncContextManager[Any] | AbstractContextManager[Any]
Enter = Callable[[Any], Context]
"""Makes the context that one job runs in."""
Call = Callable[[Callable[[Any], Any]], Awaitable[Result]]
"""Runs a plain function for the job at hand, where plain functions run."""

_HOOK: Final = "a function without parameters, or with one for the app"


@dataclass(frozen=True, slots=True)
class Layer:
    """One middleware."""

    name: str
    enter: Enter
    queues: frozenset[str]
    """Empty: all queues."""
    batches: bool
    """It may get a `JobBatch` instead of a job."""


class Layers:
    """The middleware of one queue, the outermost first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def surround(self, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """An `async def` handler inside of all layers; the handler itself if there are none."""
        if not self._layers:
            return handler

        async def handle(job: Any) -> Any:
            async with AsyncExitStack() as stack:
                for layer in self._layers:
                    context = layer.enter(job)
                    if _is_async(context):
                        await stack.enter_async_context(context)
                    else:
                        stack.enter_context(cast("AbstractContextManager[Any]", context))
                return await handler(job)
            return None  # a layer suppressed the error

        return handle

    async def run_plain(
        self, handler: Callable[[Any], Any], job: Any, call: Call, timeout_s: float | None = None
    ) -> Result:
        """A plain handler inside of all layers: asynchronous ones are entered here, plain ones where `call` runs the
        handler, since what they open (a connection to a database) may belong to one thread."""

        async def handle(job: Any) -> Any:
            async with AsyncExitStack() as stack:
                plain: list[AbstractContextManager[Any]] = []
                for layer in self._layers:
                    context = layer.enter(job)
                    if _is_async(context):
                        await stack.enter_async_context(context)
                    else:
                        plain.append(cast("AbstractContextManager[Any]", context))
                result = await call(partial(_call_within, plain, handler))
                if isinstance(result, Raised):
                    raise result.error
                return result.value
            return None  # a layer suppressed the error

        return await run_async(handle, job, timeout_s)


class Around:
    """What one app runs around its jobs and its processes."""

    def __init__(self, owner: object) -> None:
        """`owner` is what hooks get; child processes find it by the name that a module gives it."""
        self.owner = owner
        self._layers: list[Layer] = []
        self._hooks: list[Callable[[AsyncExitStack], Awaitable[None]]] = []
        self._entered = 0

    @property
    def needs_children(self) -> bool:
        """Whether child processes have something to run besides the handler."""
        return bool(self._layers or self._hooks)

    # ---- middleware ---------------------------------------------------------------------------------------------

    def add(self, made: object, queues: Collection[str], *, batches: bool) -> None:
        """One layer more, inside of those before. `made` takes a job and yields, or returns a context manager."""
        if isinstance(queues, str):
            raise InvalidOption("queues", "a list of names of queues", queues)
        name = getattr(made, "__qualname__", None) or type(made).__qualname__
        if not callable(made) or inspect.iscoroutinefunction(made) or not _takes(made, 1):
            expected = "a function of the job that yields once, or that returns a context manager"
            raise InvalidOption("middleware", expected, made)
        self._layers.append(Layer(name, _as_context(made), frozenset(queues), batches))

    def layers(self, queue: str, *, batches: bool = False) -> Layers:
        """The layers of a queue. Raises for one that takes jobs where the handler takes batches."""
        chosen = [layer for layer in self._layers if not layer.queues or queue in layer.queues]
        for layer in chosen if batches else ():
            if not layer.batches:
                raise InvalidOption(
                    "middleware",
                    f"for queue {queue!r}, whose handler gets a JobBatch: `batches=True` if {layer.name} can take one, "
                    "or `queues=` with the queues that it is for",
                    layer.name,
                )
        return Layers(chosen)

    # ---- hooks --------------------------------------------------------------------------------------------------

    def on_startup(self, hook: Callable[..., Any]) -> None:
        """Call it when a process starts."""
        call = self._caller(hook)

        async def enter(stack: AsyncExitStack) -> None:
            await call()

        self._hooks.append(enter)

    def on_shutdown(self, hook: Callable[..., Any]) -> None:
        """Call it when a process ends, if all that was registered before it could be started."""
        call = self._caller(hook)

        async def enter(stack: AsyncExitStack) -> None:
            stack.push_async_callback(call)

        self._hooks.append(enter)

    def lifespan(self, hook: Callable[..., Any]) -> None:
        """Both in one: what stands before its `yield` runs at the start, what stands after it at the end."""
        if inspect.iscoroutinefunction(hook):
            raise InvalidOption("lifespan", "a function that yields once", hook)
        make = self._with_app(_as_context(hook), hook)

        async def enter(stack: AsyncExitStack) -> None:
            context = make()
            if _is_async(context):
                await stack.enter_async_context(context)
            else:
                stack.enter_context(context)

        self._hooks.append(enter)

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Run the hooks of the start, and those of the end afterwards, in the opposite order. Within another such
        context nothing happens: a process starts once."""
        self._entered += 1
        try:
            if self._entered > 1:
                yield
                return
            async with AsyncExitStack() as stack:
                for enter in self._hooks:
                    await enter(stack)
                yield
        finally:
            self._entered -= 1

    def _caller(self, hook: Callable[..., Any]) -> Callable[[], Awaitable[None]]:
        if not callable(hook) or inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
            raise InvalidOption("hook", f"{_HOOK}; one that yields is a lifespan", hook)
        make = self._with_app(hook, hook)

        async def call() -> None:
            made = make()
            if inspect.isawaitable(made):
                await made

        return call

    def _with_app(self, make: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[], Any]:
        if _takes(hook, 0):
            return make
        if _takes(hook, 1):
            return partial(make, self.owner)
        raise InvalidOption("hook", _HOOK, hook)


def _call_within(contexts: list[AbstractContextManager[Any]], handler: Callable[[Any], Any], job: Any) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return handler(job)
    return None  # one of them suppressed the error


def _is_async(context: Context) -> TypeGuard[AbstractAsyncContextManager[Any]]:
    return hasattr(type(context), "__aenter__")


def _as_context(made: Callable[..., Any]) -> Callable[..., Any]:
    """Functions that yield become what `async with` and `with` take."""
    if inspect.isasyncgenfunction(made):
        return asynccontextmanager(made)
    if inspect.isgeneratorfunction(made):
        return contextmanager(made)
    return made


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # made in C, without a signature: the call itself will tell
        return True
    return True
