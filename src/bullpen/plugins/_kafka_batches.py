"""What a Kafka broker sends, made safe for the driver: one record that cannot be decoded never stops its partition.

In: the bytes of a fetch, which are batches of records as their producers wrote them. Out: the same bytes; a batch that
the driver cannot decode is written anew, with every record that can be read, and with the header `UNREADABLE_HEADER` on
the others. Raised in the driver, such a record stops its partition at its offset for good, and takes with it what was
fetched of others. Brokers look at the frame of a batch, never at names of headers, and not all of them at what is
compressed. No I/O. Elsewhere: where fetches are (`_kafka`), what becomes of such a record (`transports.kafka`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from aiokafka import codec as codecs
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

__all__ = ["UNREADABLE_HEADER", "readable_fetch"]

UNREADABLE_HEADER: Final = "x-bullpen-unreadable"
_OVERHEAD: Final = 12
"""Offset and length, in front of every batch."""
_MAGIC_AT, _ATTRIBUTES_AT = 16, 21
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_CODECS: Final = {
    1: (codecs.has_gzip, codecs.gzip_decode),
    2: (codecs.has_snappy, codecs.snappy_decode),
    3: (codecs.has_lz4, codecs.lz4_decode),
    4: (codecs.has_zstd, codecs.zstd_decode),
}
_LOG_APPEND_TIME: Final = 8
_LONGEST_REASON: Final = 200


class _Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class _UnreadableBatch(ValueError):
    """Why this cannot be decoded."""


def readable_fetch(fetched: bytes) -> bytes:
    """The bytes, or others in their place that the driver can decode."""
    if _can_be_read(fetched):
        return fetched
    return b"".join(batch if _can_be_read(batch) else _readable_batch(batch) for batch in _batches(fetched))


def _can_be_read(raw: bytes) -> bool:
    try:
        batches = MemoryRecords(raw)
        while batches.has_next():
            batch = batches.next_batch()
            if not batch.validate_crc():
                return False
            for _ in batch:
                pass
    except Exception:  # noqa: BLE001 - that the driver raises at all is the question
        return False
    return True


def _batches(fetched: bytes) -> Iterator[bytes]:
    """Each batch, and in the end what was cut off."""
    at = 0
    while at + _OVERHEAD <= len(fetched):
        (size,) = struct.unpack_from(">i", fetched, at + 8)
        end = at + _OVERHEAD + size
        if size <= 0 or end > len(fetched):
            break
        yield fetched[at:end]
        at = end
    yield fetched[at:]


def _readable_batch(raw: bytes) -> bytes:
    if len(raw) < _OVERHEAD:
        return raw
    (offset,) = struct.unpack_from(">q", raw)
    if len(raw) < _HEADER.size or raw[_MAGIC_AT] < 2:
        return _written(offset, [_bad(offset, 0, "a message of an old format")])
    has_library, _ = _CODECS.get(raw[_ATTRIBUTES_AT + 1] & 7, (codecs.has_gzip, None))
    if not has_library():
        return raw  # nobody's bad record: the driver says which library is missing
    return _written(offset, list(_records(raw)))


def _records(raw: bytes) -> Iterator[_Record]:
    """Every record of a batch; what cannot be told apart any more is one record at the end."""
    base, *_, attributes, delta, first_ms, max_ms, _, _, _, count = _HEADER.unpack_from(raw)
    last, offset = base + max(0, delta), base - 1
    try:
        body, at = _body(raw), 0
        while offset < last and count > 0:
            size, start = _number(body, at)
            at, count = start + size, count - 1
            if size <= 0 or at > len(body):
                raise _UnreadableBatch(f"a record of {size} bytes but {len(body) - start} are left")
            try:
                record = _record(body[start:at], base, first_ms)
                if not offset < record.offset <= last:
                    raise _UnreadableBatch(f"offset {record.offset} outside of its batch")
            except ValueError as error:
                record = _bad(offset + 1, first_ms, str(error))
            offset = record.offset
            yield record._replace(timestamp=max_ms) if attributes & _LOG_APPEND_TIME else record
        if count or at != len(body):
            raise _UnreadableBatch(f"{count} records too many, {len(body) - at} bytes behind the last")
    except Exception as error:  # noqa: BLE001 - a codec may raise anything
        if offset < last:
            reason = str(error) if isinstance(error, _UnreadableBatch) else f"{type(error).__name__}: {error}"
            yield _bad(last, max_ms, f"offsets {offset + 1} to {last}: {reason}")


def _body(raw: bytes) -> bytes:
    if not DefaultRecordBatch(raw).validate_crc():
        raise _UnreadableBatch("the checksum is wrong")
    codec = raw[_ATTRIBUTES_AT + 1] & 7
    if not codec:
        return raw[_HEADER.size :]
    if codec not in _CODECS:
        raise _UnreadableBatch(f"compressed with the unknown codec {codec}")
    _, decode = _CODECS[codec]
    return bytes(decode(raw[_HEADER.size :]))


def _record(raw: bytes, base: int, first_ms: int) -> _Record:
    """Raises ValueError; a header whose name is no text is named with question marks and told."""
    delta_ms, at = _number(raw, 1)
    delta, at = _number(raw, at)
    key, at = _bytes(raw, at)
    value, at = _bytes(raw, at)
    count, at = _number(raw, at)
    if not 0 <= count <= len(raw):
        raise _UnreadableBatch(f"{count} headers")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, at = _bytes(raw, at)
        content, at = _bytes(raw, at)
        try:
            headers.append(((name or b"").decode(), content))
        except UnicodeDecodeError as error:
            headers.append(((name or b"").decode("utf-8", "replace"), content))
            headers.append((UNREADABLE_HEADER, f"the name of a header: {error}"[:_LONGEST_REASON].encode()))
    if at != len(raw):
        raise _UnreadableBatch(f"{len(raw) - at} bytes behind the last header")
    return _Record(base + delta, first_ms + delta_ms, key, value, headers)


def _bad(offset: int, timestamp: int, reason: str) -> _Record:
    return _Record(offset, timestamp, None, None, [(UNREADABLE_HEADER, reason[:_LONGEST_REASON].encode())])


def _bytes(raw: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _number(raw, at)
    if size < 0:
        return None, at
    if at + size > len(raw):
        raise _UnreadableBatch(f"a field of {size} bytes where {len(raw) - at} are left")
    return raw[at : at + size], at + size


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """A signed number in groups of seven bits, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        value |= (raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise _UnreadableBatch("a number without an end")


def _written(base: int, records: list[_Record]) -> bytes:
    builder: Any = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 2**31 - 1)
    for one in records:
        timestamp = min(max(0, one.timestamp), 2**53)
        builder.append(one.offset - base, timestamp, one.key, one.value, one.headers)
    raw = builder.build()
    struct.pack_into(">q", raw, 0, base)  # not covered by the checksum
    return bytes(raw)
