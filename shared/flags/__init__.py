"""Flags that are declared once, as the fields of dataclasses, and read from four places.

A field made by `flag` carries its help and range. `resolve` fills the dataclass from the
command line, then the environment, then a TOML file, then the defaults. An error is one line
that names the flag and the place where its value came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shared.flags import sources
from shared.flags.declaration import Flag, FlagError, flag, flags_of
from shared.flags.values import check_range, convert

__all__ = ["Flag", "FlagError", "flag", "flags_of", "resolve"]

T = TypeVar("T")


def resolve(
    cls: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    config: str = "config",
    other_variables: Sequence[str] = (),
) -> tuple[T, list[str]]:
    """Return the instance of ``cls`` that the user asked for, and warnings for the user.

    ``config`` is the name of the flag with the TOML file. ``other_variables`` have our prefix
    without being flags.
    Raises: `FlagError`, and SystemExit(0) after ``--help`` was printed.
    """
    flags = flags_of(cls)
    parser = sources.argument_parser(flags, prog, description)
    given = sources.from_environment(flags, environ)
    given |= sources.from_command_line(flags, parser, argv)
    if config in given:
        given = sources.from_file(flags, Path(str(given[config].value)).expanduser()) | given

    values: dict[str, Any] = {}
    warnings = sources.unknown_variables(flags, environ, other_variables)
    for known in flags:
        raw = given.get(known.field)
        if raw is None:
            continue
        try:
            value = convert(known, raw.value)
            check_range(known, value)
        except ValueError as error:
            raise FlagError(f"{raw.origin}: {error}") from None
        if known.declared.later and value != known.default:
            if raw.foreign:
                continue
            raise FlagError(
                f"{raw.origin}: {known.declared.later} not available in this version; "
                f"leave it at its default ({known.shown_default})"
            )
        if known.declared.ignored and value != known.default:
            warnings.append(f"{raw.origin}: {known.declared.ignored}")
        values[known.field] = value
    return cls(**values), warnings
