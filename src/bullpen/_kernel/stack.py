"""Write the stack of an error as the interpreter would, without its price.

In: an error. Out: the text, and whether it is known to hold no secret. A queue whose handlers fail makes one for every
attempt, and nearly all have the same frames, so a frame is written once and remembered. Elsewhere: bounding and
scrubbing the text (`bullpen._kernel.outcome`).
"""

from __future__ import annotations

import linecache
import traceback
from collections import deque
from functools import lru_cache
from types import TracebackType
from typing import Final

from bullpen._kernel.scrub import is_clean

MAX_FRAMES: Final = 40
MAX_CHAIN: Final = 5
"""How many causes, and how many parts of a group, are followed."""

_MOST_REMEMBERED: Final = 1_000
"""Characters of a frame or of an error's text; longer ones are written, and looked at for secrets, each time."""

# Of these the standard library tells more than class and text, in some version of Python at least: the place in a
# source, or what may have been meant.
_TOLD_AT_LENGTH: Final = (SyntaxError, ImportError, NameError, AttributeError, BaseExceptionGroup)


def text_of(error: BaseException) -> str | None:
    """What the error says of itself. None: it cannot."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - user code
        return None


def format_stack(error: BaseException, text: str | None) -> tuple[str, bool]:
    """The stack of an error with this text. True: neither the one nor the other holds a secret; False: look.

    Raises what the error's own methods raise.
    """
    lines: list[str] = []
    clean = _add_error(lines, error, text, 0)
    return "".join(lines).rstrip(), clean


def _add_error(lines: list[str], error: BaseException, text: str | None, depth: int) -> bool:
    """Like `traceback.format_exception` without the markers under the code: finding them parses source for 100 µs.

    True when all that was added is clean.
    """
    clean = True
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and depth < MAX_CHAIN:
        clean = _add_error(lines, earlier, text_of(earlier), depth + 1)
        lines.append("\nwhich led to:\n\n")
    trace = error.__traceback__
    if trace is not None:
        lines.append("Traceback (most recent call last):\n")
        clean = _add_frames(lines, trace) and clean
    words, words_are_clean = _last_words(error, text)
    lines.append(words)
    clean = words_are_clean and clean
    if isinstance(error, BaseExceptionGroup) and depth < MAX_CHAIN:
        for number, part in enumerate(error.exceptions[:MAX_CHAIN], 1):
            lines.append(f"\npart {number} of {len(error.exceptions)}:\n")
            clean = _add_error(lines, part, text_of(part), depth + 1) and clean
    return clean


def _add_frames(lines: list[str], trace: TracebackType | None) -> bool:
    clean = True
    last: deque[TracebackType] = deque(maxlen=MAX_FRAMES)
    while trace is not None:
        last.append(trace)
        trace = trace.tb_next
    for each in last:
        text, text_is_clean = _frame(each)
        lines.append(text)
        clean = text_is_clean and clean
    return clean


def _frame(trace: TracebackType) -> tuple[str, bool]:
    code, line = trace.tb_frame.f_code, trace.tb_lineno
    # Without a look at the disk for each failure: a source that changed since it was read is not the code that runs.
    source = linecache.getline(code.co_filename, line, trace.tb_frame.f_globals)
    if len(source) + len(code.co_filename) > _MOST_REMEMBERED:
        return _write_frame(code.co_filename, line, code.co_name, source)
    return _known_frame(code.co_filename, line, code.co_name, source)


def _write_frame(filename: str, line: int, name: str, source: str) -> tuple[str, bool]:
    text = f'  File "{filename}", line {line}, in {name}\n'
    if source := source.strip():
        text += f"    {source}\n"
    return text, is_clean(text)


# By its text alone, the line of source included: nothing can be out of date, and no frame or module is kept alive.
_known_frame = lru_cache(maxsize=512)(_write_frame)


def _last_words(error: BaseException, text: str | None) -> tuple[str, bool]:
    """What `traceback.format_exception_only` says, which takes 15 µs to do so."""
    kind = type(error)
    module = kind.__module__
    if (
        text is None
        or issubclass(kind, _TOLD_AT_LENGTH)
        or getattr(error, "__notes__", None) is not None
        or type(module) is not str
    ):
        return "".join(traceback.format_exception_only(error)), False
    name = kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"
    words = f"{name}: {text}\n" if text else f"{name}\n"
    return words, len(words) <= _MOST_REMEMBERED and is_clean(words)
