"""Providers that runs call: how often they may be called, and what happens while one is down.

In: a name with its limits. Out: permission to call, or a signal that sends the run back to the queue with no attempt
counted. The rate is counted in Redis over all workers; a breaker's failures in this process.
Elsewhere: counting (`bullpen.queue.limits`), the breaker's rule (`bullpen._kernel.breaker`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bullpen._kernel.breaker import CircuitBreaker
from bullpen._kernel.duration import check_int
from bullpen.errors import DelayJob, InvalidOption, JobSignal
from bullpen.queue import Queue

__all__ = ["Provider", "ProviderLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What one provider bears."""

    rate_limit_rpm: int | None = None
    """Calls per minute, over all workers of the queue; None: as many as come."""
    breaker: CircuitBreaker | None = field(default=None, compare=False)
    """When to stop calling one that only fails; None: never."""

    def __post_init__(self) -> None:
        if self.rate_limit_rpm is not None:
            check_int("rate_limit_rpm", self.rate_limit_rpm, minimum=1)


class ProviderLimits:
    """The configured providers, as runs ask for them."""

    def __init__(self, queue: Queue, providers: Mapping[str, Provider]) -> None:
        self._queue, self._providers = queue, dict(providers)

    @asynccontextmanager
    async def call(self, name: str) -> AsyncIterator[None]:
        """Around one call. Raises DelayJob when it is not the time for one."""
        provider = self._providers.get(name)
        if provider is None:
            raise InvalidOption("provider", f"one of {', '.join(sorted(self._providers)) or 'none'}", name)
        breaker = provider.breaker
        if breaker is not None and (wait_ms := breaker.ask()):
            raise DelayJob(wait_ms, f"provider {name!r} is down")
        try:
            await self._take_turn(name, provider)
            yield
        except Exception as error:
            # A signal says what shall happen to the job, and nothing about the provider.
            if breaker is not None:
                breaker.abandoned() if isinstance(error, JobSignal) else breaker.failed()
            raise
        except BaseException:
            if breaker is not None:
                breaker.abandoned()
            raise
        if breaker is not None:
            breaker.succeeded()

    async def _take_turn(self, name: str, provider: Provider) -> None:
        if provider.rate_limit_rpm is None:
            return
        wait_ms = await self._queue.take_turn(name, most=provider.rate_limit_rpm)
        if wait_ms:
            raise DelayJob(wait_ms, f"provider {name!r} has used its {provider.rate_limit_rpm} calls of this minute")
