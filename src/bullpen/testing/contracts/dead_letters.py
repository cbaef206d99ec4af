"""What every store of dead letters promises, as tests. Subclass `DeadLetterContract` and give it a `letters` fixture.

    class TestMyStore(DeadLetterContract):
        @pytest.fixture
        async def letters(self) -> AsyncIterator[DeadLetterHarness]: ...

The suite knows the port; making work fail for good, and seeing it come back, the harness plays. `TransportLetters` is
the harness of every transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

import pytest

from bullpen._kernel.outcome import Cause, Completed, Failed
from bullpen.errors import DeadLetterChanged, DeadLetterNotFound, InvalidOption
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterStore, EditableDeadLetters
from bullpen.ports.edits import make_edit
from bullpen.ports.transport import Deliveries, Transport
from bullpen.testing.contracts.transport import an_event, nothing_comes, take

__all__ = ["DeadLetterContract", "DeadLetterHarness", "TransportLetters"]


class DeadLetterHarness(Protocol):
    """What the suite asks of a store's surroundings."""

    redrives_once: bool
    """Two redrives at the same time send the work once. Where store and work are not one system it may be twice, with
    the same identity."""

    @property
    def store(self) -> DeadLetterStore:
        """The store, empty when the test begins."""
        ...

    async def bury(self, number: int) -> None:
        """Let work fail for good: its payload holds the number, its error is `no <number>`."""
        ...

    def number_of(self, letter: DeadLetter) -> int:
        """The number in a letter's payload."""
        ...

    async def came_back(self) -> tuple[str, int]:
        """Wait for work that was sent back, finish it, and tell its identity and number."""
        ...

    async def nothing_comes(self) -> None:
        """Fail if more work comes back."""
        ...


class DeadLetterContract:
    """List, get, put, redrive, discard, depth; each may be repeated, at any time and by many."""

    @pytest.mark.requirement("X-5", "X-6")
    async def test_letters_are_listed_oldest_first_and_in_pages(self, letters: DeadLetterHarness) -> None:
        for number in range(5):
            await letters.bury(number)

        listed = await letters.store.list()
        pages = [await letters.store.list(start=start, count=2) for start in (0, 2, 4, 6)]

        assert [letters.number_of(letter) for letter in listed] == [0, 1, 2, 3, 4]
        assert [letter.error_message for letter in listed] == [f"no {number}" for number in range(5)]
        assert [letter for page in pages for letter in page] == listed
        assert [len(page) for page in pages] == [2, 2, 1, 0]
        assert await letters.store.depth() == 5
        assert len({letter.id for letter in listed}) == 5

    @pytest.mark.requirement("X-5", "X-6")
    async def test_one_letter_tells_what_the_list_tells(self, letters: DeadLetterHarness) -> None:
        await letters.bury(7)
        (listed,) = await letters.store.list()

        found = await letters.store.get(listed.id)

        assert found == listed
        assert all((found.message_id, found.source, found.name))
        assert found.failed_at.endswith("Z")
        assert found.attempts_made >= 1
        assert found.entry

    @pytest.mark.requirement("X-5")
    async def test_a_letter_that_nobody_has_is_told_as_such(self, letters: DeadLetterHarness) -> None:
        await letters.bury(1)

        assert await letters.store.get("dl-unknown-1") is None
        assert not await letters.store.discard("dl-unknown-1")
        with pytest.raises(DeadLetterNotFound) as refused:
            await letters.store.redrive("dl-unknown-1")
        assert refused.value.entry_id == "dl-unknown-1"
        assert refused.value.store == letters.store.name
        assert await letters.store.depth() == 1

    @pytest.mark.requirement("X-5", "X-40")
    async def test_redriving_sends_the_work_back_once(self, letters: DeadLetterHarness) -> None:
        await letters.bury(1)
        await letters.bury(2)
        first, second = await letters.store.list()

        sent = await letters.store.redrive(first.id, by="ada")

        assert await letters.came_back() == (sent, 1)
        assert sent == first.message_id
        assert await letters.store.get(first.id) is None
        assert [letter.id for letter in await letters.store.list()] == [second.id]
        with pytest.raises(DeadLetterNotFound):
            await letters.store.redrive(first.id, by="ada")
        assert not await letters.store.discard(first.id)
        await letters.nothing_comes()

    @pytest.mark.requirement("X-5", "X-40")
    async def test_two_that_redrive_the_same_letter_do_no_harm(self, letters: DeadLetterHarness) -> None:
        await letters.bury(1)
        (letter,) = await letters.store.list()

        answers = await asyncio.gather(
            *(letters.store.redrive(letter.id, by=name) for name in ("ada", "bob", "eve")), return_exceptions=True
        )

        sent = {answer for answer in answers if isinstance(answer, str)}
        refused = [answer for answer in answers if not isinstance(answer, str)]
        assert sent == {letter.message_id}
        assert all(isinstance(error, DeadLetterNotFound) for error in refused), refused
        assert await letters.came_back() == (letter.message_id, 1)
        if letters.redrives_once:
            await letters.nothing_comes()
        assert await letters.store.depth() == 0

    @pytest.mark.requirement("X-5", "X-40")
    async def test_discarding_is_for_good(self, letters: DeadLetterHarness) -> None:
        for number in range(3):
            await letters.bury(number)
        before = await letters.store.list()

        assert await letters.store.discard(before[1].id)

        assert not await letters.store.discard(before[1].id)
        assert await letters.store.get(before[1].id) is None
        with pytest.raises(DeadLetterNotFound):
            await letters.store.redrive(before[1].id)
        assert [letter.id for letter in await letters.store.list()] == [before[0].id, before[2].id]
        assert await letters.store.depth() == 2
        await letters.nothing_comes()

    @pytest.mark.requirement("X-5", "X-119")
    async def test_a_letter_that_is_put_twice_is_there_once(self, letters: DeadLetterHarness) -> None:
        """A crash between writing the letter and settling the work repeats the writing."""
        await letters.bury(1)
        (letter,) = await letters.store.list()

        await letters.store.put(letter)

        assert [(one.id, one.failed_at) for one in await letters.store.list()] == [(letter.id, letter.failed_at)]
        assert await letters.store.depth() == 1

    @pytest.mark.requirement("X-6", "X-23")
    async def test_a_letter_that_is_put_belongs_to_the_tenant_it_names(self, letters: DeadLetterHarness) -> None:
        """Also one that was made elsewhere and whose entry does not: else its tenant would not see it, and neither
        would a redrive that is limited to that tenant. Work that failed carries its tenant in its data as well."""
        await letters.bury(1)
        (letter,) = await letters.store.list()
        await letters.store.discard(letter.id)

        data = {**letter.data, "tenantId": "acme"} if isinstance(letter.data, dict) else letter.data
        entry = {name: value for name, value in letter.entry.items() if name != "tenantId"}
        await letters.store.put(replace(letter, tenant_id="acme", data=data, entry=entry))

        (kept,) = await letters.store.list()
        assert kept.tenant_id == "acme"

    @pytest.mark.requirement("X-40")
    async def test_an_edited_letter_goes_back_once_with_its_new_payload(self, letters: DeadLetterHarness) -> None:
        """What failed because of its payload fails again as it is: somebody mends it, and it keeps its identity."""
        store = letters.store
        if not isinstance(store, EditableDeadLetters):
            pytest.skip("this store cannot edit a payload")
        await letters.bury(41)
        (letter,) = await store.list()
        edit = make_edit(letter.data, data=_with_number(letter.data, 41, 42), why="typo of the form")

        sent = await store.redrive_edited(letter.id, edit, by="ada")

        assert await letters.came_back() == (sent, 42)
        assert await store.depth() == 0
        for repeated in (store.redrive_edited(letter.id, edit, by="ada"), store.redrive(letter.id, by="ada")):
            with pytest.raises(DeadLetterNotFound):
                await repeated
        await letters.nothing_comes()

    @pytest.mark.requirement("X-40")
    async def test_of_two_that_edit_one_letter_one_is_told_that_it_is_gone(self, letters: DeadLetterHarness) -> None:
        """Where store and work are not one system both may be sent, with one identity; nothing is lost."""
        store = letters.store
        if not isinstance(store, EditableDeadLetters):
            pytest.skip("this store cannot edit a payload")
        await letters.bury(41)
        (letter,) = await store.list()
        edits = [make_edit(letter.data, data=_with_number(letter.data, 41, number)) for number in (42, 43, 44)]

        answers = await asyncio.gather(
            *(store.redrive_edited(letter.id, edit, by="ada") for edit in edits), return_exceptions=True
        )

        sent = [42 + index for index, answer in enumerate(answers) if isinstance(answer, str)]
        refused = [answer for answer in answers if not isinstance(answer, str)]
        assert all(isinstance(error, DeadLetterNotFound) for error in refused), answers
        assert (await letters.came_back())[1] in sent
        assert await store.depth() == 0
        if letters.redrives_once:
            assert len(sent) == 1
            await letters.nothing_comes()

    @pytest.mark.requirement("X-40")
    async def test_an_edit_of_another_payload_is_refused(self, letters: DeadLetterHarness) -> None:
        """Somebody edited what an earlier page showed; nobody may lose what is there now."""
        store = letters.store
        if not isinstance(store, EditableDeadLetters):
            pytest.skip("this store cannot edit a payload")
        await letters.bury(41)
        (letter,) = await store.list()
        stale = make_edit(_with_number(letter.data, 41, 40), data=_with_number(letter.data, 41, 42))

        with pytest.raises(DeadLetterChanged, match="read it again"):
            await store.redrive_edited(letter.id, stale, by="ada")

        assert await store.get(letter.id) == letter
        await letters.nothing_comes()

    @pytest.mark.requirement("X-5")
    async def test_pages_are_newest_first_and_hide_none_while_others_come_and_go(
        self, letters: DeadLetterHarness
    ) -> None:
        """Somebody turns pages while work goes on to fail, and somebody else tidies up."""
        for number in range(6):
            await letters.bury(number)

        first = await letters.store.page(limit=2)
        assert [letters.number_of(letter) for letter in first.letters] == [5, 4]
        await letters.bury(6)
        await letters.store.discard(first.letters[1].id)  # the one that the cursor names
        second = await letters.store.page(after=first.next, limit=2)
        third = await letters.store.page(after=second.next, limit=2)

        assert [letters.number_of(letter) for letter in (*second.letters, *third.letters)] == [3, 2, 1, 0]
        assert third.next is None
        newest = await letters.store.page(limit=1)
        assert letters.number_of(newest.letters[0]) == 6

    async def test_what_is_asked_for_is_found(self, letters: DeadLetterHarness) -> None:
        for number in range(4):
            await letters.bury(number)
        newest = (await letters.store.page(limit=1)).letters[0]
        assert newest.failed_ms is not None
        later = datetime.fromtimestamp(newest.failed_ms / 1000 + 60, UTC)

        async def numbers(where: DeadLetterFilter) -> list[int]:
            return [letters.number_of(letter) for letter in (await letters.store.page(where)).letters]

        assert await numbers(DeadLetterFilter(error="NO 2")) == [2]
        assert await numbers(DeadLetterFilter(name=newest.name, failed_before=later)) == [3, 2, 1, 0]
        assert await numbers(DeadLetterFilter(failed_after=later)) == []
        assert await numbers(DeadLetterFilter(name="another")) == []
        assert await numbers(DeadLetterFilter(tenant_id="nobody")) == []
        assert await numbers(DeadLetterFilter(fingerprint="0" * 12)) == []
        with pytest.raises(InvalidOption, match="after"):
            await letters.store.page(after="nonsense")

    @pytest.mark.requirement("X-5")
    async def test_failures_of_one_cause_are_one_group(self, letters: DeadLetterHarness) -> None:
        """Whatever number they name; and what is redriven or discarded no longer counts."""
        for number in range(4):
            await letters.bury(number)

        (group,) = await letters.store.groups()
        found = await letters.store.page(DeadLetterFilter(fingerprint=group.fingerprint))
        assert (group.count, group.store) == (4, letters.store.name)
        assert [letters.number_of(letter) for letter in found.letters] == [3, 2, 1, 0]
        newest, oldest = found.letters[0], found.letters[-1]
        assert (group.name, group.first_at, group.last_at) == (newest.name, oldest.failed_at, newest.failed_at)
        assert "no " in group.error  # with or without the type of the error, which not every store knows
        await letters.store.discard(newest.id)
        await letters.store.redrive(oldest.id)
        (left,) = await letters.store.groups()
        assert (left.fingerprint, left.count) == (group.fingerprint, 2)
        await letters.came_back()

        assert await letters.store.groups(tenant_id="nobody") == []

    @pytest.mark.requirement("X-40", "X-41")
    async def test_many_are_acted_on_by_ids_or_filter_and_it_is_noted_once(self, letters: DeadLetterHarness) -> None:
        """The console and every store: a dry run touches nothing, a limit takes the oldest, what is gone is named."""
        noted: list[tuple[str, str, Any]] = []

        async def audit(action: str, store: str, letter: DeadLetter | None, by: str, detail: Mapping[str, Any]) -> None:
            assert letter is None
            noted.append((action, by, detail["count"]))

        for number in range(5):
            await letters.bury(number)
        console, store = DeadLetterConsole([letters.store], audit=audit), letters.store.name
        newest = (await letters.store.page(limit=1)).letters[0]

        dry = await console.redrive_many(by="ada", store=store, dry_run=True)
        some = await console.discard_many(DeadLetterFilter(error="no"), by="ada", store=store, limit=2)
        named = await console.redrive_many(by="ada", store=store, ids=[newest.id, "dl-none-1"], rate=1_000)

        assert (dry.matched, dry.done, dry.is_dry_run) == (5, 0, True)
        assert (some.matched, some.done, some.skipped) == (2, 2, ())
        assert (named.matched, named.done, [entry for entry, _ in named.skipped]) == (1, 1, ["dl-none-1"])
        left = [letters.number_of(letter) for letter in (await letters.store.page()).letters]
        assert left == [3, 2]
        assert noted == [("discard", "ada", 2), ("redrive", "ada", 1)]
        assert (await letters.came_back())[1] == 4


def _with_number(data: Any, old: int, new: int) -> Any:
    """The same payload with another number, wherever the harness has put it."""
    match data:
        case dict():
            return {name: _with_number(value, old, new) for name, value in data.items()}
        case int() if data == old:
            return new
        case str() if data == str(old):
            return str(new)
    return data


class TransportLetters:
    """The dead letters of one source of any transport."""

    redrives_once = False

    def __init__(self, transport: Transport[Any], source: str, deliveries: Deliveries) -> None:
        self.store = transport.dead_letters(source)
        self._transport, self._source, self._deliveries = transport, source, deliveries

    async def bury(self, number: int) -> None:
        # One urn: a transport that keeps order per entity has one partition of letters then, which is read in order.
        await self._transport.publish(an_event(self._source, number, urn="urn:order:same"))
        await self._transport.settle(await take(self._deliveries), Failed(f"no {number}", "", Cause.PERMANENT))

    def number_of(self, letter: DeadLetter) -> int:
        return int(letter.data["payload"]["number"])

    async def came_back(self) -> tuple[str, int]:
        delivery = await take(self._deliveries)
        payload: Any = delivery.payload
        assert delivery.attempt == 1
        await self._transport.settle(delivery, Completed(b"null"))
        return delivery.id, int(payload["number"])

    async def nothing_comes(self) -> None:
        await nothing_comes(self._deliveries, for_s=0.2)
