"""Every order of the steps of a small world, breadth first: what a test with random orders may miss for years.

In: a world (`World`): where it starts, what may happen next, what must never be, and when all is well. Out: how many
states there are (`Explored`), or the shortest way to a wrong one (`Counterexample`).

Two things are checked. *Safety*: no state is wrong. *Progress*: from every state the world comes to one where all is
well by what must happen sooner or later (a reply arrives, a handler ends); what somebody may do or leave (another job,
a pause) may not be needed. A state with no such way is one where work sleeps until somebody happens to come by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """Its name is for the trace."""

    name: str
    state: S
    is_optional: bool = False
    """Somebody may do it, and may leave it."""


class World(Protocol[S]):
    """States are values: equal ones are visited once."""

    def start(self) -> S: ...

    def steps(self, state: S, /) -> Iterable[Step[S]]:
        """What may happen next."""

    def wrong(self, state: S, /) -> str | None:
        """What must never be."""

    def is_well(self, state: S, /) -> bool:
        """Everything that was asked for has been done."""


@dataclass(frozen=True)
class Explored:
    states: int
    steps: int


class Counterexample(AssertionError):
    """What is wrong, and the shortest way there."""

    def __init__(self, what: str, trace: list[str], state: object) -> None:
        self.what, self.trace, self.state = what, trace, state
        super().__init__("\n".join([what, *(f"  {step}" for step in trace), f"  => {state}"]))


def explore(world: World[Any], *, most: int = 2_000_000) -> Explored:
    """Visit every state. Raises Counterexample."""
    first = world.start()
    came_from: dict[Hashable, tuple[Hashable, str] | None] = {first: None}
    before: dict[Hashable, list[Hashable]] = {}
    well: list[Hashable] = []
    queue: deque[Any] = deque([first])
    steps = 0

    def trace(state: Hashable) -> list[str]:
        names: list[str] = []
        while (origin := came_from[state]) is not None:
            state, name = origin
            names.append(name)
        return names[::-1]

    while queue:
        state = queue.popleft()
        if (what := world.wrong(state)) is not None:
            raise Counterexample(what, trace(state), state)
        if world.is_well(state):
            well.append(state)
        for name, following, is_optional in world.steps(state):
            steps += 1
            if not is_optional:
                before.setdefault(following, []).append(state)
            if following not in came_from:
                came_from[following] = state, name
                assert len(came_from) <= most, f"more than {most} states: the world is too large to be visited"
                queue.append(following)

    hopeful = set(well)
    waiting = list(well)
    while waiting:
        for earlier in before.get(waiting.pop(), ()):
            if earlier not in hopeful:
                hopeful.add(earlier)
                waiting.append(earlier)
    for state in came_from:  # in the order of the visit: the first is one of the nearest
        if state not in hopeful:
            raise Counterexample("nothing leads from here to where all is well", trace(state), state)
    return Explored(len(came_from), steps)
