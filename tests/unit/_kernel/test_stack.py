"""A stack is written the quick way, and reads as the standard library would write it."""

from __future__ import annotations

import gc
import linecache
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bullpen._kernel import scrub
from bullpen._kernel.outcome import MAX_TEXT, describe
from bullpen._kernel.stack import MAX_CHAIN, MAX_FRAMES, format_stack, text_of


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Noted(Exception):
    """Notes that cannot be read, or are none."""

    def __init__(self, notes: Any) -> None:
        super().__init__("noted")
        self.__notes__ = notes


class Homeless(Exception):
    __module__ = None  # type: ignore[assignment]  # what generated classes may have


class Inner:
    class Error(Exception):
        pass


def nest(depth: int, error: BaseException) -> None:
    if depth:
        nest(depth - 1, error)
    raise error


def chain(*, cause: bool, hides: bool = False) -> None:
    try:
        nest(2, KeyError("first"))
    except KeyError as first:
        second = ValueError("second")
        if cause:
            raise second from first
        if hides:
            raise second from None
        raise second  # noqa: B904 - a context is meant


def long_chain() -> None:
    error: BaseException = ValueError("0")
    for number in range(1, 10):
        later = ValueError(str(number))
        later.__cause__ = error
        error = later
    raise error


def circle() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


def group(*, nested: bool = False) -> None:
    parts: list[Exception] = [ValueError(f"part {number}") for number in range(MAX_CHAIN + 2)]
    if nested:
        parts = [ExceptionGroup("inner", [OSError("deep"), KeyError("deeper")]), *parts]
    raise ExceptionGroup("outer", parts)


def noted() -> None:
    error = OSError("refused")
    error.add_note("a note\nof two lines")
    raise error


def made_from_text() -> None:
    exec(compile("def made():\n    raise KeyError('x')\nmade()", "<made>", "exec"), {})


def without_source() -> None:
    exec(compile("\n\ndef made():\n    raise KeyError('x')\nmade()", "/nowhere/at all.py", "exec"), {})


def from_template() -> None:
    """Template engines give their compiled code a loader that knows the source."""

    class Loader:
        def get_source(self, name: str) -> str:
            return "{{ first }}\n{{ second }}\n"

    code = compile("\nraise KeyError('x')", "template.html", "exec")
    exec(code, {"__name__": "template", "__loader__": Loader()})


def wrong_syntax() -> None:
    compile("def broken(:\n  pass", "broken.py", "exec")


def wrong_name() -> None:
    lenght = 1
    print(length + lenght)  # type: ignore[name-defined]  # noqa: F821 - newer Pythons propose what was meant


def wrong_attribute() -> None:
    "".jion([])  # type: ignore[attr-defined]


def wrong_import() -> None:
    from collections import OrderedDcit  # type: ignore[attr-defined]  # noqa: F401


def over_lines() -> None:
    int(
        "x" + "y",
    )


def endless() -> None:
    endless()


def raising(kind: type[BaseException], *args: Any) -> Callable[[], None]:
    return lambda: nest(3, kind(*args))


KINDS: dict[str, Callable[[], None]] = {
    "plain": raising(ValueError, "bad"),
    "no text": raising(ValueError),
    "blank text": raising(ValueError, " \n "),
    "lines": raising(ValueError, "one\ntwo\n"),
    "other letters": raising(ValueError, "Größe 日本"),
    "surrogate": raising(ValueError, "a\ud800b"),
    "long text": raising(ValueError, "x" * 30_000),
    "mute": raising(Mute),
    "in a class": raising(Inner.Error, "inner"),
    "without a module": raising(Homeless, "lost"),
    "no exception": raising(SystemExit, 3),
    "secret": raising(RuntimeError, "redis://worker:hunter2@cache refused password=hunter3"),
    "notes": noted,
    "empty notes": raising(Noted, []),
    "wrong notes": raising(Noted, 7),
    "no notes": raising(Noted, None),
    "many frames": lambda: nest(300, ValueError("deeper")),
    "few frames": lambda: nest(MAX_FRAMES - 10, ValueError("shown all")),
    "endless": endless,
    "cause": lambda: chain(cause=True),
    "context": lambda: chain(cause=False),
    "hidden context": lambda: chain(cause=False, hides=True),
    "long chain": long_chain,
    "circle": circle,
    "group": group,
    "nested group": lambda: group(nested=True),
    "made from text": made_from_text,
    "without source": without_source,
    "template": from_template,
    "syntax": wrong_syntax,
    "name": wrong_name,
    "attribute": wrong_attribute,
    "import": wrong_import,
    "over lines": over_lines,
    "unicode": lambda: print(b"\xff".decode()),
    "os": lambda: print(Path("/nowhere/at all").read_text()),
}


def caught(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def told_by_the_library(error: BaseException, depth: int = 0) -> str:
    """The same stack, each part of it from the standard library."""
    text = ""
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and depth < MAX_CHAIN:
        text += told_by_the_library(earlier, depth + 1) + "\nwhich led to:\n\n"
    if error.__traceback__ is not None:
        text += "Traceback (most recent call last):\n"
        for frame, line in list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]:
            # The position of an expression is left out, and with it the markers below.
            summary = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
            linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
            text += "".join(traceback.StackSummary.from_list([summary]).format())
    text += "".join(traceback.format_exception_only(error))
    if isinstance(error, BaseExceptionGroup) and depth < MAX_CHAIN:
        for number, part in enumerate(error.exceptions[:MAX_CHAIN], 1):
            text += f"\npart {number} of {len(error.exceptions)}:\n" + told_by_the_library(part, depth + 1)
    return text


def scrubbed_by_every_pattern(text: str) -> str:
    for _, pattern, instead in scrub._SECRETS:
        text = re.sub(pattern, instead, text)
    return scrub._CARD.sub(scrub._hide_card, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_what_the_library_writes(kind: str) -> None:
    """Twice, because the second time the frames are known."""
    error = caught(KINDS[kind])
    expected = told_by_the_library(error).rstrip()

    for _ in range(2):
        assert format_stack(error, text_of(error))[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_was_scrubbed_even_where_nobody_looked(kind: str) -> None:
    """Frames and texts without a hint are passed over; every pattern together would have found nothing either."""
    error = caught(KINDS[kind])
    whole = told_by_the_library(error).rstrip()[-2 * MAX_TEXT :].encode("utf-8", "backslashreplace").decode()
    expected = scrubbed_by_every_pattern(whole)

    for _ in range(2):
        stack = describe(error)[1]
        assert stack == expected or (len(stack) == MAX_TEXT and stack[1:] == expected[-MAX_TEXT + 1 :])


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4), st.booleans())
def test_chains_of_any_errors_are_what_the_library_writes(kinds: list[str], are_causes: bool) -> None:
    """Secrets in one link are found although the next is clean, and the other way round."""
    errors = [caught(KINDS[kind]) for kind in kinds]
    for earlier, later in pairwise(errors):
        later.__cause__, later.__context__ = (earlier, None) if are_causes else (None, earlier)
        later.__suppress_context__ = are_causes
    expected = told_by_the_library(errors[-1]).rstrip()

    text, is_clean = format_stack(errors[-1], text_of(errors[-1]))

    assert text == expected
    assert not is_clean or scrubbed_by_every_pattern(text) == text


@given(st.text())
@example("\0")
@example("\0\x80")
def test_a_text_that_needs_no_scrubbing_is_stored_as_it_is(text: str) -> None:
    """Both parts of what `describe` answers share one look."""
    error = ValueError(text)

    reason, stack = describe(error)

    whole = f"ValueError: {text}" if text else "ValueError"
    assert stack == scrubbed_by_every_pattern(whole.rstrip().replace("\0", " "))
    assert reason == (scrubbed_by_every_pattern(text.replace("\0", " ")) if text.strip() else "ValueError")


def test_an_error_without_hints_of_secrets_meets_no_pattern_and_no_disk() -> None:
    """That was nearly all that a failed attempt cost. No timing: what is called is looked at. One search for all hints
    together is allowed."""
    error = caught(lambda: nest(3, TimeoutError("order 4711: no answer within 30 s")))
    describe(error)  # the first time its source is read
    called: set[str] = set()

    sys.setprofile(lambda _, event, what: called.add(what.__name__) if event == "c_call" else None)
    try:
        describe(error)
    finally:
        sys.setprofile(None)

    assert "isascii" in called
    assert called.isdisjoint({"sub", "match", "stat", "open"})


def test_equal_functions_of_two_files_are_told_apart() -> None:
    """For Python, code objects that differ only in their file are equal."""
    source = "def made():\n    raise KeyError('x')\nmade()"

    stacks = [
        describe(caught(lambda file=file: exec(compile(source, file, "exec"), {})))[1]  # type: ignore[misc]
        for file in ("<one>", "<two>")
    ]

    assert '"<one>"' in stacks[0] and '"<two>"' in stacks[1]


def test_a_source_that_was_read_again_is_shown_as_it_is_now(tmp_path: Path) -> None:
    """A program that loads its modules anew gets the lines that it runs, once the interpreter's cache has them."""
    file = tmp_path / "handlers.py"
    stacks = []
    for word in ("first", "second, and longer"):
        file.write_text(f"raise KeyError('x')  # {word}\n")
        linecache.checkcache(str(file))
        stacks.append(describe(caught(lambda: exec(compile(file.read_text(), str(file), "exec"), {})))[1])

    assert "# first\n" in stacks[0]
    assert "# second, and longer\n" in stacks[1]


def test_no_frame_and_no_local_outlives_its_error() -> None:
    """What a handler held when it failed may be large, or a connection."""

    class Held:
        pass

    alive: list[weakref.ref[Held]] = []

    def handler() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise ValueError("x")

    describe(caught(handler))

    gc.collect()
    assert alive[0]() is None


def test_what_is_remembered_is_bounded() -> None:
    """Programs that make code at run time never see the same frame twice; and a line of a bundle can be a megabyte."""
    from bullpen._kernel.stack import _known_frame

    for number in range(600):
        describe(caught(lambda n=number: exec(compile("1/0", f"<made {n}>", "exec"), {})))  # type: ignore[misc]
    before = _known_frame.cache_info()
    describe(caught(lambda: exec(compile("1/0", f"<{'x' * 2_000}>", "exec"), {})))
    after = _known_frame.cache_info()

    assert before.currsize == before.maxsize == 512
    assert after.misses <= before.misses + 2  # the two frames of this test, and not the long one
