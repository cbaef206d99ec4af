"""The dictionary `BULLPEN` of Django's settings, checked once.

In: what the project says. Out: one object; a wrong name or value is an `ImproperlyConfigured` that says what is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

__all__ = ["DjangoOptions", "ledger_url", "options"]

_NOT_LIBPQ: Final = frozenset({"assume_role", "isolation_level", "pool", "server_side_binding"})
"""Options of Django's PostgreSQL backend that are none of the database's client."""


@dataclass(frozen=True, slots=True)
class DjangoOptions:
    """`BULLPEN = {...}`: the names of the fields, in capitals."""

    app: str | None = None
    """`module:app` of an app of your own. Unless given, one is made from these values and the settings of bullpen."""
    redis_url: str | None = None
    """Instead of `BULLPEN_REDIS_URL`."""
    prefix: str | None = None
    """First part of all keys."""
    outbox: str | None = None
    """The alias in `DATABASES` whose transactions store jobs and messages. Its tables come with `manage.py migrate`."""
    dashboard_url: str | None = None
    """Where the admin links to."""

    @property
    def database(self) -> str:
        return self.outbox or "default"


@cache
def options() -> DjangoOptions:
    """What the project says."""
    given: Mapping[str, Any] = getattr(settings, "BULLPEN", {})
    names = {name.upper(): name for name in DjangoOptions.__slots__}
    for name, value in given.items():
        if name not in names:
            raise ImproperlyConfigured(f"BULLPEN[{name!r}] is not known; there are {', '.join(sorted(names))}")
        if value is not None and not isinstance(value, str):
            raise ImproperlyConfigured(f"BULLPEN[{name!r}] must be a text, not {value!r}")
    made = DjangoOptions(**{names[name]: value for name, value in given.items()})
    if made.outbox is not None and made.outbox not in settings.DATABASES:
        raise ImproperlyConfigured(f"BULLPEN['OUTBOX'] is {made.outbox!r}, which is no alias in DATABASES")
    if made.app is not None and (made.redis_url or made.prefix):
        raise ImproperlyConfigured("BULLPEN['APP'] is an app with a server of its own: leave out REDIS_URL and PREFIX")
    return made


def ledger_url(database: Mapping[str, Any]) -> str:
    """The address of one of `DATABASES`, as the ledger takes it."""
    engine, name = database["ENGINE"], str(database["NAME"])
    if engine.endswith("sqlite3"):
        return f"sqlite:///{name}"
    if not engine.endswith(("postgresql", "postgis")):
        raise ImproperlyConfigured(f"BULLPEN['OUTBOX'] needs SQLite or PostgreSQL, not {engine}")
    user, password = database.get("USER") or "", database.get("PASSWORD") or ""
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    host, port = database.get("HOST") or "", str(database.get("PORT") or "")
    wanted = {key: str(value) for key, value in database.get("OPTIONS", {}).items() if key not in _NOT_LIBPQ}
    if host.startswith("/"):  # a directory of sockets
        wanted["host"], host = host, ""
    where = f"{login}@{host}" if login else host
    query = f"?{urlencode(wanted)}" if wanted else ""
    return f"postgresql://{where}{f':{port}' if port else ''}/{quote(name, safe='')}{query}"
