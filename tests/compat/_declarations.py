"""What npm `bullmq` exports, read from its type declarations.

In: the package's folder of `.d.ts` files. Out: its exported names, each with its public members.
"""

from __future__ import annotations

import re
from pathlib import Path

_DECLARED = re.compile(
    r"^export (?:declare )?(?:abstract )?(class|interface|enum|type|const|let|function) (\w+)", re.MULTILINE
)
_MEMBER = re.compile(
    r"^(?:(?:readonly|static|abstract|async|get|set|public|override) )*(?:'([^']+)'|(\w+))\??(?=\s*[(<:=;,]|\s*$)"
)
_HIDDEN = re.compile(r"^(?:private|protected)\b")


def exported(package: Path) -> dict[str, tuple[str, ...]]:
    """Every exported name, with the members of what has any: classes, interfaces, enumerations, object types."""
    found: dict[str, tuple[str, ...]] = {}
    for file in _reached(package / "dist" / "esm" / "index.d.ts"):
        text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", "", text)
        for names in re.findall(r"^export \{([^}]*)\} from", text, re.MULTILINE):
            found |= {name.strip(): () for name in names.split(",") if name.strip()}
        for match in _DECLARED.finditer(text):
            kind, name = match.groups()
            has_members = kind in ("class", "interface", "enum", "type")
            body = _body(text, match.end(), kind) if has_members else ""
            members = _members(body, "," if kind == "enum" else ";")
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *members)))
    return found


def _reached(index: Path) -> list[Path]:
    """The files that an index leads to, by `export * from`."""
    files = [index]
    for file in files:
        for target in re.findall(r"export \* from '([^']+)'", file.read_text()):
            path = (file.parent / target).resolve()
            found = path / "index.d.ts" if path.is_dir() else path.with_name(f"{path.name}.d.ts")
            if found not in files:
                files.append(found)
    return files


def _body(text: str, start: int, kind: str) -> str:
    """What stands in the braces of a declaration; of an object type all braces of its outer level."""
    if kind != "type":
        opened = _first_brace(text, start)
        return text[opened + 1 : _end(text, opened)]
    parts, position = [], start
    while (opened := text.find("{", position)) >= 0 and opened < _statement_end(text, start):
        closed = _end(text, opened)
        parts.append(text[opened + 1 : closed])
        position = closed + 1
    return "\n".join(parts)


def _first_brace(text: str, start: int) -> int:
    """The brace of the body: those inside of type parameters come before it."""
    depth = 0
    for place in range(start, len(text)):
        letter = text[place]
        if letter == "<":
            depth += 1
        elif letter == ">" and text[place - 1] != "=":
            depth -= 1
        elif letter == "{" and depth == 0:
            return place
    raise ValueError(f"no body behind {text[start - 40 : start]!r}")


def _end(text: str, opened: int) -> int:
    depth = 0
    for place in range(opened, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError("a brace is never closed")


def _statement_end(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[place], 0)
        if text[place] == ";" and depth == 0:
            return place
    return len(text)


def _members(body: str, separator: str) -> tuple[str, ...]:
    found: list[str] = []
    depth, statement = 0, ""
    for letter in body:
        if letter == separator and depth == 0:
            found += _member(statement)
            statement = ""
            continue
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(letter, 0)
        statement += letter
    return tuple(dict.fromkeys((*found, *_member(statement))))


def _member(statement: str) -> list[str]:
    text = " ".join(statement.split())
    match = None if _HIDDEN.match(text) else _MEMBER.match(text)
    name = None if match is None else match[1] or match[2]
    return [name] if name and not name.startswith("_") else []
