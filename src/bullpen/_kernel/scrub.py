"""Take secrets and personal data out of error texts before they are stored, logged or shown.

In: the text of an error, whoever wrote it. Out: the same text with stars in their place, for jobs and dead letters;
or a line of it that may stand in a row, an API's answer or a page, without the stack. It knows forms, not meanings:
credentials in addresses, `password=…` and its relatives, tokens of well-known shapes, mail addresses, numbers of
telephones and cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple


class _Form(NamedTuple):
    """How one kind of secret looks."""

    hints: tuple[str, ...]
    """A text without any of these, in small letters, holds no such secret. Nearly no text has one, and to look for
    them all takes a thirtieth of the time of the patterns. None reaches over the end of a line: see `is_clean`."""
    pattern: re.Pattern[str]
    instead: str


# Every repetition is bounded or ends at its first other character: the text may come from somebody hostile.
_SECRETS: Final = (
    _Form(("@",), re.compile(r"(?<=://)[^/@\s]{1,200}@"), "***@"),
    _Form(
        (
            *("passw", "pwd", "secret", "token", "signature", "apikey", "api-key", "api_key", "api key"),
            *("accesskey", "access-key", "access_key"),
        ),
        re.compile(
            r"(?i)((?:password|passwd|pwd|secret|token|api[-_ ]?key|access[-_]?key|signature)"
            r"[\"']?\s{0,5}[=:]\s{0,5}[\"']?)[^\s&,;\"']+"
        ),
        r"\1***",
    ),
    _Form(("bearer", "basic"), re.compile(r"(?i)\b(bearer|basic)\s{1,5}[a-z0-9._~+/=-]{8,}"), r"\1 ***"),
    _Form(("eyj",), re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), "***"),
    _Form(("whsec_", "akia"), re.compile(r"\b(whsec_|AKIA)[A-Za-z0-9+/=]+"), r"\1***"),
    _Form(
        ("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "ghp", "xox"),
        re.compile(r"\b(sk|pk|rk|ghp|xox[abprs])([-_])[A-Za-z0-9_-]{8,}"),
        r"\1\2***",
    ),
    # What must not stand before the plus is looked at after it: to search for one character is quick.
    _Form(("+",), re.compile(r"\+(?<![\w+]\+)[1-9][0-9]{7,14}(?![0-9])"), "+***"),
    _Form(("@",), re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}"), "***@***"),
)
_HINTS: Final = tuple(dict.fromkeys(hint for form in _SECRETS for hint in form.hints))
_CARD: Final = re.compile(r"\d(?<![\d.-]\d)(?:[ -]?\d){12,18}(?![\d.-])")
# Without its spaces and dashes, a card's number is at least so many digits in a row.
_DIGITS: Final = bytes(ord("0") if c in b"0123456789" else ord(".") for c in range(256))
_CARD_DIGITS: Final = b"0" * 13
_is_secret_name = re.compile(
    r"(?i)(password|passwd|secret|token|api[-_]?key|authorization|cookie|credential|private[-_]?key)"
).search
_STACK: Final = "Traceback (most recent call last)"
_HIDDEN: Final = "***"


def scrub(text: str) -> str:
    """A reason as a row may keep it: one line, without credentials and mail addresses."""
    return " ".join(scrub_lines(text).split())


def scrub_lines(text: str) -> str:
    """The same text, line breaks and all, without credentials, tokens, mail addresses, telephone and card numbers.

    Scrubbing it again changes nothing.
    """
    folded = _fold(text)
    for hints, pattern, instead in _SECRETS:
        for hint in hints:
            if hint in folded:
                text = pattern.sub(instead, text)
                break
    return _CARD.sub(_hide_card, text) if _may_hold_card(text) else text


def scrub_around(text: str, ids: Iterable[str]) -> str:
    """As `scrub_lines`, but these values stay: ids are no secrets, however much one looks like a card's number."""
    scrubbed = scrub_lines(text)
    if scrubbed == text:
        return text
    # Only those that would be hidden themselves: around any other, such as "1", a secret could be cut in two.
    kept = [value for value in dict.fromkeys(ids) if value in text and scrub_lines(value) != value]
    if not kept:
        return scrubbed
    anyone = "|".join(re.escape(value) for value in sorted(kept, key=len, reverse=True))
    pieces = re.split(rf"((?<!\w)(?:{anyone})(?!\w))", text)
    return "".join(piece if place % 2 else scrub_lines(piece) for place, piece in enumerate(pieces))


def is_clean(text: str) -> bool:
    """True when scrubbing would find nothing: neither here nor in a text that is made of such lines, so that nobody
    need ask again for a line that he knows. False: `scrub_lines` has to look."""
    if not text.isascii():
        return False  # what is stored of it may differ, and letters and digits of other scripts need the patterns
    folded = text.lower()
    for hint in _HINTS:
        if hint in folded:
            return False
    return not _may_hold_card(text)


def summary(text: str, limit: int = 500) -> str:
    """What a person needs of an error: its first line, scrubbed; of a stack the line that says what it was."""
    lines = [line.strip() for line in text.replace("\0", " ").splitlines() if line.strip()]
    if not lines:
        return "unknown error"
    line = scrub(lines[-1] if _STACK in text else lines[0])
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def hide_secrets(value: Any) -> Any:
    """The same JSON value with what looks like a secret replaced: by the name of its field, or by its form."""
    match value:
        case dict():
            return {
                name: _HIDDEN if _is_secret_name(str(name)) and item is not None else hide_secrets(item)
                for name, item in value.items()
            }
        case list():
            return [hide_secrets(item) for item in value]
        case str():
            for _, pattern, instead in _SECRETS[:-1]:  # mail addresses are data here
                value = pattern.sub(instead, value)
            return value
    return value


def _fold(text: str) -> str:
    """In small letters, and with the three that a pattern takes for `i` or `s` in spite of their look."""
    folded = text.lower()
    if text.isascii():
        return folded
    return folded.replace("i\N{COMBINING DOT ABOVE}", "i").replace("ı", "i").replace("ſ", "s")


def _may_hold_card(text: str) -> bool:
    # Patterns know the digits of all scripts.
    return not text.isascii() or _CARD_DIGITS in text.encode().translate(_DIGITS, b" -")


def _hide_card(found: re.Match[str]) -> str:
    """Long numbers are mostly ids and instants; only those with a card's check digit are hidden."""
    digits = [int(character) for character in found[0] if character.isdecimal()]
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return _HIDDEN if total % 10 == 0 and any(digits) else found[0]
