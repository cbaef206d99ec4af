"""Our client of Redis: where a server is, a socket to it, and script calls that may be repeated."""

from bullpen.redis.client import Connection
from bullpen.redis.default import connection_for, set_resolver

__all__ = ["Connection", "connection_for", "set_resolver"]
