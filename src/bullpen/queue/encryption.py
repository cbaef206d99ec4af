"""The keys of a codec: AES-256-GCM, a new random nonce for each payload.

In: plain bytes and what they belong to. Out: nonce (12 bytes), ciphertext and tag (16 bytes) in one piece; and back.
The only module that imports `cryptography`. Elsewhere: where the result goes (`bullpen.queue.codec`).
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

from bullpen.errors import InvalidOption, MissingExtra
from bullpen.wire.envelope import is_key_id

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:
    raise MissingExtra("encryption", "encrypted job data") from error

__all__ = ["KeyRing", "WrongTag"]

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12


class WrongTag(Exception):
    """The bytes are not what was encrypted with this key for this purpose."""


class KeyRing:
    """The keys that this process knows. One encrypts, all decrypt."""

    def __init__(self, keys: Mapping[str, bytes | str], current: str | None = None) -> None:
        if not isinstance(keys, Mapping) or not keys:
            raise InvalidOption("keys", "a mapping of key ids to keys, with at least one", type(keys).__name__)
        self._ciphers = {_check_id(key_id): AESGCM(_read_key(key_id, key)) for key_id, key in keys.items()}
        self.current = next(iter(self._ciphers)) if current is None else current
        if self.current not in self._ciphers:
            raise InvalidOption("current", f"one of the key ids {', '.join(self._ciphers)}", current)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._ciphers)})"

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._ciphers

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._ciphers)

    def encrypt(self, plain: bytes, associated: bytes) -> bytes:
        """With the current key."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._ciphers[self.current].encrypt(nonce, plain, associated)

    def decrypt(self, key_id: str, box: bytes, associated: bytes) -> bytes:
        """Raises WrongTag; KeyError when there is no such key."""
        try:
            return self._ciphers[key_id].decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], associated)
        except (InvalidTag, ValueError):  # a nonce that is too short is a ValueError
            raise WrongTag from None


def _check_id(key_id: Any) -> str:
    if not is_key_id(key_id):
        raise InvalidOption("keys", "key ids of letters, digits, '.', '_' and '-', at most 64", key_id)
    return str(key_id)


def _read_key(key_id: str, key: Any) -> bytes:
    """32 bytes as they are or as base64. Errors never show the key."""
    raw = key
    if isinstance(key, str):
        try:
            raw = b64decode(key, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
    if not isinstance(raw, bytes) or len(raw) != KEY_BYTES:
        raise InvalidOption(f"key {key_id!r}", f"{KEY_BYTES} random bytes, or the same as base64", "***")
    return raw
