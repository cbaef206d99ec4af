"""Make answers small: compressed for whoever reads that, and left out for whoever has them already.

In: an answer and its request. Out: the answer as it is sent. A page that asks again for its content says what it has,
and gets nothing when nothing changed. Compressing a page that holds a secret beside a text of a stranger would let the
stranger guess the secret by the size: the only secret in our pages, the token of a session, looks different each time
(`guard.masked`).
"""

from __future__ import annotations

import gzip
import hashlib
from typing import Final

from bullpen.dashboard._web import JSON, PageAnswer, PageRequest
from bullpen.dashboard.frame import is_part
from bullpen.dashboard.guard import SAFE_METHODS

__all__ = ["gzipped", "pack", "reads_gzip"]

_LEAST: Final = 500
_LEVEL: Final = 6
_TEXTS: Final = ("text/html", "application/json", "application/problem+json", "text/plain")


def pack(answer: PageAnswer, request: PageRequest) -> PageAnswer:
    """The same answer, shorter."""
    if answer.stream is not None or not answer.content_type.startswith(_TEXTS):
        return answer
    if answer.status == 200 and request.method in SAFE_METHODS and _is_stable(answer, request):
        tag = f'"{hashlib.sha256(answer.body).hexdigest()[:20]}"'
        answer.headers["etag"] = tag
        if request.headers.get("if-none-match") == tag:
            answer.status, answer.body = 304, b""
            return answer
    if len(answer.body) >= _LEAST and reads_gzip(request):
        gzipped(answer, gzip.compress(answer.body, _LEVEL, mtime=0))
    return answer


def gzipped(answer: PageAnswer, body: bytes) -> PageAnswer:
    """The answer with its compressed body."""
    answer.body = body
    answer.headers |= {"content-encoding": "gzip", "vary": "accept-encoding"}
    return answer


def reads_gzip(request: PageRequest) -> bool:
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() in ("gzip", "*") and quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return True
    return False


def _is_stable(answer: PageAnswer, request: PageRequest) -> bool:
    return is_part(request) or answer.content_type.startswith(JSON)
