"""What runs around jobs and around a process: middleware, and hooks at the start and the end.

In: context managers and functions that a program registers. Out: each job of a queue runs inside of the middleware of
that queue, the first registered outermost; hooks run once in each process that runs jobs.
Elsewhere: running handlers (`handlers`, `children`), registering (`bullpen.app`), middleware that we bring
(`bullpen.middleware`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
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

from bullpen._kernel.container import Container
from bullpen._kernel.duration import check_texts
from bullpen._kernel.execute import run_async
from bullpen._kernel.injection import Injector, JobScope, Needs, current_scope, name_of, needs_of
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Raised, Result
from bullpen._kernel.signatures import takes
from bullpen.errors import InvalidOption
from bullpen.queue.batch import JobBatch
from bullpen.queue.job import Job

__all__ = ["Around", "Context", "Enter", "Layer", "Surroundings"]

Context = AbstractAsyncContextManager[Any] | AbstractContextManager[Any]
Enter = Callable[..., Context]
"""Makes the context that one job runs in."""
Call = Callable[[Callable[[Any], Any]], Awaitable[Result]]
"""Runs a plain function for the job at hand, where plain functions run."""

logger = get_logger("bullpen.app")
_GRACE_S: Final = 0.5
_HOOK: Final = "a function without parameters, or with one for the app"


@dataclass(frozen=True, slots=True)
class Layer:
    """One middleware."""

    name: str
    enter: Enter
    needs: Needs
    is_plain: bool
    """A plain function that yields: around a plain handler it runs where the handler does."""
    queues: frozenset[str]
    """Empty: all queues."""
    batches: bool
    """It may get a `JobBatch` instead of a job."""

    def __post_init__(self) -> None:
        check_texts("queues", self.queues)


class Surroundings:
    """One handler with all that runs around it, the outermost layer first."""

    def __init__(self, handler: Callable[..., Any], layers: Sequence[Layer], injector: Injector) -> None:
        self._handler, self._layers, self._injector = handler, tuple(layers), injector
        self._needs = needs_of(handler)
        # A set of tasks asks for what its tasks need, each for itself.
        of_tasks: Sequence[tuple[str, Needs]] = getattr(handler, "needs_of_tasks", ())
        self._is_empty = not (self._layers or self._needs or any(needs for _, needs in of_tasks))
        own = [(name_of(handler), self._needs), *((layer.name, layer.needs) for layer in self._layers)]
        for name, needs in (*own, *of_tasks):
            injector.check(needs, name)

    def __bool__(self) -> bool:
        return not self._is_empty

    def on_loop(self) -> Callable[[Any], Awaitable[Any]]:
        """For an `async def` handler; the handler itself if nothing is around it."""
        handler = self._handler
        if self._is_empty:
            return handler
        picks_plain: Callable[[Any], bool] | None = getattr(handler, "is_plain", None)

        async def handle(job: Any) -> Any:
            async with self._entered(job, is_plain=picks_plain is not None and picks_plain(job)) as scope:
                return await handler(job, **await scope.values(self._needs))
            return None  # a layer suppressed the error

        return handle

    async def run_plain(self, job: Any, call: Call, timeout_s: float | None = None) -> Result:
        """For a plain handler, which `call` runs: what is asynchronous is entered here, the rest where it runs, since a
        connection to a database may belong to one thread."""

        async def handle(job: Any) -> Any:
            async with self._entered(job, is_plain=True) as scope:
                await scope.prepare(self._needs)
                result = await call(partial(scope.call_plain, self._handler, self._needs))
                if isinstance(result, Raised):
                    raise result.error
                return result.value
            return None  # a layer suppressed the error

        return await run_async(handle, job, timeout_s)

    @asynccontextmanager
    async def _entered(self, job: Any, *, is_plain: bool) -> AsyncIterator[JobScope]:
        async with AsyncExitStack() as stack:
            scope = JobScope(self._injector, job, stack)
            before = current_scope.set(scope)
            stack.callback(current_scope.reset, before)
            for layer in self._layers:
                if is_plain and layer.is_plain:
                    await scope.prepare(layer.needs)
                    scope.within.append(partial(_enter_plain, scope, layer, job))
                    continue
                context = layer.enter(job, **await scope.values(layer.needs))
                if _is_async(context):
                    await stack.enter_async_context(context)
                else:
                    stack.enter_context(cast("AbstractContextManager[Any]", context))
            yield scope


class Around:
    """What one app runs around its jobs and its processes."""

    def __init__(self, owner: object, container: Container) -> None:
        """`owner` is what hooks get; child processes find it by the name that a module gives it."""
        self.owner = owner
        self.injector = Injector(container, owner, (Job, JobBatch))
        self._layers: list[Layer] = []
        self._hooks: list[Callable[[AsyncExitStack], Awaitable[None]]] = []
        self._entered = 0
        self._end_within_s: float | None = None
        self._end_at: float | None = None
        self._ending: asyncio.Timeout | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether a process has something to run at its start or its end."""
        return bool(self._hooks)

    # ---- middleware ---------------------------------------------------------------------------------------------

    def add(self, made: object, queues: Collection[str], *, batches: bool) -> None:
        """One layer more, inside of those before. `made` takes a job and yields, or returns a context manager."""
        queues = frozenset(check_texts("queues", queues))
        name = getattr(made, "__qualname__", None) or type(made).__qualname__
        expected = "a function of the job that yields once, or that returns a context manager"
        if not callable(made) or inspect.iscoroutinefunction(made):
            raise InvalidOption("middleware", expected, made)
        needs = needs_of(made)
        if not takes(made, 1, besides=needs):
            raise InvalidOption("middleware", expected, made)
        is_plain = inspect.isgeneratorfunction(made)
        self._layers.append(Layer(name, _as_context(made), needs, is_plain, queues, batches))

    @contextmanager
    def outermost(self, enter: Enter) -> Iterator[None]:
        """Within this context, workers that start run this around everything else, on all queues."""
        layer = Layer("outermost", _as_context(enter), {}, False, frozenset(), batches=True)
        self._layers.insert(0, layer)
        try:
            yield
        finally:
            self._layers.remove(layer)

    def surroundings(self, handler: Callable[..., Any], queue: str, *, batches: bool = False) -> Surroundings:
        """What runs around the handler of a queue. Raises for middleware that takes jobs where the handler takes
        batches, and for what is asked for and nothing provides."""
        chosen = [layer for layer in self._layers if not layer.queues or queue in layer.queues]
        for layer in chosen if batches else ():
            if not layer.batches:
                raise InvalidOption(
                    "middleware",
                    f"for queue {queue!r}, whose handler gets a JobBatch: `batches=True` if {layer.name} can take one, "
                    "or `queues=` with the queues that it is for",
                    layer.name,
                )
        return Surroundings(handler, chosen, self.injector)

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
            self._leave_with(stack, lambda *_: call())

        self._hooks.append(enter)

    def lifespan(self, hook: Callable[..., Any]) -> None:
        """Both in one: what stands before its `yield` runs at the start, what stands after it at the end."""
        if inspect.iscoroutinefunction(hook):
            raise InvalidOption("lifespan", "a function that yields once", hook)
        make = self._with_app(_as_context(hook), hook)

        async def enter(stack: AsyncExitStack) -> None:
            context = make()
            if _is_async(context):
                await context.__aenter__()
                self._leave_with(stack, context.__aexit__)
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
            self._end_within_s = self._end_at = None
            async with AsyncExitStack() as stack:
                for enter in self._hooks:
                    await enter(stack)
                providers = self.injector.opened()
                await providers.__aenter__()
                self._leave_with(stack, providers.__aexit__)
                yield
        finally:
            self._entered -= 1

    def limit_end(self, seconds: float) -> None:
        """So long may the hooks of the end and the ends of providers take together, from the first of them on; also
        while they run. Unless it is called they take as long as they need."""
        self._end_within_s = seconds
        if self._ending is not None:
            self._end_at = asyncio.get_running_loop().time() + seconds
            self._ending.reschedule(self._end_at)

    def _leave_with(self, stack: AsyncExitStack, leave: Callable[..., Awaitable[Any]]) -> None:
        async def end(*error: Any) -> Any:
            now, end_at = asyncio.get_running_loop().time(), None
            if self._end_within_s is not None:
                self._end_at = now + self._end_within_s if self._end_at is None else self._end_at
                end_at = max(self._end_at, now + _GRACE_S)  # one that hangs leaves the others time to close things
            try:
                async with asyncio.timeout_at(end_at) as self._ending:
                    return await leave(*error)
            except TimeoutError:
                if self._ending is None or not self._ending.expired():
                    raise
                logger.warning("a hook of the end was cancelled: it did not end in time (%s s)", self._end_within_s)
                return None
            finally:
                self._ending = None

        stack.push_async_exit(end)

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
        if takes(hook, 0):
            return make
        if takes(hook, 1):
            return partial(make, self.owner)
        raise InvalidOption("hook", _HOOK, hook)


def _enter_plain(scope: JobScope, layer: Layer, job: Any, stack: ExitStack) -> AbstractContextManager[Any]:
    return cast("AbstractContextManager[Any]", layer.enter(job, **scope.plain_values(layer.needs, stack)))


def _is_async(context: Context) -> TypeGuard[AbstractAsyncContextManager[Any]]:
    return hasattr(type(context), "__aenter__")


def _as_context(made: Callable[..., Any]) -> Callable[..., Any]:
    """Functions that yield become what `async with` and `with` take."""
    if inspect.isasyncgenfunction(made):
        return asynccontextmanager(made)
    if inspect.isgeneratorfunction(made):
        return contextmanager(made)
    return made
