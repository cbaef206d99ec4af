"""Change one job wherever it is: its delay and priority, promote it, retry it, remove it.

In: its id. Out: nothing, or an error that says why not. Each change is one atomic script with its events; one whose
reply was lost is repeated, and repeating changes nothing more. Elsewhere: many jobs at once (`maintain`), ending one
(`cancel`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NoReturn, Protocol

from bullpen._kernel.duration import to_ms
from bullpen.errors import JobNotFound, JobStateConflict, ServerRefused, require
from bullpen.queue.children import children_of, split_key
from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import DEFAULT_OPTIONS, make_options

_NO_JOB, _LOCKED, _WRONG_STATE, _CURRENT_ITERATION, _TOO_LARGE = -1, -2, -3, -8, -20
_FINISHED: Final = (JobState.FAILED, JobState.COMPLETED)


class SendsScripts(Protocol):
    """Send a script or a command, again if its reply is lost."""

    async def evaluate(self, script: str, keys: list[str], args: list[Any]) -> Any: ...
    async def evaluate_noting_repeats(self, script: str, keys: list[str], args: list[Any]) -> tuple[Any, bool]: ...
    async def command(self, *command: str | bytes | int) -> Any: ...


class JobChanges:
    """The changes of one job at a time, for the jobs of one queue."""

    def __init__(
        self, server: SendsScripts, keys: QueueKeys, dead_letter_keys: QueueKeys, clock_offset_ms: int
    ) -> None:
        self._server, self._keys = server, keys
        self._dead_letter_keys, self._clock_offset_ms = dead_letter_keys, clock_offset_ms

    async def change_delay(self, job_id: str, delay: int | timedelta) -> None:
        keys = self._keys
        reply = await self._server.evaluate(
            "change_delay",
            [keys.job(job_id), keys.delayed],
            [keys.base, self._clock_offset_ms, job_id, to_ms("delay", delay)],
        )
        self._must_be_done(reply, job_id, "is not delayed")

    async def change_priority(
        self, job_id: str, priority: int | None = None, *, urgency: int | None = None, lifo: bool = False
    ) -> None:
        given = {name: value for name, value in (("priority", priority), ("urgency", urgency)) if value is not None}
        require("priority", len(given) == 1, "either priority or urgency", given)
        keys = self._keys
        reply = await self._server.evaluate(
            "change_priority",
            [keys.job(job_id), keys.wait, keys.paused, keys.prioritized],
            [keys.base, job_id, make_options(DEFAULT_OPTIONS, **given).wire_priority, "1" if lifo else ""],
        )
        self._must_be_done(reply, job_id, "")

    async def promote(self, job_id: str) -> None:
        keys = self._keys
        reply, was_repeated = await self._server.evaluate_noting_repeats(
            "promote", [keys.job(job_id), keys.delayed], [keys.base, job_id]
        )
        if not (was_repeated and reply == _WRONG_STATE):  # else our first copy did it
            self._must_be_done(reply, job_id, "is not delayed")

    async def retry(self, job_id: str, *, state: JobState = JobState.FAILED, reset_attempts: bool = False) -> None:
        keys, finished = self._keys, check_finished(state)
        reply, was_repeated = await self._server.evaluate_noting_repeats(
            "retry",
            [keys.job(job_id), getattr(keys, finished)],
            [keys.base, job_id, finished, "1" if reset_attempts else "", self._dead_letter_keys.base],
        )
        if not (was_repeated and reply == _WRONG_STATE):
            self._must_be_done(reply, job_id, f"is not {finished}")

    async def remove(self, job_id: str, *, children: bool = True) -> bool:
        keys = self._keys
        reply, was_repeated = await self._server.evaluate_noting_repeats(
            "remove",
            [keys.job(job_id)],
            [keys.base, self._clock_offset_ms, job_id, "1" if children else "", "", ""],
        )
        if reply == _LOCKED:
            self._refuse(job_id, "is running, or one of the jobs it waits for is")
        if reply == _CURRENT_ITERATION:
            self._refuse(job_id, "is the next job of a job scheduler, which would stop without it")
        if reply == _TOO_LARGE:
            return await self._remove_tree(job_id)
        return bool(reply) or was_repeated

    async def _remove_tree(self, job_id: str) -> bool:
        """Parents before children, so that no parent is released in between."""
        server, top = self._server, self._keys.job(job_id)
        below = [(child, top) async for child in children_of(server, top)]
        removed = await self.remove(job_id, children=False)
        while below:
            key, parent = below.pop()
            base, child_id = await split_key(server, key)
            try:
                named = await server.command("HGET", key, "parentKey")
            except ServerRefused:  # no job at all, or one of somebody whose keys we may not read
                continue
            if named != parent.encode("utf-8", "surrogateescape"):
                continue  # whoever wrote the list does not own this job, and what it names is not our business
            children = [(child, key) async for child in children_of(server, key)]
            reply, was_repeated = await server.evaluate_noting_repeats(
                "remove", [key], [base, self._clock_offset_ms, child_id, "", "", parent]
            )
            if reply == 1 or was_repeated:
                below += children
            if reply == _LOCKED:
                self._refuse(job_id, f"was removed, but not its child {key!r}, which began to run")
        return removed

    def _must_be_done(self, reply: int, job_id: str, otherwise: str) -> None:
        if reply == _NO_JOB:
            raise JobNotFound(self._keys.name, job_id)
        if reply == _WRONG_STATE:
            self._refuse(job_id, otherwise)

    def _refuse(self, job_id: str, why: str) -> NoReturn:
        raise JobStateConflict(
            f"job {job_id!r} of queue {self._keys.name!r} {why}", queue=self._keys.name, job_id=job_id
        )


def check_finished(state: Any) -> str:
    """The name of a finished state on the wire."""
    require("state", state in _FINISHED, "JobState.FAILED or JobState.COMPLETED", state)
    return str(JobState(state).value)
