"""Read recipients from CSV: good lines are saved, bad ones are told with their number and the reason.

In: lines of a file with a header. Out: how many were saved, and one problem per bad line; a bad line never keeps a good
one out. Columns: `id`, `zone`, `channel`, `address` (needed), `name`, `locale`, `tenant_id`, one per kind of occasion
(`birthday`, with `birthday.send_at` for a time of its own), and `attributes.<name>` for values of templates.
Elsewhere: saving (`recipients`), the command with its progress bar (`bullpen messages recipients import`).
"""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

from bullpen._kernel.duration import check_many
from bullpen.errors import InvalidOption
from bullpen.messages.calendar import read_date, read_time
from bullpen.messages.occasions import Occasions
from bullpen.messages.recipients import BATCH, Occasion, Recipient, Recipients

__all__ = ["ImportArguments", "Imported", "LineProblem", "import_csv", "read_csv"]

_PLAIN: Final = ("id", "zone", "channel", "address", "name", "locale", "tenant_id")
_NEEDED: Final = ("id", "zone", "address")
_MAX_FIELD: Final = 100_000


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A line that was not saved."""

    line: int
    """As an editor counts; the header is line 1."""
    reason: str


@dataclass(slots=True)
class Imported:
    """How an import went."""

    saved: int = 0
    problems: list[LineProblem] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return self.saved + len(self.problems)


def read_csv(
    lines: Iterable[str], occasions: Occasions, *, channel: str | None = None, tenant_id: str | None = None
) -> Iterator[tuple[int, Recipient | LineProblem]]:
    """Line numbers with a checked recipient, or why there is none.

    `channel` and `tenant_id` hold where a line has none. Raises InvalidOption for a header that cannot be used.
    """
    check_many("lines", lines, "an open file or a list of lines")
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader(_without_nul(lines), strict=True)
    header = _header(reader, occasions, needs_channel=channel is None)
    seen: set[tuple[str, str]] = set()
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num, LineProblem(reader.line_num, f"no CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        number = reader.line_num
        try:
            if len(cells) != len(header):
                raise InvalidOption("line", f"{len(header)} columns", len(cells))
            given = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
            recipient = _recipient(given, occasions, channel or "", tenant_id or "")
            if recipient.key in seen:
                raise InvalidOption("id", "each recipient once", recipient.id)
        except InvalidOption as error:
            yield number, LineProblem(number, str(error))
            continue
        seen.add(recipient.key)
        yield number, recipient


class ImportArguments(TypedDict, total=False):
    """What an import takes besides the lines."""

    channel: str | None
    tenant_id: str | None
    dry_run: bool
    on_progress: Callable[[Imported], object] | None


async def import_csv(
    recipients: Recipients,
    lines: Iterable[str],
    occasions: Occasions,
    *,
    channel: str | None = None,
    tenant_id: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[Imported], object] | None = None,
) -> Imported:
    """Save what can be saved, in batches. Running it again with the same file changes nothing."""
    result = Imported()
    found = _reachable(recipients, read_csv(lines, occasions, channel=channel, tenant_id=tenant_id))
    async for batch in _batches(found, result):
        if not dry_run:
            await recipients.save_many(batch)
        result.saved += len(batch)
        if on_progress is not None:
            on_progress(result)
    return result


def _reachable(
    recipients: Recipients, found: Iterator[tuple[int, Recipient | LineProblem]]
) -> Iterator[tuple[int, Recipient | LineProblem]]:
    """The same, with the lines as problems whose address their channel cannot reach."""
    for number, one in found:
        expected = None if isinstance(one, LineProblem) else recipients.why_not(one)
        if expected is None or isinstance(one, LineProblem):
            yield number, one
        else:
            yield number, LineProblem(number, str(InvalidOption("address", expected, one.address)))


async def _batches(
    found: Iterator[tuple[int, Recipient | LineProblem]], result: Imported
) -> AsyncIterator[list[Recipient]]:
    batch: list[Recipient] = []
    for _, one in found:
        if isinstance(one, LineProblem):
            result.problems.append(one)
            continue
        batch.append(one)
        if len(batch) == BATCH:
            yield batch
            batch = []
    yield batch


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    """A NUL would end the reading; as another character it is refused with its line."""
    for number, line in enumerate(lines):
        text = line.removeprefix("\ufeff") if number == 0 else line
        yield text.replace("\0", "\x01")


def _header(reader: Any, occasions: Occasions, *, needs_channel: bool) -> list[str]:
    try:
        header = [name.strip().lower() for name in next(reader)]
    except (StopIteration, csv.Error) as error:
        raise InvalidOption("file", "a CSV file with a header line", str(error)) from None
    for name in header:
        kind, _, rest = name.partition(".")
        known = name in _PLAIN or (kind == "attributes" and rest) or (kind in occasions and rest in ("", "send_at"))
        if not known:
            columns = ", ".join((*_PLAIN, *occasions.names, "attributes.<name>"))
            raise InvalidOption("column", f"one of {columns}", name)
        if header.count(name) > 1:
            raise InvalidOption("column", "each column once", name)
    for name in (*_NEEDED, *(["channel"] if needs_channel else [])):
        if name not in header:
            raise InvalidOption("file", f"a column {name!r}", header)
    return header


def _recipient(given: dict[str, str], occasions: Occasions, channel: str, tenant_id: str) -> Recipient:
    dates = {
        kind: Occasion(
            read_date(kind, text),
            send_at=read_time(f"{kind}.send_at", at) if (at := given.get(f"{kind}.send_at")) else None,
        )
        for kind in occasions.names
        if (text := given.get(kind))
    }
    return Recipient(
        id=given["id"],
        zone=given["zone"],
        channel=given.get("channel") or channel,
        address=given["address"],
        name=given.get("name", ""),
        locale=given.get("locale", ""),
        tenant_id=given.get("tenant_id") or tenant_id,
        attributes={
            name.partition(".")[2]: value for name, value in given.items() if name.startswith("attributes.") and value
        },
        occasions=dates,
    )
