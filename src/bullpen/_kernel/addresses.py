"""Show an address without what is secret in it.

In: the address of a server as somebody wrote it, perhaps wrong. Out: what people need of it. By a list of what may be
shown, not of what must not: a driver that knows one more parameter for a password changes nothing here.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = "***"
_SHOWN: Final = frozenset(
    (
        *("db", "database", "dbname", "tls", "ssl", "sslmode", "verify", "ca", "cert", "sslrootcert", "host", "port"),
        *("tlsverifycert", "tlscafile", "heartbeat", "timeout", "connect_timeout", "connection_timeout", "name"),
        *("application_name", "user", "username", "sentinel_username", "options", "target_session_attrs"),
        *("nodepreference", "discoveryinterval", "maxdiscoverattempts", "gossiptimeout", "keepaliveinterval"),
        *("keepalivetimeout", "appendfsync", "defaultdeadline", "connectionname", "mode", "cache", "uri"),
    )
)
"""Parameters that say where and how, and never who."""
_is_port = re.compile(r"[0-9]{1,5}").fullmatch


def show_address(address: object) -> str:
    """The address, or several separated by commas: scheme, user, hosts, path and harmless parameters."""
    return ",".join(map(_show_one, re.split(r",(?=\s*[a-zA-Z][a-zA-Z0-9+.-]*://)", str(address))))


def hide_path(url: str) -> str:
    """An address of the web for people: scheme and host. Many carry their secret in the path or the query."""
    scheme, mark, rest = url.partition("://")
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    return f"{scheme}{mark}{authority.rpartition('@')[2]}/…"


def _show_one(address: str) -> str:
    scheme, mark, rest = address.partition("://")
    if not mark:
        # Not an address: whatever it is, a password may be in it.
        return address if re.fullmatch(r"[\w./-]*(?::[0-9]{1,5})?", address) else _HIDDEN
    # The last @ before the parameters: a password with a slash in it is a mistake, and must not be shown either.
    before, _, parameters = rest.partition("?")
    if "@" in parameters and "@" not in before and not _names_a_host(before):
        before, parameters = rest, ""  # an unquoted `?` in the password
    user, at, place = before.rpartition("@")
    place = place.partition("#")[0]
    name, colon, _ = user.partition(":")
    shown = f"{name}{colon}{_HIDDEN if colon else ''}{at}"
    if at and not colon and not _is_plain(name):
        shown = f"{_HIDDEN}@"
    return f"{scheme}{mark}{shown}{place}" + (f"?{_show_parameters(parameters)}" if parameters else "")


def _names_a_host(text: str) -> bool:
    return all(":" not in host or _is_port(host.rpartition(":")[2]) for host in text.partition("/")[0].split(","))


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[\w.%-]{1,64}", name) is not None


def _show_parameters(text: str) -> str:
    shown = []
    for parameter in text.partition("#")[0].split("&"):
        name, _, value = parameter.partition("=")
        is_shown = name.lower() in _SHOWN and "@" not in value and ":" not in value
        shown.append(parameter if is_shown else f"{name}={_HIDDEN}" if _is_plain(name) else _HIDDEN)
    return "&".join(shown)
