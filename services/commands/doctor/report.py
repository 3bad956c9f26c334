"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["ok", "BAD", "WARN", ""]
"""BAD: the server cannot start or cannot do its work. WARN: it works, but worse than it could.
Empty: information only."""


class Check(NamedTuple):
    """The subject of a check, and the result."""

    name: str
    text: str
    verdict: Verdict = ""
    remedy: str = ""
    """How to fix it."""


def good(name: str, text: str) -> Check:
    return Check(name, text, "ok")


def bad(name: str, text: str, remedy: str) -> Check:
    return Check(name, text, "BAD", remedy)


def warning(name: str, text: str, remedy: str) -> Check:
    return Check(name, text, "WARN", remedy)
