"""A text is an iterable of its letters: given where several texts are expected, it was taken letter by letter.

The test walks over the public functions, finds every parameter that takes several texts, and gives each a single one.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from bullpen.errors import InvalidOption
from bullpen.messages import Recipients
from tests.static.public import public_modules, public_names

NOT_FOR_USERS = ("bullpen.testing", "bullpen.cli", "bullpen.wire", "bullpen.wiring")
MADE_BY_US = {
    # Records that bullpen makes for its users to read.
    *(
        "BlockedParent.__init__",
        "Children.__init__",
        "Claimed.__init__",
        "Edit.__init__",
        "Endpoint.__init__",
        "EndpointRow.__init__",
        "FoundHeads.__init__",
        "LogPage.__init__",
        "Run.__init__",
        "Simulation.__init__",
    ),
    # Between parts of bullpen: the engine and its stores, a transport that tells what it can do, calls of scripts.
    *("Change.__init__", "MessageChange.cancel", "Features.__init__", "SqlEntities.read", "DirectStore.read"),
    *("Shares.lanes", "wants", "ServerFacts.__init__"),
    *("Door.call_two", "Door.evaluate", "Door.evaluate_soon"),
    *("Desk.audit", "check_host", "PageRoute.__init__", "PageRoute.match", "job_view", "overview_view", "verdict_of"),
    *("RedisEntities.read", "DurableCalls.call", "note_late_wakeup", "SqlMessages.planning", "parts_of"),
    # A blocking face hands on what it gets to the asynchronous class, which is checked.
    "QueueFace.jobs_at",
    "QueueFace.heads_of",
}
NEEDED: dict[str, dict[str, Any]] = {
    "EventRoute.__init__": {"name": "orders", "mapper": dict, "since": "now"},
    "QueueSpec.__init__": {"name": "orders"},
    "Sms.__init__": {"url": "https://sms.example", "account": "a", "token": "t", "sender": "s"},
    "Slack.__init__": {"url": "https://slack.example"},
    "Webhook.__init__": {"url": "https://partner.example"},
}
"""What is checked before, and cannot be anything."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any], type | None]]:
    """Every function and method of ours that a name without an underscore leads to."""
    seen: set[object] = set()
    for module in public_modules():
        if module.startswith(NOT_FOR_USERS):
            continue
        for _, value in public_names(module):
            if not str(getattr(value, "__module__", "")).startswith("bullpen"):
                continue
            if inspect.isfunction(value) and value not in seen:
                seen.add(value)
                yield value.__qualname__, value, None
            if not inspect.isclass(value) or getattr(value, "_is_protocol", False):
                continue
            for attribute in dir(value):
                given = inspect.getattr_static(value, attribute)
                function = getattr(given, "__func__", given)
                is_ours = inspect.isfunction(function) and (attribute == "__init__" or not attribute.startswith("_"))
                if is_ours and function not in seen and not hasattr(function, "__isabstractmethod__"):
                    seen.add(function)
                    yield function.__qualname__, function, value


def alternatives(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from alternatives(each)
    else:
        yield hint


def takes_texts(hint: Any) -> bool:
    """Several texts of any number, and not a single one as well."""
    choices = list(alternatives(hint))
    if any(inspect.isclass(each) and issubclass(each, str) for each in choices):
        return False
    for each in choices:
        origin, given = typing.get_origin(each), typing.get_args(each)
        is_many = inspect.isclass(origin) and issubclass(origin, abc.Iterable) and not issubclass(origin, abc.Mapping)
        is_pair = origin is tuple and (len(given) != 2 or given[1] is not Ellipsis)
        if is_many and not is_pair and any(one is str for part in given for one in alternatives(part)):
            return True
    return False


def text_parameters() -> list[Any]:
    found = []
    for name, function, owner in public_functions():
        if name in MADE_BY_US or any(part.startswith("_") for part in function.__module__.split(".")):
            continue
        try:
            hints = typing.get_type_hints(function)
        except NameError:  # a type that is only there for the checker
            scope = {**vars(abc), **vars(typing), **vars(importlib.import_module(function.__module__))}
            hints = {}
            for parameter, hint in function.__annotations__.items():
                try:
                    hints[parameter] = eval(hint, scope)
                except NameError:
                    continue
        found += [
            pytest.param(function, owner, parameter, id=f"{name}({parameter})")
            for parameter, hint in hints.items()
            if parameter != "return" and takes_texts(hint)
        ]
    return found


async def call(function: Callable[..., Any], owner: type | None, given: dict[str, Any]) -> None:
    """Call it as far as it goes with one text too few around it; what is not given is None."""
    needed = NEEDED.get(function.__qualname__, {})
    parameters = inspect.signature(function).parameters.values()
    values = {
        each.name: needed.get(each.name)
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    if owner is not None and "self" in values:
        values["self"] = object.__new__(owner)
    if "cls" in values:
        values["cls"] = owner
    answer = function(**{**values, **given})
    if inspect.isgenerator(answer):
        next(answer)
    elif isinstance(answer, AbstractAsyncContextManager):
        async with answer:
            pass
    elif inspect.isawaitable(answer):
        await answer


def test_the_walk_finds_what_it_is_for() -> None:
    names = {each.id for each in text_parameters()}

    assert {"Recipients.remove(ids)", "Bullpen.run(only)", "Webhook.__init__(allowed_networks)"} <= names
    assert len(names) > 20


@pytest.mark.parametrize("wrong", ["gone", b"gone", 7], ids=["text", "bytes", "number"])
@pytest.mark.parametrize(("function", "owner", "parameter"), text_parameters())
async def test_one_text_is_not_taken_for_several(
    function: Callable[..., Any], owner: type | None, parameter: str, wrong: object
) -> None:
    with pytest.raises(InvalidOption) as refused:
        await call(function, owner, {parameter: wrong})

    assert refused.value.option.endswith(parameter)


async def test_what_is_no_text_among_several_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"ids: expected texts only, got 7"):
        await call(Recipients.remove, Recipients, {"ids": ["good", 7]})
