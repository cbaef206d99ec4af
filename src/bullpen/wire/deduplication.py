"""The deduplication rule of a job: which adds make one job.

In: what a caller wrote, checked here. Out: the object `de` of the stored options. No I/O.
Elsewhere: what the rule does when a job is added (`lua/lib/claim`), and when it ends (`lua/lib/deduplication`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.duration import is_text, to_ms
from bullpen._kernel.ids import is_encodable
from bullpen.errors import InvalidOption, require

MAX_DEDUPLICATION_ID: Final = 500
_FLAGS: Final = {
    "extend": "extend",
    "replace": "replace",
    "reschedule": "reschedule",
    "keep_last_if_active": "keepLastIfActive",
}


@dataclass(frozen=True, slots=True)
class Deduplication:
    """Which adds of a queue make one job: those with the same `id`, while the first of them owns it.

    Without further options an id is owned until its job completed, failed finally or was removed.
    """

    id: str
    _: KW_ONLY
    ttl: int | timedelta | None = None
    """Own the id for so long (ms or timedelta) from the add on, whatever becomes of the job: at most one job per
    period."""
    extend: bool = False
    """Each add that finds the id owned starts `ttl` again."""
    replace: bool = False
    """A job that is still delayed gives way to the new one, which takes over the id. With `ttl`, `extend` and a delay:
    debounce, only the last of a burst runs."""
    reschedule: bool = False
    """A job that is still delayed stays, and its delay begins again: that of the new add. BullMQ 6.7 and later."""
    keep_last_if_active: bool = False
    """While the owner runs, the last add is kept and becomes a job when the owner ends. Not with `ttl`."""

    def __post_init__(self) -> None:
        check_deduplication_id(self.id)
        for name in _FLAGS:
            value = getattr(self, name)
            require(f"deduplication.{name}", isinstance(value, bool), "True or False", value)
        require("deduplication.extend", self.ttl is not None or not self.extend, "a ttl to extend", self.extend)
        expected = "not together with replace: a job is either replaced or delayed"
        require("deduplication.reschedule", not (self.replace and self.reschedule), expected, self.reschedule)
        if self.ttl is not None:
            to_ms("deduplication.ttl", self.ttl, minimum=1)
            expected = "no ttl together with keep_last_if_active, which holds the id while its job exists"
            require("deduplication.ttl", not self.keep_last_if_active, expected, self.ttl)

    @staticmethod
    def read(value: Any) -> Deduplication:
        """From the option of a caller: a rule, or only its id."""
        if isinstance(value, Deduplication):
            return value
        if isinstance(value, str):
            return Deduplication(value)
        raise InvalidOption("deduplication", "an id (text) or Deduplication(id, ...)", value)

    @staticmethod
    def from_wire(stored: dict[str, Any]) -> Deduplication:
        """From what `to_wire` made."""
        return Deduplication(
            stored["id"],
            ttl=stored.get("ttl"),
            **{name: stored.get(wired, False) for name, wired in _FLAGS.items()},
        )

    def to_wire(self) -> dict[str, Any]:
        """As BullMQ stores it; what changes nothing is left out."""
        wire: dict[str, Any] = {"id": self.id}
        if self.ttl is not None:
            wire["ttl"] = to_ms("deduplication.ttl", self.ttl)
        return wire | {wired: True for name, wired in _FLAGS.items() if getattr(self, name)}


def check_deduplication_id(value: Any) -> str:
    """Return the id if it may be one. Raises InvalidOption for option `deduplication.id`."""
    fits = is_text(value) and len(value) <= MAX_DEDUPLICATION_ID and is_encodable(value)
    require("deduplication.id", fits, f"text of 1 to {MAX_DEDUPLICATION_ID} characters", value)
    return str(value)
