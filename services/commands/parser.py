"""The parser of each command of the command line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from shared.exits import EXIT_USAGE, fail


class CommandParser(argparse.ArgumentParser):
    """Its errors are one line, as those of the server's flags are."""

    def error(self, message: str) -> NoReturn:
        reason = f"{message.removeprefix('argument ')} ({self.prog} --help)"
        raise SystemExit(fail(self.prog, reason, EXIT_USAGE))
