"""Actions as methods: marked by decorators, found once, run in order.

    class Notify:
        @on_event(OrderEvent.PAY, order=1)
        async def receipt(self, entity: Order, payload: Payment) -> Order: ...

        @on_status_changed(from_=OrderStatus.NEW, to=OrderStatus.PAID, fail_on_error=False)
        async def tell(self, entity: Order, payload: Payment) -> Order: ...

In: objects with marked methods. Out: which of them to run for a step. Elsewhere: running them (`engine`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from bullpen.errors import InvalidOption, require
from bullpen.workflow.definition import many
from bullpen.workflow.machine import Step

__all__ = ["Hook", "Hooks", "name_of", "on_event", "on_status_changed"]

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
_MARKS: Final = "__bullpen_hooks__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A method to run at some steps."""

    event: Any = None
    source: Any = None
    target: Any = None
    order: int = 0
    fail_on_error: bool = True
    is_on_event: bool
    name: str = ""
    run: Callable[[Any, Any], Awaitable[Any]] | None = None

    def fits(self, step: Step[Any, Any, Any, Any]) -> bool:
        if self.is_on_event:
            return step.event in many(self.event)
        return step.source in many(self.source) and step.target in many(self.target)


def on_event(event: Any, *, order: int = 0) -> Callable[[Method], Method]:
    """Run the method when this event (or one of these) moves an entity, after the transition's own actions.

    Methods with a lower `order` come first.
    """
    require("order", type(order) is int, "a whole number", order)
    return _marking(Hook(event=event, order=order, is_on_event=True))


def on_status_changed(*, from_: Any, to: Any, fail_on_error: bool = True) -> Callable[[Method], Method]:
    """Run the method when an entity has moved from this status (or one of these) to that one.

    `fail_on_error=False`: when it raises, that is logged, and the step counts as done.
    """
    require("fail_on_error", isinstance(fail_on_error, bool), "True or False", fail_on_error)
    return _marking(Hook(source=from_, target=to, fail_on_error=fail_on_error, is_on_event=False))


def _marking(hook: Hook) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        require("method", inspect.iscoroutinefunction(method), "an `async def`", method)
        setattr(method, _MARKS, (*getattr(method, _MARKS, ()), hook))
        return method

    return mark


class Hooks:
    """All marked methods of a workflow's action objects."""

    def __init__(self, objects: Iterable[object]) -> None:
        self.all: list[Hook] = []
        for each in objects:
            found = list(_hooks_of(each))
            if not found:
                raise InvalidOption("actions", "objects with methods marked by on_event or on_status_changed", each)
            self.all += found

    def on_event(self, step: Step[Any, Any, Any, Any]) -> list[Hook]:
        """In their order; equal ones in the order of their definition."""
        fitting = [hook for hook in self.all if hook.is_on_event and hook.fits(step)]
        return sorted(fitting, key=lambda hook: hook.order)

    def on_status_changed(self, step: Step[Any, Any, Any, Any]) -> list[Hook]:
        return [hook for hook in self.all if not hook.is_on_event and hook.fits(step)]


def name_of(action: Any) -> str:
    """The name of an action as its author wrote it; also for partials and objects that can be called."""
    while isinstance(action, partial):
        action = action.func
    return str(getattr(action, "__name__", type(action).__name__))


def _hooks_of(instance: object) -> Iterable[Hook]:
    kind = type(instance)
    # By the class and in its order: asking the instance for every attribute would run its properties.
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    for name in names:
        for hook in getattr(inspect.getattr_static(kind, name), _MARKS, ()):
            yield Hook(
                event=hook.event,
                source=hook.source,
                target=hook.target,
                order=hook.order,
                fail_on_error=hook.fail_on_error,
                is_on_event=hook.is_on_event,
                name=f"{kind.__name__}.{name}",
                run=getattr(instance, name),
            )
