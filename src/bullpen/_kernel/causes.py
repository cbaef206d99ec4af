"""What makes two failures one cause: a fingerprint of an error. No input or output here.

In: where the work came from, its name, the error's text, its code and its stack. Out: twelve signs, the same for
failures of the same kind, and the text without what varies between them. What varies: ids, numbers, times, addresses,
values in quotes. What does not: a status or an error number, and the name of a field.
Elsewhere: the records that are compared (`bullpen.ports.dead_letters`).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["LONGEST_SAMPLE", "cause_of", "fingerprint_of"]

LONGEST_SAMPLE: Final = 200
_LONGEST: Final = 500
"""Of an error's first line: what is further behind tells two causes apart no better."""

_KEPT: Final = r"""
    (?P<code> \b(?: https? (?:/\d(?:\.\d)?)? | status | code | errno | error | sqlstate | exit | signal | ora )
        [\s=:#\[(-]* (?:status|code)? [\s=:#\[(-]* \d{1,5} \b )
  | (?P<alone> ^ ['"][a-z_][a-z_.\ -]{0,60}['"] $ )
  | (?P<field> (?: \b(?: keyerror | attributeerror | key | field | column | attribute | argument | parameter | property
        | option | variable | table | relation | constraint | index | module | class | method | function | type | name
        | object | header ) [\s=:]* ) (?: '[a-z_][a-z_.\ -]{0,60}' | "[a-z_][a-z_.\ -]{0,60}" ) )
"""
_VARYING: Final = r"""
    (?P<varying> \b[\w.+-]{1,64}@[\w-]{1,63}\.[\w.]{1,63} | 0x[0-9a-f]+ | '[^']*' | "[^"]*"
        | \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b | \b[0-9a-f]{16,}\b | \b(?=[a-z0-9]*\d[a-z]+\d)[a-z0-9]{8,}\b
        | (?: (?<![a-z\d])\d | (?<=[a-z])\d{4} ) [\d.:TZ+-]* )
"""
_PARTS: Final = re.compile(f"{_KEPT} | {_VARYING}", re.IGNORECASE | re.VERBOSE)
_SPACE: Final = re.compile(r"\s+")
_SEPARATOR: Final = re.compile(r"[/\\]")
_FRAME: Final = re.compile(
    r'^\s+(?:File "(?P<python>[^"]+)", line \d+, in (?P<name>\S+)|at (?P<called>[^\s(]+) \((?P<node>[^)]+?)(?::\d+)*\))'
)
_CLASS: Final = re.compile(r"([A-Za-z_][\w.]*)(?:: |$)")
_FOREIGN: Final = ("site-packages", "dist-packages", "/lib/python", "node_modules", "node:", "<frozen", "/bullpen/")


def cause_of(message: str) -> str:
    """The first line of an error without what varies between two failures of one cause."""
    return _SPACE.sub(" ", _PARTS.sub(lambda found: "#" if found["varying"] else found[0], _first_line(message)))


def fingerprint_of(source: str, name: str, message: str, *, code: str = "", stack: str = "") -> str:
    """Twelve signs: the same for failures of the same kind."""
    told = "\0".join((source, name, code, cause_of(message), *_place_of(stack, _first_line(message))))
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def _first_line(text: str) -> str:
    return next(filter(None, map(str.strip, text.splitlines())), "")[:_LONGEST]


def _place_of(stack: str, message: str) -> tuple[str, str]:
    """The class of the error, and the frame of own code that is nearest to it. Without its line, which moves with every
    release."""
    kind, place = "", ""
    for line in stack.splitlines():
        if frame := _FRAME.match(line):
            file = frame["python"] or frame["node"]
            if any(part in file for part in _FOREIGN) or (frame["node"] and place):
                continue  # Node names the nearest frame first, Python last
            place = f"{_SEPARATOR.split(file)[-1]}:{frame['name'] or frame['called']}"
        elif (found := _CLASS.match(line)) and line[found.end() :].startswith(message[:50]):
            kind = found[1].rpartition(".")[2]
    return kind, place
