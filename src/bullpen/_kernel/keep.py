"""Which finished jobs stay, as callers say it. Elsewhere: what a stored rule means (`bullpen.wire.options.resolve`)."""

from __future__ import annotations

from dataclasses import dataclass

from bullpen._kernel.duration import check_int


@dataclass(frozen=True, slots=True)
class KeepJobs:
    """Which finished jobs stay. All bounds hold together."""

    count: int | None = None
    """Keep the newest so many; 0 keeps none, None any number."""
    age_s: int | None = None
    """Keep jobs for so many seconds; None for ever."""
    limit: int | None = None
    """Remove at most so many aged jobs each time a job finishes; None is 1000."""

    def __post_init__(self) -> None:
        for name, value, minimum in (("count", self.count, 0), ("age_s", self.age_s, 0), ("limit", self.limit, 1)):
            if value is not None:
                check_int(f"KeepJobs.{name}", value, minimum=minimum)

    @property
    def keeps_all(self) -> bool:
        return self.count is None and self.age_s is None

    @property
    def keeps_none(self) -> bool:
        return self.count == 0

    def to_wire(self) -> dict[str, int]:
        named = {"count": self.count, "age": self.age_s, "limit": self.limit}
        return {name: value for name, value in named.items() if value is not None}


Retention = bool | int | KeepJobs | None
"""None: as the worker says, else the default rule: 1000 completed ones and a day; failed ones a week if they have a
dead letter, else for ever. True or 0: none stays. False: all stay. A number: the newest so many."""
