"""Which server and prefix a queue uses that was given none.

Settings and the embedded server stand above the queue and are unknown to it: the façade fills a slot here on first use.
"""

from __future__ import annotations

from collections.abc import Callable

from bullpen.errors import InvalidOption, NotConfigured
from bullpen.redis.address import URL_FORMS
from bullpen.redis.client import Connection
from bullpen.wire.keys import DEFAULT_PREFIX

Resolver = Callable[[str | None], Connection]
_resolver: Resolver | None = None
_configured_prefix: Callable[[], str] | None = None


def set_resolver(resolver: Resolver, *, prefix: Callable[[], str] | None = None) -> None:
    """Filled by the façade: how to find a server when none was given, how to read `embedded://`, and the prefix to
    use."""
    global _resolver, _configured_prefix
    _resolver, _configured_prefix = resolver, prefix


def prefix_for(given: str | None) -> str:
    """The prefix a queue or worker was given, else the configured one: the command line must look where programs
    write."""
    if given is not None:
        return given
    return DEFAULT_PREFIX if _configured_prefix is None else _configured_prefix()


def connection_for(given: str | Connection | None, *keys: str) -> Connection:
    """The connection a queue or worker was given, or the default one. On a cluster its `keys` must share a slot."""
    connection = _connection_for(given)
    connection.require_one_slot(*keys)
    return connection


def _connection_for(given: str | Connection | None) -> Connection:
    if isinstance(given, Connection):
        return given
    if given is not None and not isinstance(given, str):
        raise InvalidOption("connection", f"a Connection or a URL ({URL_FORMS})", given)
    if given is None or given.startswith("embedded:"):
        if _resolver is None:
            raise NotConfigured(
                'no connection given. Pass connection="redis://host:6379", or import Queue from `bullpen` instead of '
                "`bullpen.queue` to use the settings or the embedded server"
            )
        return _resolver(given)
    return Connection(given)
