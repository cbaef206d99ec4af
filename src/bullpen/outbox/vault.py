"""What an endpoint keeps secret, as a row may hold it: its signing secrets and the headers that are sent along.

In: secrets in the clear, and perhaps a codec. Out: text for the row, which only the same endpoint opens, and back. With
keys in the codec it is encrypted; without, it is JSON. No I/O. Elsewhere: the cipher (`bullpen.queue.codec`), the row
(`bullpen.ledger.endpoints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from bullpen._kernel import json
from bullpen.errors import PayloadTampered, PayloadUnavailable
from bullpen.ledger import EndpointRow
from bullpen.queue.codec import Codec
from bullpen.wire.envelope import SEALED, Envelope, NoEnvelope

__all__ = ["Secret", "Vault"]


@dataclass(frozen=True, slots=True)
class Secret:
    """A key that messages are signed with."""

    key: str = field(repr=False)
    until: datetime | None = None
    """When it stops to be used; None: it is the current one."""


class Vault:
    """Seals and opens. `codec` None, or one without keys: nothing is encrypted."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec

    def seal_secrets(self, secrets: Sequence[Secret], endpoint_id: str, tenant_id: str) -> str:
        plain = [
            {"key": each.key, **({} if each.until is None else {"until": int(each.until.timestamp() * 1000)})}
            for each in secrets
        ]
        return self._seal(plain, _owner(endpoint_id, tenant_id))

    def seal_headers(self, headers: Mapping[str, str], endpoint_id: str, tenant_id: str) -> str | None:
        return self._seal(dict(headers), _owner(endpoint_id, tenant_id)) if headers else None

    def secrets_of(self, row: EndpointRow) -> list[Secret]:
        """Those that sign now, the current one first. Raises PayloadUnavailable or PayloadTampered."""
        opened = [
            Secret(each["key"], None if "until" not in each else datetime.fromtimestamp(each["until"] / 1000, UTC))
            for each in self._open(row.secrets, row)
        ]
        return [secret for secret in opened if secret.until is None or secret.until > row.read_at]

    def headers_of(self, row: EndpointRow) -> dict[str, str]:
        """Raises PayloadUnavailable or PayloadTampered."""
        return {} if row.headers is None else dict(self._open(row.headers, row))

    def is_current(self, row: EndpointRow) -> bool:
        """Whether all is stored as it would be now: with the current key, or in the clear where there is none."""
        current = None if self._codec is None else self._codec.current_key
        return all(_key_of(stored) == current for stored in (row.secrets, row.headers) if stored is not None)

    def _seal(self, value: Any, owner: str) -> str:
        plain = msgspec.json.encode(value)
        key_id, box = (None, plain) if self._codec is None else self._codec.encrypt(plain, "endpoint", owner)
        return plain.decode() if key_id is None else Envelope(owner, key_id, box).to_bytes().decode()

    def _open(self, stored: str, row: EndpointRow) -> Any:
        what, raw = f"the secrets of endpoint {row.id}", stored.encode()
        if not raw.startswith(SEALED):
            if self._codec is not None and self._codec.refuse_plain:
                raise PayloadTampered(what, "they are not encrypted, and the codec here refuses that")
            return json.decode(raw)
        try:
            envelope = Envelope.parse(raw)
        except NoEnvelope as error:
            raise PayloadTampered(what, f"they cannot be read: {error}") from None
        if envelope.queue != _owner(row.id, row.tenant_id) or envelope.box is None:
            raise PayloadTampered(what, "they were sealed for another endpoint")
        if self._codec is None:
            raise PayloadUnavailable(what, f"{envelope}; there is no codec here", key_id=envelope.key_id)
        return json.decode(self._codec.decrypt(envelope, envelope.box, "endpoint", what))


def _owner(endpoint_id: str, tenant_id: str) -> str:
    """Whose it is: bound into what is sealed, so that it opens in no other row."""
    return f"endpoint/{endpoint_id}/{tenant_id}"


def _key_of(stored: str) -> str | None:
    """The name of the key that it is encrypted with; None: it is in the clear, empty: it cannot be read."""
    raw = stored.encode()
    if not raw.startswith(SEALED):
        return None
    try:
        return Envelope.parse(raw).key_id
    except NoEnvelope:
        return ""
