"""`bullpen.sync` has the names and signatures of the asynchronous classes, and nothing to await."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import bullpen
from bullpen import sync
from bullpen.queue.dead_letters.failed_set import FailedSetStore
from bullpen.queue.dead_letters.operations import DeadLetters
from bullpen.queue.lanes import Lanes
from tools import blocking_faces

PAIRS: dict[str, tuple[type, type]] = {
    "Queue": (bullpen.Queue, sync.Queue),
    "Job": (bullpen.Job, sync.Job),
    "Lanes": (Lanes, sync.Lanes),
    "DeadLetters": (DeadLetters, sync.DeadLetters),
    "FailedSetStore": (FailedSetStore, sync.FailedSetStore),
}
ONLY_ON_A_LOOP = {
    "Job": {"actions", "bind", "bind_to_running_loop", "is_ordinary", "mark", "note_cancelled", "sync"},
    "Queue": {"leave_loop"},
}
"""What a worker needs of a job, and what makes this class of the other."""


def names(of: type) -> set[str]:
    annotated = {name for kind in of.__mro__ for name in vars(kind).get("__annotations__", {})}
    return {name for name in {*dir(of), *annotated} if not name.startswith("_")}


def signature(function: Callable[..., Any]) -> str:
    """As text, with what `await` and `async for` would give."""
    shown = str(inspect.signature(function)).replace("'", "")
    return re.sub(r"\b(FlowNode|BlockedParent)\[Job\]", r"\1", shown.replace("AsyncIterator", "Iterator"))


@pytest.mark.parametrize("face", PAIRS)
def test_both_faces_have_the_same_names(face: str) -> None:
    on_loop, blocking = PAIRS[face]

    assert names(blocking) == names(on_loop) - ONLY_ON_A_LOOP.get(face, set())


@pytest.mark.parametrize("face", PAIRS)
def test_both_faces_take_and_give_the_same(face: str) -> None:
    on_loop, blocking = PAIRS[face]
    checked = 0
    for name in sorted(names(blocking)):
        twin, own = (inspect.getattr_static(kind, name, None) for kind in (on_loop, blocking))
        if inspect.isfunction(own):
            assert inspect.isfunction(twin), name
            assert signature(own) == signature(twin), name
            assert not inspect.iscoroutinefunction(own), name
            assert not inspect.isasyncgenfunction(own), name
            checked += 1
    assert checked


def test_the_constructors_differ_only_in_what_a_buffer_needs() -> None:
    """A blocking queue has no buffer: each add is sent at once."""
    on_loop, blocking = (
        {name: str(each) for name, each in inspect.signature(kind).parameters.items()}
        for kind in (bullpen.Queue, sync.Queue)
    )

    assert {name for name in on_loop if name not in blocking} == {"max_buffered"}
    assert blocking == {name: text for name, text in on_loop.items() if name != "max_buffered"}


def test_the_generated_file_is_up_to_date() -> None:
    """Else: python -m tools.blocking_faces."""
    assert blocking_faces.TARGET.read_text(encoding="utf-8") == blocking_faces.render()
