"""Tell a measurement that others on the same host disturbed.

A virtual machine shares its processors with strangers, and its kernel counts the time it wanted and did not get. A
measurement that lost much of it says more about the strangers than about a library, whichever it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MOST_STOLEN = 0.05
"""Share of the wanted processor time."""
TRIES = 4
_STAT = Path("/proc/stat")
_IDLE, _WAITS_FOR_DISK, _STOLEN = 3, 4, 7


def times() -> list[int]:
    """Processor time of this machine since it was started, by use. Empty where the system does not tell."""
    if not _STAT.exists():
        return []
    return [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:]]


def stolen_share(before: list[int], after: list[int]) -> float:
    """Which part of the time that somebody here wanted went to others."""
    used = [late - early for early, late in zip(before, after, strict=True)]
    if len(used) <= _STOLEN:
        return 0.0
    wanted = sum(used[: _STOLEN + 1]) - used[_IDLE] - used[_WAITS_FOR_DISK]
    return used[_STOLEN] / wanted if wanted else 0.0


def undisturbed(measure: Callable[[], T | None], tell: Callable[[str], None]) -> T | None:
    """Measure until nobody disturbed it; of a few that were all disturbed the least is used. None: it failed."""
    best: tuple[float, T] | None = None
    for _ in range(TRIES):
        before = times()
        found = measure()
        if found is None:
            break
        share = stolen_share(before, times())
        if best is None or share < best[0]:
            best = (share, found)
        if share <= MOST_STOLEN:
            break
        tell(f"others took {share:.0%} of the processor time; once more")
    return None if best is None else best[1]
