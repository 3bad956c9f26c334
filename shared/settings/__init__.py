"""Every setting of the server.

`parse` reads them from the command line, the environment (``MLX_LM_SERVER_`` and the flag's
name), a TOML file (``--config``) and the defaults, in that order of precedence. All processes
take the same flags, so that the supervisor can pass its own on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from shared.exits import EXIT_USAGE, fail
from shared.flags import FlagError, resolve
from shared.settings.checks import check, is_loopback
from shared.settings.groups import ReasoningParserName, Settings, ToolParserName
from shared.settings.secrets import (
    SECRETS_VARIABLE,
    secret_variables,
    secrets_of,
    with_secrets,
    without_secrets,
)
from shared.supervisor_link import LINK_VARIABLE

__all__ = [
    "ReasoningParserName",
    "Settings",
    "ToolParserName",
    "check",
    "is_loopback",
    "parse",
    "SECRETS_VARIABLE",
    "secret_variables",
    "secrets_of",
    "without_secrets",
]


def parse(argv: Sequence[str], environ: Mapping[str, str], prog: str) -> Settings:
    """Return the settings that the user asked for.

    Invalid settings are one line on stderr and SystemExit(2), before anything starts. Warnings
    go to stderr too, except in a child process, as its supervisor has printed them.
    """
    try:
        settings, warnings = resolve(
            Settings,
            argv,
            environ,
            prog=prog,
            description="LLM serving on MLX. Order of precedence: flag, environment "
            "variable, --config file, default.",
            other_variables=("MLX_LM_SERVER_BLAS",),
        )
        if SECRETS_VARIABLE in environ:
            settings = with_secrets(settings, environ[SECRETS_VARIABLE])
        check(settings)
    except FlagError as error:
        raise SystemExit(fail(prog, error, EXIT_USAGE)) from None
    if LINK_VARIABLE not in environ:
        for warning in warnings:
            sys.stderr.write(f"{prog}: warning: {warning}\n")
    return settings
