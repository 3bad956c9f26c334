"""Flags that are declared once, as the fields of dataclasses, and read from four sources.

A field made by `flag` carries its help and range. `resolve` fills the dataclass from the command
line, then the environment, then a TOML file, then the defaults. An error is one line that names the
flag and the source of its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from shared.flags import sources
from shared.flags.declaration import Flag, FlagError, flag, flags_of
from shared.flags.parser import argument_parser
from shared.flags.sources import RawValue, from_table, variables_of
from shared.flags.values import arguments, check_range, convert
from shared.paths import user_path

__all__ = [
    "Flag",
    "FlagError",
    "Resolved",
    "argument_parser",
    "arguments",
    "flag",
    "flags_of",
    "from_table",
    "resolve",
    "values_of",
    "variables_of",
]

T = TypeVar("T")


class Resolved(NamedTuple, Generic[T]):
    value: T
    given: frozenset[str]
    """The fields that the user has set."""
    tables: list[Any]
    """The tables under the name ``tables`` in the file, if that is a list."""
    warnings: list[str]


def resolve(
    cls: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    config: str = "config",
    tables: str = "",
    other_variables: Sequence[str] = (),
    common: Sequence[str] = (),
) -> Resolved[T]:
    """Return the instance of ``cls`` that the user asked for.

    ``config`` is the name of the flag with the TOML file, and ``tables`` a key of the file that may
    hold a list of tables. ``other_variables`` have our prefix but are not flags. ``common`` are the
    flags that ``--help`` shows. Raises: `FlagError`, and SystemExit(0) after printing help.
    """
    flags = flags_of(cls)
    parser = argument_parser(flags, prog, description, common)
    given = sources.from_environment(flags, environ)
    given |= sources.from_command_line(flags, parser, argv)
    found: list[Any] = []
    if config in given:
        path = user_path(str(given[config].value))
        content = sources.read_file(path)
        if isinstance(content.get(tables), list):
            found = content.pop(tables)
        given = from_table(flags, content, str(path)) | given
    warnings = sources.unknown_variables(flags, environ, other_variables)
    values, more = values_of(flags, given)
    return Resolved(cls(**values), frozenset(values), found, warnings + more)


def values_of(
    flags: Sequence[Flag], given: Mapping[str, RawValue]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of ``flags`` that are ``given``, and warnings. Raises: `FlagError`."""
    values: dict[str, Any] = {}
    warnings: list[str] = []
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
                f"{raw.origin}: {known.declared.later} not available in this version; leave it "
                f"at its default ({known.shown_default})"
            )
        if known.declared.ignored and value != known.default:
            warnings.append(f"{raw.origin}: {known.declared.ignored}")
        values[known.field] = value
    return values, warnings
