"""The least that a Redis user needs who works with queues.

In: prefix and queue names. Out: one rule for ACL SETUSER. The commands of our scripts are read from the scripts, so the
rule cannot fall behind them; the others stand here. The suite of the queue runs as such a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Final

from bullpen._kernel.duration import check_texts
from bullpen.errors import require
from bullpen.wire.keys import DEFAULT_PREFIX, QueueKeys
from bullpen.wire.scripts import SCRIPTS

__all__ = ["acl_rule"]

_IN_SCRIPTS: Final = re.compile(rb"redis\.p?call\(\s*[\"'](\w+)[\"']")
_DIRECT: Final = frozenset(
    (
        # opening a connection, first look at the server, health
        *("ping", "select", "client|setname", "info", "time"),
        # scripts
        *("eval", "evalsha"),
        # waiting: for jobs (and ending that wait), for events
        *("bzpopmin", "client|id", "client|unblock", "xread", "xrange", "xrevrange"),
        # reading and administration, one command at a time
        *(
            "exists",
            "get",
            "pttl",
            "hget",
            "hgetall",
            "hmget",
            "hexists",
            "hlen",
            "hset",
            "llen",
            "lpos",
            "lrange",
            "scard",
        ),
        *(
            "xtrim",
            "zcard",
            "zcount",
            "zmscore",
            "zrange",
            "zlexcount",
            "zrank",
            "zscore",
            "unlink",
            "scan",
            "hscan",
            "sscan",
            "zscan",
        ),
        # records beside a queue that end by themselves: who did what to letters, letters of a tenant, users of a queue
        *("expire", "zremrangebyscore"),
    )
)
_SUBCOMMANDS: Final = {"xinfo": "xinfo|stream"}
_CLUSTER: Final = frozenset(("cluster|slots",))
_INSPECTION: Final = frozenset(("client|list",))
"""Not CONFIG GET: whoever may ask for a setting may ask for `requirepass`, the password of the default user."""
_DURABILITY: Final = frozenset(("getrange", "wait", "waitaof"))


def acl_rule(
    prefix: str = DEFAULT_PREFIX,
    *,
    queues: Iterable[str] = (),
    cluster: bool = False,
    inspection: bool = False,
    durability: bool = False,
) -> str:
    """What stands behind `ACL SETUSER <name> on ><password>`.

    `queues` limits the user to these queues and their dead letters; without them it has all queues of the prefix.
    `cluster` adds what a cluster needs. `inspection` adds what tells people who works on a queue (`CLIENT LIST`,
    which shows the addresses of all clients of the server). `durability` adds what the levels above memory need;
    servers before 7.2 do not know one of these commands.
    """
    queues = check_texts("queues", queues)
    for option, name in (("prefix", prefix), *(("queues", name) for name in queues)):
        # A rule is words: what follows a blank would be a rule of its own, such as `nopass`.
        require(option, name.isprintable() and len(f"x{name}x".split()) == 1, "a name without spaces", name)
    keys = [QueueKeys(prefix, name) for name in queues]
    names = [name for queue in keys for name in (queue.base, QueueKeys(prefix, queue.dead_letter_name()).base)]
    patterns = [f"~{_literal(base)}*" for base in names or [f"{prefix}:"]]
    commands = set(_DIRECT | _of_scripts())
    for is_wanted, more in ((cluster, _CLUSTER), (inspection, _INSPECTION), (durability, _DURABILITY)):
        commands |= more if is_wanted else frozenset()
    return " ".join(["resetkeys", *patterns, "resetchannels", "-@all", *(f"+{name}" for name in sorted(commands))])


@cache
def _of_scripts() -> frozenset[str]:
    found = {name.decode().lower() for script in SCRIPTS.values() for name in _IN_SCRIPTS.findall(script.body)}
    return frozenset(_SUBCOMMANDS.get(name, name) for name in found)


def _literal(text: str) -> str:
    """Text that a key pattern takes as it stands."""
    return "".join(f"\\{character}" if character in "*?[]^\\" else character for character in text)
