"""Delete finished jobs without a retention rule, beyond the default rule.

Jobs that name no retention, and whose worker names none, would stay for ever: they fill the server, and a `job_id` of
theirs is never free again. In: a queue and the rules. Out: nothing; jobs that other clients added are left alone. Any
number of workers may do it. Beside the settling of jobs, not in it: a job costs no command more. Elsewhere: rules that
were given (`bullpen.worker.exchange`, `bullpen.wire.lua`, lib/retention).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bullpen._kernel.keep import KeepJobs
from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError, ConnectionLost
from bullpen.queue.actions import QueueActions
from bullpen.queue.idling import until_worth_looking
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import DEFAULT_KEEP_COMPLETED, DEFAULT_KEEP_FAILED

logger = get_logger("bullpen.worker")

_FIRST_AFTER_S: Final = 1.0
_EVERY_S: Final = 15.0


class Retirement:
    """The default rule of one queue, for the outcomes that its worker has no rule for."""

    def __init__(
        self,
        actions: QueueActions,
        keys: QueueKeys,
        *,
        completed: bool,
        failed: bool,
        clock_offset_ms: int,
        settled: Callable[[], int],
    ) -> None:
        """`settled`: how often this worker has settled jobs. While it does not, it polls less often."""
        self._actions = actions
        self._settled = settled
        self._keys = keys
        self._completed, self._failed = completed, failed
        self._clock_offset_ms = clock_offset_ms
        self._left: dict[str, tuple[bytes, bytes]] = {}  # the last job that was looked at and left, by set
        self._is_faulty = False

    async def run(self) -> None:
        """Poll until cancelled. A fault is logged when it starts, not each time."""
        await asyncio.sleep(_FIRST_AFTER_S)
        while True:
            settled = self._settled()
            try:
                if self._completed:
                    await self._retire(self._keys.completed, "removeOnComplete", DEFAULT_KEEP_COMPLETED)
                if self._failed:
                    await self._retire(self._keys.failed, "removeOnFail", DEFAULT_KEEP_FAILED, needs_letters="1")
                self._is_faulty = False
            except ConnectionLost:
                pass  # told by the connection itself
            except BullpenError as error:
                if not self._is_faulty:
                    logger.error("queue %r: finished jobs cannot be removed: %s", self._keys.name, error)
                self._is_faulty = True
            await until_worth_looking(self._settled, settled, _EVERY_S)

    async def _retire(self, key: str, option: str, keep: KeepJobs, needs_letters: str = "") -> None:
        assert keep.age_s is not None
        rule = (option, -1 if keep.count is None else keep.count, keep.age_s * 1000, needs_letters)
        more = 1
        while more:
            after = self._left.get(key, (b"", b""))
            args = [self._keys.base, self._clock_offset_ms, *rule, *after]
            _, more, *left = await self._actions.evaluate("retire", [key], args)
            self._left[key] = (left[0], left[1])
