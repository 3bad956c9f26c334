"""Every setting of the server.

`parse` reads them from the command line, the environment (``MLX_LM_SERVER_`` and the flag's name),
a TOML file (``--config``) and the defaults, in that order of precedence. All processes take the
same flags, so the supervisor can pass on its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from shared.exits import EXIT_USAGE, fail
from shared.flags import FlagError, argument_parser, flags_of, resolve
from shared.settings.adapters import adapters_of
from shared.settings.checks import check
from shared.settings.groups import CPUPrecision, Settings
from shared.settings.models import (
    VARIABLES,
    ModelEntry,
    chat_template_text,
    command_line,
    fixed_changes,
    model_changes,
    model_entries,
    overlay,
    serving_options,
)
from shared.settings.parser_names import ReasoningParserName, ToolParserName
from shared.settings.secrets import (
    SECRET_VARIABLES,
    SECRETS_VARIABLE,
    secrets_of,
    with_secrets,
)
from shared.supervisor_link import LINK_VARIABLE

__all__ = [
    "CPUPrecision",
    "ReasoningParserName",
    "Settings",
    "ToolParserName",
    "ModelEntry",
    "COMMON_FLAGS",
    "VARIABLES",
    "adapters_of",
    "chat_template_text",
    "check",
    "command_line",
    "fixed_changes",
    "flag_parser",
    "model_changes",
    "overlay",
    "parse",
    "parse_models",
    "read",
    "SECRETS_VARIABLE",
    "SECRET_VARIABLES",
    "secrets_of",
    "serving_options",
]


NOT_SETTINGS = (
    *("MLX_LM_SERVER_BLAS", "MLX_LM_SERVER_HOST_OPS", "MLX_LM_SERVER_GPU_PATH"),
    *("MLX_LM_SERVER_KERNELS", "MLX_LM_SERVER_URL"),
)
"""Environment variables with the settings' prefix that engines read themselves, and the one of
commands that talk to a server."""
COMMON_FLAGS = (
    *("model", "port", "api-key", "max-batch-size", "num-blocks", "kv-bits", "engines", "no-ssd"),
    *("max-concurrent-requests", "log-level"),
)
"""The flags that ``--help`` shows."""
_ABOUT = "Serve models over HTTP."
_PRECEDENCE = "Precedence: flag, environment variable, --config file, default."


def flag_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all settings, for shell completion."""
    return argument_parser(flags_of(Settings), prog, _PRECEDENCE, COMMON_FLAGS)


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str,
    *,
    one_model: bool = False,
    about: str = _ABOUT,
) -> Settings:
    """Return the user's settings, without those of single models. ``--help`` begins with ``about``.

    Invalid settings are reported in one line on stderr before anything starts, and raise
    SystemExit(2). So is a file with ``[[model]]`` for a process of ``one_model``. Warnings go to
    stderr too, except in a child process, because its supervisor has already printed them.
    """
    settings, models = parse_models(argv, environ, prog, about=about)
    if one_model and not models[0].alone:
        reason = "--config: a file with [[model]] works with `serve` only; an engine serves --model"
        raise SystemExit(fail(prog, reason, EXIT_USAGE))
    return settings


def parse_models(
    argv: Sequence[str], environ: Mapping[str, str], prog: str, *, about: str = _ABOUT
) -> tuple[Settings, tuple[ModelEntry, ...]]:
    """Return the user's settings, and the server's models with their own settings, at least one."""
    try:
        settings, models, warnings = read(argv, environ, prog, about=about)
    except FlagError as error:
        raise SystemExit(fail(prog, error, EXIT_USAGE)) from None
    if LINK_VARIABLE not in environ:
        for warning in warnings:
            sys.stderr.write(f"{prog}: warning: {warning}\n")
    return settings, models


def read(
    argv: Sequence[str], environ: Mapping[str, str], prog: str, *, about: str = _ABOUT
) -> tuple[Settings, tuple[ModelEntry, ...], list[str]]:
    """Return the settings, the models and warnings. Raises: `FlagError`."""
    settings, given, tables, warnings = resolve(
        Settings,
        argv,
        environ,
        prog=prog,
        description=f"{about} {_PRECEDENCE}",
        tables="model",
        other_variables=NOT_SETTINGS,
        common=COMMON_FLAGS,
    )
    settings = dataclasses.replace(settings, given=given)
    if SECRETS_VARIABLE in environ:
        settings = with_secrets(settings, environ[SECRETS_VARIABLE])
    check(settings)
    models, more = model_entries(settings, tables, str(settings.config))
    return settings, models, warnings + more
