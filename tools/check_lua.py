"""Run luacheck on every Lua script as the server gets it, and report the lines of the files it was made from.

A file of `lua/lib/` alone would be full of names that it does not define, and a script alone of names it does not know;
only the whole says whether every name is bound. A function of `lib/` that one script does not call is no finding.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bullpen.wire.scripts import SCRIPTS, assemble

ROOT = Path(__file__).resolve().parent.parent
LUA = ROOT / "src" / "bullpen" / "wire" / "lua"
FINDING = re.compile(r"^stdin:(?P<line>\d+):\d+: \((?P<code>\w+)\) (?P<text>.*)$")
UNUSED = {"W211"}


def findings(name: str) -> Iterator[str]:
    origins = list(assemble(name))
    body = "\n".join(line for _, _, line in origins)
    command = ["luacheck", "--config", str(ROOT / ".luacheckrc"), "--formatter", "plain", "--codes", "--no-cache", "-"]
    answer = subprocess.run(command, input=body, capture_output=True, text=True, check=False)
    for report in answer.stdout.splitlines():
        match = FINDING.match(report)
        if match is None:
            yield f"{name}: {report}"
            continue
        file, line, _ = origins[int(match["line"]) - 1]
        if not (match["code"] in UNUSED and file.startswith("lib/")):
            yield f"{LUA.relative_to(ROOT)}/{file}.lua:{line}: ({match['code']}) {match['text']}"


def main() -> int:
    # A fault in lib/ shows up in every script that includes it: say it once.
    found = sorted({finding for name in SCRIPTS for finding in findings(name)})
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
