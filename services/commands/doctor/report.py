"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable
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


def attempt(
    name: str,
    text: str,
    work: Callable[[], object],
    remedy: str,
    *errors: type[Exception],
    flag: str = "",
) -> Check:
    """Return a check that is good, with this ``text``, if ``work``, which a server does as well,
    raises none of ``errors``. ``flag`` names what the error is about."""
    try:
        work()
    except errors as error:
        return bad(name, f"{flag}: {error}" if flag else str(error), remedy)
    return good(name, text)
