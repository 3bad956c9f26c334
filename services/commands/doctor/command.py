"""Runs the checks for a server with the given flags, and prints their results."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from services.commands.doctor import installation, machine, meeting, weights
from services.commands.doctor.report import Check, bad, good
from shared import settings
from shared.exits import EXIT_FAILED, EXIT_OK
from shared.flags import FlagError
from shared.settings import ModelEntry, Settings

PROG = "mlx-lm-server doctor"
ABOUT = "Check what a start with these flags needs, and suggest fixes. --json prints JSON."
_JSON = "--json"


def main(argv: Sequence[str]) -> int:
    """Print the report for a server with these flags; return 0 if nothing is BAD."""
    words = [word for word in argv if word != _JSON]
    logging.basicConfig(level=logging.CRITICAL, format="%(message)s")
    found = []
    for check in examine(words):
        found.append(check)
        if len(words) == len(argv):
            sys.stdout.write(_line(check))
            sys.stdout.flush()  # some checks take seconds
    if len(words) < len(argv):
        sys.stdout.write(json.dumps([check._asdict() for check in found]) + "\n")
    else:
        sys.stdout.write(_verdict(found))
    return EXIT_FAILED if any(check.verdict == "BAD" for check in found) else EXIT_OK


def examine(argv: Sequence[str]) -> Iterator[Check]:
    """Yield the lines of the report, in order."""
    options: Settings | None = None
    models: tuple[ModelEntry, ...] = ()
    try:
        options, models, notes = settings.read(argv, os.environ, PROG, about=ABOUT)
    except FlagError as error:
        yield bad("settings", str(error), "fix this first: the other settings were not checked")
    else:
        yield from _settings(options, notes)
    yield from installation.checks()
    yield from machine.checks(options)
    if options is not None:
        yield from meeting.checks(options)
        for model in models:
            yield from weights.checks(model)


def _settings(options: Settings, notes: Sequence[str]) -> Iterator[Check]:
    given = ", ".join(sorted(name.replace("_", "-") for name in options.given))
    yield good("settings", f"set: {given}" if given else "all settings have their defaults")
    for note in notes:
        yield Check("settings", note, "WARN", "--help-all lists all settings")


def _line(check: Check) -> str:
    """Return one line for the finding and one for the fix, cut to the width of a terminal."""
    parts = [f"{check.verdict:<5}{check.name:<14}{check.text}"]
    if check.remedy:
        parts.append(f"{'':<19}-> {check.remedy}")
    if sys.stdout.isatty():
        columns = max(40, shutil.get_terminal_size().columns - 1)
        wrapper = textwrap.TextWrapper(
            columns, subsequent_indent=" " * 19, break_on_hyphens=False, break_long_words=False
        )
        parts = [wrapper.fill(part) for part in parts]
    return "\n".join(parts) + "\n"


def _verdict(found: Sequence[Check]) -> str:
    count = {
        verdict: sum(check.verdict == verdict for check in found) for verdict in ("BAD", "WARN")
    }
    if not any(count.values()):
        return "\nno problems found\n"
    return f"\n{count['BAD']} to fix, {count['WARN']} to check\n"
