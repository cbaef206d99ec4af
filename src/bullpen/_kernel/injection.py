"""Objects that functions ask for in their parameters: found, made and closed for them.

In: providers (objects, and functions that make or yield them) for one job or for the whole process, and functions whose
parameters say `= Depends()`. Out: the values of those parameters; what a provider opened is closed when its job or its
process ends, in the opposite order. Everything is checked before the first job.
Elsewhere: objects without an end, found by type or name (`container`), what runs around jobs (`bullpen.worker.around`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator as AbstractAsyncGenerator
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeGuard, get_args, get_origin, get_type_hints

from bullpen._kernel.container import Container
from bullpen._kernel.execute import check_time, is_async
from bullpen.errors import InvalidOption, NotConfigured

__all__ = [
    "Depends",
    "Injector",
    "JobScope",
    "Key",
    "Lifetime",
    "Needs",
    "current_scope",
    "kind_made_by",
    "marked",
    "needs_of",
]

Key = Any
"""What is asked for: a type, or the function that provides it."""
Needs = Mapping[str, Key]
"""By the names of parameters."""
Lifetime = Literal["job", "process"]

_YIELDING: Final = (AsyncIterator, AbstractAsyncGenerator, Iterator, Generator)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What `Depends` makes: the mark of a parameter that is found and not given."""

    function: Callable[..., Any] | None


def Depends(function: Callable[..., Any] | None = None) -> Any:  # noqa: N802 - the name that people know
    """Mark a parameter that the worker fills in: `session: Session = Depends()`.

    Without an argument it is found by its type, as `app.provide` said; with a function, that function makes it, once
    per job. `Annotated[Session, Depends()]` means the same.
    """
    if function is not None and not callable(function):
        raise InvalidOption("Depends", "a function that makes what is wanted, or nothing", function)
    return _Wanted(function)


def needs_of(function: Callable[..., Any], *, all_required: bool = False) -> dict[str, Key]:
    """The marked parameters of a function; with `all_required` also those without a default, by their types."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # made in C
        return {}
    hints = _hints_of(function) or {}  # told below, for the parameters that need one
    needs: dict[str, Key] = {}
    for name, parameter in parameters.items():
        hint = hints.get(name, inspect.Parameter.empty)
        wanted = parameter.default if isinstance(parameter.default, _Wanted) else _mark_in(hint)
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if wanted is None and not (all_required and is_required):
            continue
        if wanted is not None and wanted.function is not None:
            needs[name] = wanted.function
            continue
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if not _is_kind(kind):
            where = f"parameter {name!r} of {getattr(function, '__qualname__', function)}"
            raise InvalidOption(where, "a type on the top level of a module, or Depends(function)", kind)
        needs[name] = kind
    return needs


def marked(function: Callable[..., Any]) -> set[str]:
    """The names of the parameters that are marked, or may be: annotations that cannot be read yet hide it."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # made in C
        return set()
    hints = _hints_of(function)
    hidden = {one.name for one in parameters[1:] if isinstance(one.annotation, str)} if hints is None else set()
    shown = {name for name, hint in (hints or {}).items() if _mark_in(hint)}
    return hidden | shown | {one.name for one in parameters if isinstance(one.default, _Wanted)}


def _hints_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Its annotations with what they name; None while they name what does not exist."""
    target: Any = inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    if isinstance(target, partial):
        target = target.func
    try:
        return get_type_hints(target, include_extras=True) if hasattr(target, "__annotations__") else {}
    except (AttributeError, NameError, SyntaxError, TypeError):
        return None


def _mark_in(hint: Any) -> _Wanted | None:
    found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, _Wanted)]
    return found[0] if found else None


def kind_made_by(function: Callable[..., Any]) -> type[Any]:
    """The type of what a provider makes or yields, by its return annotation."""
    if isinstance(function, type):
        return function
    try:
        made = get_type_hints(function).get("return")
    except (AttributeError, NameError, SyntaxError, TypeError):
        made = None
    if get_origin(made) in _YIELDING:
        made = get_args(made)[0]
    if not _is_kind(made):
        name = getattr(function, "__qualname__", function)
        raise InvalidOption("provide", f"a type before {name}, or its return annotation to name one", made)
    return made


def _is_kind(hint: Any) -> TypeGuard[type[Any]]:
    """Whether something can be found by it: all objects are of the type `object`."""
    return isinstance(hint, type) and hint not in (Any, object, inspect.Parameter.empty)


class _Provider:
    """A function that makes something, and what it needs for that."""

    def __init__(self, make: Callable[..., Any], lifetime: Lifetime) -> None:
        self.lifetime = lifetime
        self.needs = needs_of(make, all_required=True)
        self.is_on_loop = is_async(make) or inspect.isasyncgenfunction(make)
        self._opens_on_loop = asynccontextmanager(make) if inspect.isasyncgenfunction(make) else None
        self._opens = contextmanager(make) if inspect.isgeneratorfunction(make) else None
        self._make = make

    async def open(self, arguments: Mapping[str, Any], stack: AsyncExitStack) -> Any:
        if self._opens_on_loop is not None:
            return await stack.enter_async_context(self._opens_on_loop(**arguments))
        if self._opens is not None:
            return stack.enter_context(self._opens(**arguments))
        made = self._make(**arguments)
        return await made if self.is_on_loop else made

    def open_plain(self, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        return self._make(**arguments) if self._opens is None else stack.enter_context(self._opens(**arguments))


class Injector:
    """The providers of one app."""

    def __init__(self, container: Container, owner: object, subjects: tuple[type[Any], ...]) -> None:
        """`owner` and what runs, one of `subjects`, are found too."""
        self._container, self._owner, self._subjects = container, owner, subjects
        self._providers: dict[Key, _Provider] = {}
        self._overrides: dict[Key, _Provider | _Value] = {}
        self._made: dict[Key, Any] = {}
        self._making: dict[Key, asyncio.Lock] = {}
        self._stack: AsyncExitStack | None = None

    def provide(self, kind: type[Any], provider: Any, lifetime: Lifetime) -> None:
        """`provider` is an object of this type, or what makes or yields one: once per process, or for each job."""
        if lifetime not in ("job", "process"):
            raise InvalidOption("scope", "'job' or 'process'", lifetime)
        is_made = callable(provider) and not isinstance(provider, kind)
        if is_made and (lifetime == "job" or _needs_closing(provider) or is_async(provider)):
            self._providers[kind] = _Provider(provider, lifetime)
        else:
            self._container.provide(kind, provider)

    @contextmanager
    def override(self, key: Key, provider: Any) -> Iterator[None]:
        """Within this context `provider` stands for what a type or a function provides: an object, or what makes one
        for each job."""
        before = self._overrides.copy()
        is_made = inspect.isroutine(provider) or isinstance(provider, type | partial)
        self._overrides[key] = _Provider(provider, "job") if is_made else _Value(provider)
        try:
            yield
        finally:
            self._overrides = before

    def check(self, needs: Needs, where: str) -> None:
        """Raises NotConfigured for what nothing provides, for a circle, and for what outlives what it needs."""
        for key in needs.values():
            self._check(key, (where,), "job")

    def _check(self, key: Key, before: tuple[Key, ...], lifetime: Lifetime) -> None:
        path = " -> ".join(map(name_of, (*before, key)))
        found = self._overrides.get(key) or self._providers.get(key)
        if isinstance(found, _Value):
            return
        if found is None and isinstance(key, type):
            if lifetime == "job" and issubclass(key, self._subjects):
                return
            if not (self._container.has(key) or isinstance(self._owner, key)):
                raise NotConfigured(f"nothing provides {key.__name__}: {path}; see app.provide")
            return
        found = found or _Provider(key, "job")
        if key in before:
            raise NotConfigured(f"these need each other, so none can be made first: {path}")
        if lifetime == "process" and found.lifetime == "job":
            raise NotConfigured(f"what is made once per process needs what is made for each job: {path}")
        for need in found.needs.values():
            self._check(need, (*before, key), found.lifetime)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Within this context there is a process: what is made for it is closed at the end."""
        async with AsyncExitStack() as self._stack:
            try:
                yield
            finally:
                self._made.clear()
                self._making.clear()
        self._stack = None

    def find(self, key: Key) -> _Provider | _Value:
        found = self._overrides.get(key) or self._providers.get(key)
        if found is not None:
            return found
        if not isinstance(key, type):
            return self._providers.setdefault(key, _Provider(key, "job"))
        return _Value(self._owner if isinstance(self._owner, key) else self._container.get(key))

    async def for_process(self, key: Key) -> Any:
        """What is made once."""
        async with self._making.setdefault(key, asyncio.Lock()):
            if key not in self._made:
                found = self.find(key)
                if isinstance(found, _Value):
                    return found.value
                if self._stack is None:
                    raise NotConfigured(
                        f"{name_of(key)} is made once per process, and this one has not started; "
                        "use app.run() or `async with app.started()`"
                    )
                arguments = {name: await self.for_process(need) for name, need in found.needs.items()}
                self._made[key] = await found.open(arguments, self._stack)
            return self._made[key]


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any


class JobScope:
    """What is made for one job, closed with `stack`."""

    def __init__(self, injector: Injector, job: Any, stack: AsyncExitStack) -> None:
        self._injector, self._job, self._stack = injector, job, stack
        self._made: dict[Key, Any] = {}
        self.within: list[Callable[[ExitStack], AbstractContextManager[Any]]] = []
        """What a plain function runs inside of, where it runs."""

    async def values(self, needs: Needs) -> dict[str, Any]:
        """For the parameters of a function that runs on the loop."""
        return {name: await self._get(key) for name, key in needs.items()}

    async def _get(self, key: Key) -> Any:
        if key not in self._made:
            found = self._found(key)
            if isinstance(found, _Value):
                return found.value
            if found.lifetime == "process":
                return await self._injector.for_process(key)
            self._made[key] = await found.open(await self.values(found.needs), self._stack)
        return self._made[key]

    async def prepare(self, needs: Needs) -> None:
        """Make what can only be made on the loop, for a plain function that runs elsewhere."""
        for key in needs.values():
            found = None if key in self._made else self._found(key)
            if isinstance(found, _Provider):
                if found.lifetime == "process":
                    self._made[key] = await self._injector.for_process(key)
                elif found.is_on_loop:
                    await self._get(key)
                else:
                    await self.prepare(found.needs)

    def plain_values(self, needs: Needs, stack: ExitStack) -> dict[str, Any]:
        """The rest, where the plain function runs: a connection to a database may belong to one thread."""
        return {name: self._get_plain(key, stack) for name, key in needs.items()}

    def _get_plain(self, key: Key, stack: ExitStack) -> Any:
        if key not in self._made:
            found = self._found(key)
            if isinstance(found, _Value):
                return found.value
            self._made[key] = found.open_plain(self.plain_values(found.needs, stack), stack)
        return self._made[key]

    def call_plain(self, function: Callable[..., Any], needs: Needs, *args: Any) -> Any:
        """Run a plain function here, with what it needs and inside of what it runs within."""
        with ExitStack() as stack:
            for enter in self.within:
                stack.enter_context(enter(stack))
            result = function(*args, **self.plain_values(needs, stack))
            check_time()  # in here: what was opened for a run that failed must not end as if all was well
            return result
        return None  # what it runs within suppressed the error

    def _found(self, key: Key) -> _Provider | _Value:
        if isinstance(key, type) and isinstance(self._job, key):
            return _Value(self._job)
        return self._injector.find(key)


current_scope: Final[ContextVar[JobScope | None]] = ContextVar("bullpen_scope", default=None)
"""That of the job that runs here."""


def name_of(key: Key) -> str:
    """Of a type or a function, for messages."""
    return str(getattr(key, "__qualname__", key))


def _needs_closing(provider: Any) -> bool:
    return inspect.isasyncgenfunction(provider) or inspect.isgeneratorfunction(provider)
