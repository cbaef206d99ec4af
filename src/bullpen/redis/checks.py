"""What an operator should know about a server before trusting it with jobs.

In: what a server said. Out: findings, each an answer to one question; "cannot tell" is an answer too, because managed
servers forbid CONFIG and an ACL may forbid INFO. Judging is apart from asking: connections judge what they see on
their first contact and log it once (`client`), `inspect_server` asks again for a person (`inspection`). Only what
makes our scripts wrong is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from bullpen._kernel.clock import LARGE_SKEW_MS

__all__ = ["Facts", "ServerFinding", "ServerVerdict", "judge_facts", "judge_replicas", "parse_info"]

OLDEST_REDIS: Final = (6, 2)

# First release of each line in which a script can no longer break out of its sandbox (CVE-2025-49844). Lines that are
# newer than the last one were born with the fix; those in between that are missing never got it.
_SCRIPT_HOLE_CLOSED: Final = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}


class ServerVerdict(StrEnum):
    """What became of one question."""

    GOOD = "good"
    WARNING = "warning"
    REFUSED = "refused"
    """Our scripts would be wrong here, so connecting fails."""
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """The answer to one question about one server."""

    server: str
    check: str
    """`version`, `scripts`, `eviction`, `persistence` or `clock`."""
    verdict: ServerVerdict
    message: str
    """What was found and what to do about it."""

    def __str__(self) -> str:
        return f"{self.server}: {self.check}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a server told about itself; None where it would not."""

    server: str
    info: dict[str, str] | None
    save: str | None
    """The `save` setting: when snapshots are taken; empty for never."""
    skew_ms: int | None
    """The server's clock minus ours."""

    @classmethod
    def read(cls, server: str, info: Any, save: Any, server_time: Any, asked_at: float, answered_at: float) -> Facts:
        """Make facts of the replies to INFO, CONFIG GET save and TIME; an error in place of a reply says nothing."""
        skew_ms = None
        if isinstance(server_time, list):
            now_ms = int(server_time[0]) * 1000 + int(server_time[1]) // 1000
            # Half of a round trip could be anywhere; what may be the network's fault is not blamed on a clock.
            off_ms, slack_ms = now_ms - (asked_at + answered_at) * 500, (answered_at - asked_at) * 500
            skew_ms = round(max(0.0, abs(off_ms) - slack_ms)) * (1 if off_ms > 0 else -1)
        return cls(
            server=server,
            info=parse_info(info) if isinstance(info, bytes) else None,
            save=save[1].decode(errors="replace") if isinstance(save, list) and len(save) > 1 else None,
            skew_ms=skew_ms,
        )


def parse_info(raw: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    pairs = (line.split(":", 1) for line in raw.decode(errors="replace").splitlines() if ":" in line)
    return dict(pairs)


def judge_facts(facts: Facts) -> list[ServerFinding]:
    """Answer all questions from what is known."""
    info = facts.info or {}
    answers = (
        ("version", _judge_version(info)),
        ("scripts", _judge_scripts(info)),
        ("eviction", _judge_eviction(info)),
        ("persistence", _judge_persistence(info, facts.save)),
        ("clock", _judge_clock(facts.skew_ms)),
    )
    return [ServerFinding(facts.server, check, verdict, message) for check, (verdict, message) in answers]


# One question each --------------------------------------------------------------------------------------------------

_Answer = tuple[ServerVerdict, str]


def _judge_version(info: dict[str, str]) -> _Answer:
    name, version, text = _version(info)
    if not version:
        return ServerVerdict.CANNOT_TELL, "the server does not report its version (INFO)"
    # Valkey tells which Redis it is compatible with; that is what our scripts need to know.
    if _numbers(info.get("redis_version", ""))[:2] < OLDEST_REDIS:
        return ServerVerdict.REFUSED, f"{name} {text} is too old; bullpen needs Redis 6.2 or newer, or any Valkey"
    return ServerVerdict.GOOD, f"{name} {text}"


def _judge_scripts(info: dict[str, str]) -> _Answer:
    name, version, text = _version(info)
    if not version:
        return ServerVerdict.CANNOT_TELL, "the server does not report its version (INFO)"
    closed = _SCRIPT_HOLE_CLOSED[name]
    line = version[:2]
    if line > max(closed) or (line in closed and version[2:3] >= (closed[line],)):
        return ServerVerdict.GOOD, "no known hole in the script sandbox"
    safe = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in sorted(closed.items()))
    return ServerVerdict.WARNING, (
        f"{name} {text} has a known hole: a user who may run scripts can take over the server (CVE-2025-49844). "
        f"Upgrade (first fixed releases: {safe}), unless your distribution has patched its package"
    )


def _judge_eviction(info: dict[str, str]) -> _Answer:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return ServerVerdict.CANNOT_TELL, "the server does not report its eviction policy (INFO)"
    if policy == "noeviction":
        return ServerVerdict.GOOD, "nothing is evicted (noeviction)"
    return ServerVerdict.WARNING, (
        f"maxmemory-policy is {policy}: when memory runs out, the server deletes jobs. "
        "Set `maxmemory-policy noeviction`"
    )


def _judge_persistence(info: dict[str, str], save: str | None) -> _Answer:
    if info.get("aof_enabled") == "1":
        return ServerVerdict.GOOD, "append-only file is on"
    if save:
        return ServerVerdict.GOOD, f"snapshots are on (save {save}); jobs since the last one are lost in a crash"
    if save is None or "aof_enabled" not in info:
        return ServerVerdict.CANNOT_TELL, "the server does not report whether it keeps data on disk (CONFIG GET save)"
    return ServerVerdict.WARNING, (
        "neither append-only file nor snapshots are on: a restart of the server loses all jobs. Set `appendonly yes`"
    )


def judge_replicas(info: dict[str, str], least: Any, *, expects_some: bool) -> _Answer | None:
    """Which level of `add` outlives a failover here: any replica may be promoted, also the one that lags."""
    if not info.get("connected_slaves", "").isdigit():
        return None
    count = int(info["connected_slaves"])
    if not count:
        if not expects_some:
            return None
        return ServerVerdict.WARNING, (
            "no replica is connected: when this server dies, no other server can take over, and level replicated(n) "
            "is never reached. Start one, or check why it lost its primary"
        )
    level = f"Durability.replicated({count})"
    wanted = int(least[1]) if isinstance(least, list) and len(least) == 2 else 0
    if 0 < wanted < count:
        return ServerVerdict.WARNING, (
            f"min-replicas-to-write is {wanted} and there are {count} replicas: data that only {wanted} of them has "
            f"is lost when another is promoted. Add with `{level}` data that must survive a failover"
        )
    return ServerVerdict.GOOD, f"{count} connected; jobs added with {level} survive a failover to any of them"


def _judge_clock(skew_ms: int | None) -> _Answer:
    if skew_ms is None:
        return ServerVerdict.CANNOT_TELL, "the server does not report its time (TIME)"
    if abs(skew_ms) <= LARGE_SKEW_MS:
        return ServerVerdict.GOOD, "the clocks agree"
    return ServerVerdict.WARNING, (
        f"the server's clock is {abs(skew_ms) / 1000:.1f} s {'ahead of' if skew_ms > 0 else 'behind'} this machine's. "
        "Jobs follow the server's; times that you compute here will differ. Run NTP on both"
    )


def _version(info: dict[str, str]) -> tuple[str, tuple[int, ...], str]:
    """(name, numbers, text); no numbers when it is not told."""
    for name in ("valkey", "redis"):
        text = info.get(f"{name}_version")
        if text:
            return name, _numbers(text), text
    return "redis", (), ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
