"""Errors as people may read them: one line, bounded, without secrets and without stacks.

In: the text of an error, whoever wrote it. Out: a line that may stand in a row, an API's answer or a page. The whole
text with its stack stays where only operators look: in the job and its dead letter.
"""

from __future__ import annotations

import re
from typing import Any, Final

_SECRETS: Final = (
    (re.compile(r"(?<=://)[^/@\s]+@"), "***@"),
    (re.compile(r"(?i)\b((?:password|passwd|secret|token|api[-_]?key|signature)\s*[=:]\s*)[^\s&,;]+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}"), r"\1 ***"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=]+"), "whsec_***"),
    (re.compile(r"\b(sk|pk|rk|ghp|xox[abprs])([-_])[A-Za-z0-9_-]{8,}"), r"\1\2***"),
    (re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+\.[A-Za-z0-9.-]+"), "***@***"),
)
_is_secret_name = re.compile(
    r"(?i)(password|passwd|secret|token|api[-_]?key|authorization|cookie|credential|private[-_]?key)"
).search
_STACK: Final = "Traceback (most recent call last)"
_HIDDEN: Final = "***"


def scrub(text: str) -> str:
    """A reason as a row may keep it: one line, without credentials and mail addresses."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return " ".join(text.split())


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
            for pattern, instead in _SECRETS[:-1]:  # mail addresses are data here
                value = pattern.sub(instead, value)
            return value
    return value
