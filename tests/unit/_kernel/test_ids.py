"""Which ids and names are allowed, and how new ones are made."""

from __future__ import annotations

import os
import re
import uuid
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bullpen._kernel.ids import (
    RESERVED,
    check_job_id,
    check_prefix,
    check_queue_name,
    clean_name,
    decode_segment,
    encode_segment,
    keyed_id,
    new_token,
    random_id,
    worker_name,
)
from bullpen.errors import InvalidOption

parts = st.lists(st.text(max_size=5), min_size=1, max_size=3).filter(lambda texts: texts != [""])


@pytest.mark.requirement("Q-2", "X-45")
@pytest.mark.parametrize(
    "job_id", ["payment-789", str(uuid.UUID(int=5)), "a:b:c", "007a", "1.5", "ä", "a b", "x" * 500, "wait2", "urn%3Ax"]
)
def test_ordinary_ids_pass_unchanged(job_id: str) -> None:
    """An id is the caller's; it is checked, never altered."""
    assert check_job_id(job_id) == job_id


@pytest.mark.requirement("X-45")
@pytest.mark.parametrize(
    ("job_id", "expected"),
    [
        ("", "non-empty text"),
        (None, "non-empty text"),
        (7, "non-empty text"),
        (b"x", "non-empty text"),
        ("0", "not a number"),
        ("7", "not a number"),
        ("-1", "not a number"),
        ("+1", "not a number"),
        ("007", "not a number"),
        ("a:b", "no ':' or exactly two"),
        ("urn:order:1:2", "no ':' or exactly two"),
        ("0:a:b", "does not start with '0:'"),
        ("repeat:x:1700000000000", "one of the queue's own keys"),
        ("metrics:completed:data", "one of the queue's own keys"),
        ("de:a:b", "one of the queue's own keys"),
        ("bp:call:x", "one of the queue's own keys"),
        ("a:b:lock", "one of the queue's own keys"),
        ("a\nb", "without line breaks"),
        ("a\x00", "without line breaks"),
        ("\ud800", "lone surrogates"),
        ("x" * 501, "at most 500 characters"),
    ],
)
def test_other_ids_are_refused_with_the_reason(job_id: Any, expected: str) -> None:
    """Node refuses some of these; the others would corrupt a queue or a log."""
    with pytest.raises(InvalidOption) as caught:
        check_job_id(job_id)

    assert caught.value.option == "job_id"
    assert expected in caught.value.expected


@pytest.mark.requirement("X-45")
@pytest.mark.parametrize("word", sorted(RESERVED))
def test_every_reserved_word_is_refused(word: str) -> None:
    """A job with the id `meta` is lost without an error, one with `stalled` breaks the stalled check."""
    with pytest.raises(InvalidOption, match=f"did you mean 'job-{word}'"):
        check_job_id(word)


@pytest.mark.requirement("X-45")
@given(st.text(max_size=600))
def test_an_accepted_id_obeys_the_rules_of_node(text: str) -> None:
    """What passes here passes there: no integer, no or exactly two colons, no `0:` in front."""
    try:
        check_job_id(text)
    except InvalidOption:
        return

    assert not re.fullmatch(r"-?[0-9]+", text)
    assert text.count(":") in (0, 2)
    assert not text.startswith("0:")
    assert text.encode().decode() == text


@pytest.mark.parametrize("name", ["emails", "{orders}", "a.b", "outbox-webhook", "send mail", "ü"])
def test_ordinary_queue_names_pass(name: str) -> None:
    """Braces are a cluster tag and allowed."""
    assert check_queue_name(name) == name


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\x00", None, 5, "\ud800"])
def test_other_queue_names_are_refused(name: Any) -> None:
    """The name is part of every key."""
    with pytest.raises(InvalidOption, match="queue: expected"):
        check_queue_name(name)


def test_a_colon_in_a_queue_name_is_refused_with_a_dash_as_suggestion() -> None:
    """Job keys are split at their last colon, so a name with one cannot be told apart."""
    with pytest.raises(InvalidOption, match="did you mean 'outbox-webhook-t1'"):
        check_queue_name("outbox:webhook:t1")


@pytest.mark.requirement("X-97")
def test_a_prefix_may_be_a_cluster_tag_but_not_end_with_a_colon() -> None:
    """The colon is added by us."""
    assert check_prefix("{bull}") == "{bull}"
    assert check_prefix("app:bull") == "app:bull"

    with pytest.raises(InvalidOption, match="did you mean 'bull'"):
        check_prefix("bull:")


@pytest.mark.parametrize("prefix", ["", " bull", "bu\nll", None, ":"])
def test_other_prefixes_are_refused(prefix: Any) -> None:
    """An empty prefix would put keys where other programs keep theirs."""
    with pytest.raises(InvalidOption, match="prefix: expected"):
        check_prefix(prefix)


@pytest.mark.requirement("X-45")
@given(st.text(), st.text())
def test_encoding_a_segment_can_be_undone_and_keeps_texts_apart(one: str, other: str) -> None:
    """Two urns may never become the same id."""
    assert decode_segment(encode_segment(one)) == one
    assert ":" not in encode_segment(one)
    assert (encode_segment(one) == encode_segment(other)) == (one == other)


@pytest.mark.requirement("X-18", "X-45")
@given(st.lists(st.text(min_size=1, max_size=15), min_size=1, max_size=4))
def test_a_keyed_id_is_an_allowed_id_for_any_parts(parts: list[str]) -> None:
    """Also for urns, numbers and reserved words."""
    assert check_job_id(keyed_id(*parts)) == keyed_id(*parts)


@pytest.mark.requirement("X-18")
@given(parts, parts)
@example(["wait"], ["%77ait"])
@example(["a~b"], ["a", "b"])
@example(["a", ""], ["a"])
def test_different_parts_give_different_keyed_ids(one: list[str], other: list[str]) -> None:
    """("a~b",) and ("a", "b") are two jobs."""
    assert (keyed_id(*one) == keyed_id(*other)) == (one == other)


@pytest.mark.requirement("X-18", "X-45")
@pytest.mark.parametrize(
    ("key", "job_id"),
    [
        (("send-email", "urn:order:1"), "send-email~urn%3Aorder%3A1"),
        (("order-7",), "order-7"),
        (("7",), "%37"),
        (("wait",), "%77ait"),
        (("", "0"), "~0"),
    ],
)
def test_keyed_ids_stay_readable(key: tuple[str, ...], job_id: str) -> None:
    """People look for them in dashboards."""
    assert keyed_id(*key) == job_id


@pytest.mark.requirement("X-18")
def test_very_long_parts_become_a_digest() -> None:
    """The same id again for the same parts, and within the bound."""
    one, other = keyed_id("x" * 501), keyed_id("x" * 502)

    assert one != other
    assert one == keyed_id("x" * 501) == check_job_id(one)


@pytest.mark.parametrize("key", [(), ("",)])
def test_a_keyed_id_needs_a_part(key: tuple[str, ...]) -> None:
    """Without one all jobs would share an id."""
    with pytest.raises(InvalidOption, match="at least one part that is not empty"):
        keyed_id(*key)


@pytest.mark.requirement("X-18", "X-44")
def test_random_ids_are_distinct_within_a_millisecond_and_carry_their_prefix() -> None:
    """Ids ending in the clock collided and jobs vanished."""
    ids = {random_id("idx") for _ in range(2_000)}

    assert len(ids) == 2_000
    assert all(re.fullmatch(r"idx-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", i) for i in ids)
    assert check_job_id(random_id())


@pytest.mark.requirement("Q-11")
def test_a_worker_name_tells_host_process_and_something_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces and colons would break the name of its connection."""
    monkeypatch.setattr("socket.gethostname", lambda: "my host:1")

    names = {worker_name(), worker_name()}

    assert len(names) == 2
    assert all(re.fullmatch(rf"myhost1-{os.getpid()}-[0-9a-f]{{8}}", name) for name in names)


def test_a_host_without_usable_letters_still_gets_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three parts are always there."""
    monkeypatch.setattr("socket.gethostname", lambda: "日本")

    assert worker_name().startswith("host-")


@given(st.text())
def test_a_clean_name_fits_a_connection_name(text: str) -> None:
    """Redis takes printable ASCII without spaces."""
    assert re.fullmatch(r"[!-9;-~]*", clean_name(text))


@pytest.mark.requirement("Q-13")
def test_tokens_are_uuids() -> None:
    """Random, so that nobody else can hold the same."""
    assert uuid.UUID(new_token()).version == 4
