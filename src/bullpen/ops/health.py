"""Is this process alive, and can it do its work? Answers with reasons, and changes nothing.

In: named checks, each a coroutine that returns None when all is well, or the reason why not. Out: a report that never
raises: a check that fails or takes too long is a reason too. `live` is false only for what a restart would repair (a
hung worker), `ready` also while a server is unreachable. What this process does not need is not asked. Elsewhere: the
HTTP page (`bullpen.http.ops`), which checks an app has (`bullpen.app`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bullpen._kernel.scrub import scrub

__all__ = ["Check", "Health", "HealthReport"]

Check = Callable[[], Awaitable[str | None]]
"""None: all is well. A text: why not."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The answer of every check: None, or its reason."""

    live: bool
    ready: bool
    checks: dict[str, str | None]

    def to_json(self) -> dict[str, Any]:
        return {
            "live": self.live,
            "ready": self.ready,
            "checks": {name: "ok" if reason is None else reason for name, reason in self.checks.items()},
        }


@dataclass(frozen=True, slots=True)
class _Named:
    check: Check
    vital: bool
    needed: Callable[[], bool]


@dataclass(slots=True)
class Health:
    """The checks of one process."""

    timeout_s: float = 5.0
    _checks: dict[str, _Named] = field(default_factory=dict)

    def add(self, name: str, check: Check, *, vital: bool = False, needed: Callable[[], bool] = lambda: True) -> None:
        """`vital`: without it the process should be restarted; else it only should get no work. `needed`: whether this
        process needs it now; else it is not asked and not in the report."""
        self._checks[name] = _Named(check, vital, needed)

    async def report(self, *, vital_only: bool = False) -> HealthReport:
        """All checks now, at the same time; or only the vital ones, which stay inside this process."""
        asked = {name: each for name, each in self._checks.items() if each.needed() and (each.vital or not vital_only)}
        reasons = await asyncio.gather(*(self._ask(each.check) for each in asked.values()))
        answers = dict(zip(asked, reasons, strict=True))
        return HealthReport(
            live=not any(answers[name] is not None for name, each in asked.items() if each.vital),
            ready=not any(reason is not None for reason in reasons),
            checks=answers,
        )

    async def _ask(self, check: Check) -> str | None:
        try:
            async with asyncio.timeout(self.timeout_s):
                reason = await check()
            return None if reason is None else scrub(reason)
        except TimeoutError:
            return f"no answer within {self.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever is wrong is the answer
            # The page is open to whoever reaches it, and errors of drivers hold addresses with passwords.
            return scrub(f"{type(error).__name__}: {error}")
