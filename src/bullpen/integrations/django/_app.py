"""The app of a Django project: made from its settings, or named by them, with Django's connections looked after."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from bullpen.app import Bullpen
from bullpen.integrations.django._connections import check_connections, check_connections_of_async_code
from bullpen.integrations.django._options import ledger_url, options
from bullpen.settings import Settings

__all__ = ["app"]


def _make() -> Bullpen:
    wanted = options()
    made = Bullpen(settings=_settings()) if wanted.app is None else _named(wanted.app)
    if wanted.outbox is not None:
        made.use_outbox()
    made.middleware(check_connections_of_async_code, batches=True)
    made.middleware(check_connections, batches=True)
    return made


def _settings() -> Settings:
    wanted = options()
    given: dict[str, Any] = {}
    if wanted.redis_url is not None:
        given["redis_url"] = wanted.redis_url
    if wanted.prefix is not None:
        given["redis_prefix"] = wanted.prefix
    if wanted.outbox is not None:
        given["ledger_url"] = ledger_url(settings.DATABASES[wanted.outbox])
    return Settings.load(**given)


def _named(where: str) -> Bullpen:
    module, _, name = where.partition(":")
    found = getattr(import_module(module), name or "app", None)
    if not isinstance(found, Bullpen):
        raise ImproperlyConfigured(f"BULLPEN['APP'] is {where!r}, which names no Bullpen; say module:name")
    return found


app: Final = _make()
"""The app of this project."""
