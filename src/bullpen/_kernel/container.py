"""Find objects by their type or name, and make those that are not there yet.

In: instances, factories, names. Out: one object per type. What a class or a factory asks for in its parameters is found
by their types. A type that two objects have is never guessed at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints, overload

from bullpen.errors import NotConfigured

__all__ = ["Container"]

T = TypeVar("T")


class Container:
    """Providers by type, things by name, and the containers of others behind them."""

    def __init__(self, parents: Sequence[Container] = ()) -> None:
        self.parents = list(parents)
        self._factories: dict[type[Any], Callable[..., Any]] = {}
        self._instances: dict[type[Any], list[Any]] = {}
        self._named: dict[str, Any] = {}
        self._making: list[type[Any]] = []

    def provide(self, kind: type[T], provider: T | Callable[..., T]) -> None:
        """`provider` is an object of this type, or what makes one (a class or a function), once, when it is needed."""
        if isinstance(provider, kind):
            self._instances.setdefault(kind, []).append(provider)
        elif callable(provider):
            self._factories[kind] = provider
        else:
            raise NotConfigured(f"{provider!r} is not a {kind.__name__} and does not make one")

    def name(self, name: str, thing: object) -> None:
        """Let `get(name)` find it, and `get(type)` by its class and the classes above it."""
        if name in self._named:
            raise NotConfigured(f"two providers are named {name!r}; rename one of them")
        self._named[name] = thing

    @overload
    def get(self, wanted: type[T]) -> T: ...

    @overload
    def get(self, wanted: str) -> Any: ...

    def get(self, wanted: type[T] | str) -> T | Any:
        """Raises NotConfigured when nothing, or more than one thing, fits."""
        found = self._find(wanted)
        if not found:
            known = ", ".join(self._known())
            what = repr(wanted) if isinstance(wanted, str) else wanted.__name__
            raise NotConfigured(f"nothing provides {what}; there is {known or 'nothing at all'}")
        if len(found) > 1:
            assert not isinstance(wanted, str)
            names = ", ".join(sorted(name for name, thing in self._all_named() if thing in found)) or len(found)
            raise NotConfigured(f"{wanted.__name__} is not clear, there are several: {names}; ask by name")
        return found[0]

    def has(self, wanted: type[Any]) -> bool:
        """Whether `get` would find or make one; nothing is made."""
        is_known = wanted in self._factories or bool(self._instances.get(wanted))
        is_named = any(isinstance(one, wanted) for one in self._named.values())
        return is_known or is_named or any(parent.has(wanted) for parent in self.parents)

    def make(self, kind: type[T]) -> T:
        """An object of a class, whose parameters are found by their types."""
        return self._call(kind, kind)

    def _find(self, wanted: type[Any] | str) -> list[Any]:
        if isinstance(wanted, str):
            own = [self._named[wanted]] if wanted in self._named else []
        else:
            own = [*self._instances.get(wanted, ()), *(one for one in self._named.values() if isinstance(one, wanted))]
            if not own and wanted in self._factories:
                made = self._call(self._factories[wanted], wanted)
                self._instances[wanted] = own = [made]
        for parent in self.parents if not own else ():
            own += [one for one in parent._find(wanted) if one not in own]
        return own

    def _call(self, factory: Callable[..., T], kind: type[Any]) -> T:
        if kind in self._making:
            circle = " -> ".join(each.__name__ for each in (*self._making, kind))
            raise NotConfigured(f"these depend on each other in a circle: {circle}")
        target: Any = inspect.getattr_static(factory, "__init__") if isinstance(factory, type) else factory
        hints = get_type_hints(target) if inspect.isfunction(target) or inspect.ismethod(target) else {}
        self._making.append(kind)
        try:
            arguments: dict[str, Any] = {}
            for name, parameter in inspect.signature(factory).parameters.items():
                if parameter.default is not parameter.empty or parameter.kind in (
                    parameter.VAR_POSITIONAL,
                    parameter.VAR_KEYWORD,
                ):
                    continue
                wanted = hints.get(name)
                if not isinstance(wanted, type):
                    raise NotConfigured(
                        f"{kind.__name__} needs {name!r}, but its annotation is not a type that can be provided"
                    )
                arguments[name] = self.get(wanted)
            return factory(**arguments)
        finally:
            self._making.pop()

    def _all_named(self) -> list[tuple[str, Any]]:
        return [*self._named.items(), *(pair for parent in self.parents for pair in parent._all_named())]

    def _known(self) -> list[str]:
        kinds = {*self._factories, *self._instances}
        own = [*(name for name, _ in self._all_named()), *(kind.__name__ for kind in kinds)]
        return sorted({*own, *(name for parent in self.parents for name in parent._known())})
