"""Why a result did not come in time, as far as the server shows it.

In: the job's state, and what `CLIENT LIST` and the queue's own settings say. Out: a ResultTimeout that says what to do.
Elsewhere: waiting (`events`, `sync`).
"""

from __future__ import annotations

from typing import Final

from bullpen.errors import ResultTimeout
from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys, client_name

PATIENCE_S: Final = 1.0
"""How long the server is asked for the reason: a caller with a timeout must not wait much longer."""


class Circumstances:
    """What was found out. None: it could not be."""

    def __init__(
        self, state: JobState | None = None, *, has_worker: bool | None = None, is_paused: bool | None = None
    ) -> None:
        self.state, self.has_worker, self.is_paused = state, has_worker, is_paused


def lists_worker(keys: QueueKeys, client_list: bytes) -> bool:
    """Whether a worker of any client is connected to this queue."""
    name = client_name(keys.prefix, keys.name)
    lines = client_list.decode("utf-8", "replace").splitlines()
    names = (line.partition(" name=")[2].partition(" ")[0] for line in lines)
    return any(found == name or found.startswith(f"{name}:w:") for found in names)


def late_result(keys: QueueKeys, job_id: str, timeout_ms: int, found: Circumstances) -> ResultTimeout:
    return ResultTimeout(
        f"job {job_id!r} of queue {keys.name!r} did not finish within {timeout_ms} ms: {_explain(found)}",
        queue=keys.name,
        job_id=job_id,
        state=None if found.state is None else found.state.value,
        has_worker=found.has_worker,
        is_paused=found.is_paused,
    )


def _explain(found: Circumstances) -> str:
    match found.state:
        case None:
            return "the server does not answer, so its state is unknown"
        case JobState.UNKNOWN:
            return "it does not exist any more"
        case JobState.COMPLETED | JobState.FAILED:
            return f"it is {found.state.value} by now; ask again"
    workers = {
        None: "it is unknown whether a worker is connected (CLIENT LIST is forbidden)",
        True: "a worker is connected; the job continues, ask again later",
        False: "no worker is connected to this queue; start one",
    }[found.has_worker]
    if found.is_paused and found.state is not JobState.ACTIVE:
        workers = f"the queue is paused, resume it; {workers}"
    return f"it is {found.state.value}, and {workers}"
