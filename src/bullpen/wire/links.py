"""How a job is tied to its parent: the parent's key, and what the job's failure means for it.

In: what a caller wrote, checked here. Out: the fields `parent` of options and hash. No I/O.
Elsewhere: what a finished or failed child does (`lua/lib/parents`), adding trees (`bullpen.queue.flows`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, Protocol

from bullpen._kernel import json
from bullpen._kernel.duration import is_text
from bullpen._kernel.ids import is_encodable
from bullpen.errors import InvalidOption, require

OnFailure = Literal["fail_parent", "continue_parent", "ignore", "remove", "wait"]
"""What the final failure of a child does to its parent.

- `fail_parent`: the parent fails, too, without running.
- `continue_parent`: the parent runs at once, whatever else is pending; `job.ignored_children()` has the reason.
- `ignore`: the child counts as done; `job.ignored_children()` has the reason.
- `remove`: the child counts as done, and nothing is recorded.
- `wait`: the parent waits until the child is retried with success, or removed. Somebody has to do that.
"""

FLAGS: Final = {"fail_parent": "fpof", "continue_parent": "cpof", "ignore": "idof", "remove": "rdof", "wait": None}


class HasKey(Protocol):
    """A job, of whatever kind."""

    @property
    def key(self) -> JobKey: ...


class JobKey(NamedTuple):
    """Which job: its id, and the key of its queue, `<prefix>:<queue>`."""

    id: str
    queue_key: str

    def __str__(self) -> str:
        return f"{self.queue_key}:{self.id}"

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self.queue_key.rpartition(":")[2]

    @staticmethod
    def read(name: str, value: Any) -> JobKey:
        """From the option of a caller: a job, or its key."""
        key = value if isinstance(value, JobKey) else getattr(value, "key", None)
        if not isinstance(key, JobKey):
            raise InvalidOption(name, "a Job, or a JobKey (job.key, queue.key_of(id))", value)
        for part in key:
            require(name, is_text(part) and is_encodable(part), "a key of two texts", key)
        require(name, ":" in key.queue_key, "a queue_key of prefix and name, such as bull:emails", key.queue_key)
        return key

    def to_wire(self) -> dict[str, str]:
        """As the options of a child name it."""
        return {"id": self.id, "queue": self.queue_key}


def check_on_failure(value: Any) -> None:
    """Refuse what is no policy."""
    words = ", ".join(map(repr, FLAGS))
    require("on_failure", value is None or (isinstance(value, str) and value in FLAGS), f"one of {words}", value)


def link_json(parent: JobKey, on_failure: str) -> bytes:
    """The `parent` field of a child's hash."""
    link: dict[str, Any] = {"id": parent.id, "queueKey": parent.queue_key}
    if flag := FLAGS[on_failure]:
        link[flag] = True
    return json.encode_checked(link)
