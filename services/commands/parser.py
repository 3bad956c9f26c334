"""The argument parser of each command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from shared.exits import EXIT_USAGE, fail


class CommandParser(argparse.ArgumentParser):
    """Reports errors in one line, like the server's flags."""

    def error(self, message: str) -> NoReturn:
        reason = f"{message.removeprefix('argument ')} ({self.prog} --help)"
        raise SystemExit(fail(self.prog, reason, EXIT_USAGE))
