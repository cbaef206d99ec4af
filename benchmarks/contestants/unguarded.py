"""Our scripts without what protects them, to measure what the protection costs. Never for real work.

Left out: the record that lets a call be repeated after a lost reply, and the look for pending children before a batch
of completions. What the protocol itself demands (locks, events, markers) stays.
"""

import functools
import hashlib
import re

from bullpen.wire.scripts import SCRIPTS, Script

_RECORD_IS_WRITTEN = re.compile(r'redis\.p?call\("SET", call_key, .*?call_ttl_ms\)', re.DOTALL)
_CHILDREN_ARE_SOUGHT = re.compile(r'seldom_keys\[#seldom_keys \+ 1\] = job_key \.\. ":dependencies"')
_FAILED_CHILDREN_ARE_SOUGHT = re.compile(r'seldom_keys\[#seldom_keys \+ 1\] = job_key \.\. ":unsuccessful"')


@functools.cache  # once: a second time nothing would be left to take out
def replace_scripts() -> None:
    """From now on this process works without a net."""
    SCRIPTS["add"] = _changed(SCRIPTS["add"], (_RECORD_IS_WRITTEN, ""))
    SCRIPTS["exchange"] = _changed(
        SCRIPTS["exchange"],
        (_RECORD_IS_WRITTEN, ""),
        (_CHILDREN_ARE_SOUGHT, ""),
        (_FAILED_CHILDREN_ARE_SOUGHT, ""),
    )


def _changed(script: Script, *changes: tuple[re.Pattern[str], str]) -> Script:
    body = script.body.decode()
    for pattern, replacement in changes:
        body, found = pattern.subn(replacement, body)
        if found != 1:
            raise SystemExit(f"{script.name}.lua has {found} places like {pattern.pattern!r}; this file must follow it")
    changed = Script(script.name, script.keys, script.args)
    object.__setattr__(changed, "body", body.encode())
    object.__setattr__(changed, "sha1", hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest().encode())
    return changed
