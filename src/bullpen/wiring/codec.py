"""The codec of an application, from its settings.

In: the section `codec`. Out: a `Codec`, or None when nothing is configured. Elsewhere: what it does
(`bullpen.queue.codec`), the stores (`bullpen.plugins.objects`).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from bullpen.ports.objects import ObjectStore
from bullpen.queue.codec import Codec
from bullpen.settings import CodecSettings, Settings

__all__ = ["make_codec"]


def make_codec(settings: Settings) -> Codec | None:
    """The configured codec. Nothing is opened yet. Raises InvalidOption, or MissingExtra."""
    chosen = settings.codec
    if chosen.keys is None and chosen.store is None:
        return None
    return Codec(
        None if chosen.keys is None else chosen.key_ring,
        store=None if chosen.store is None else _store(chosen.store, chosen),
        above=chosen.above,
        max_bytes=chosen.max_bytes,
        refuse_plain=chosen.refuse_plain,
    )


def _store(address: str, chosen: CodecSettings) -> ObjectStore:
    parts = urlsplit(address)
    if parts.scheme == "file":
        from bullpen.plugins.objects.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    from bullpen.plugins.objects.s3 import S3Store

    return S3Store(parts.netloc, prefix=parts.path.strip("/"), endpoint=chosen.s3_endpoint, region=chosen.s3_region)
