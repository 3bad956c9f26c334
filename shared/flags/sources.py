"""The sources of flag values: the command line, the environment and a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.flags.declaration import ENVIRONMENT_PREFIX, Flag, FlagError, dashed, variable
from shared.flags.parser import FlagParser
from shared.flags.values import convert, one_line


@dataclass(frozen=True)
class RawValue:
    value: Any
    origin: str  # the source, worded for an error message
    foreign: bool = False  # from a variable that other programs use too


def from_command_line(
    flags: Sequence[Flag], parser: FlagParser, argv: Sequence[str]
) -> dict[str, RawValue]:
    parsed, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].split("=", 1)[0]
        if not word.startswith("-"):
            raise FlagError(f"unexpected argument {word!r}")
        names = [f"--{flag.name}" for flag in flags]
        names += [f"--{flag.opposite}" for flag in flags if flag.kind is bool]
        raise FlagError(f"unknown flag {word}{_suggestion(word, names, '; --help-all shows all')}")
    return {name: RawValue(value, f"--{dashed(name)}") for name, value in vars(parsed).items()}


def from_environment(flags: Sequence[Flag], environ: Mapping[str, str]) -> dict[str, RawValue]:
    given: dict[str, RawValue] = {}
    for flag in flags:
        names = {flag.variable: False}
        if flag.kind is bool:
            names[variable(flag.opposite)] = True
        found = {name: negated for name, negated in names.items() if environ.get(name)}
        if len(found) > 1:
            raise FlagError(f"--{flag.name}: both {' and '.join(found)} are set")
        for name, negated in found.items():
            origin = f"--{flag.name} (${name})"
            given[flag.field] = _negatable(flag, environ[name], origin, negated)
        for name in flag.declared.variables:
            if flag.field not in given and environ.get(name):
                origin = f"--{flag.name} (${name})"
                given[flag.field] = RawValue(environ[name], origin, foreign=True)
        if flag.kind is tuple and flag.declared.split and flag.field in given:
            raw = given[flag.field]
            items = [item.strip() for item in raw.value.split(",")]
            given[flag.field] = replace(raw, value=items)
    return given


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises: `FlagError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlagError(f"--config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of long numbers and deep arrays
        raise FlagError(f"--config: {path} is not valid TOML: {one_line(error)}") from None


def from_table(
    flags: Sequence[Flag], content: Mapping[str, Any], where: str
) -> dict[str, RawValue]:
    """Return the values of ``flags`` in a TOML table; ``where`` names it in errors.

    Raises: `FlagError` if the table has other keys.
    """
    names = {flag.name: (flag, False) for flag in flags}
    names |= {flag.opposite: (flag, True) for flag in flags if flag.kind is bool}
    given: dict[str, RawValue] = {}
    for key, value in content.items():
        if key.replace("_", "-") not in names:
            raise FlagError(
                f"--config: unknown key {key!r} in {where}{_suggestion(dashed(key), names)}"
            )
        flag, negated = names[key.replace("_", "-")]
        if flag.field == "config":
            raise FlagError(f"--config: {where} names another config file, which is not supported")
        if flag.field in given:
            raise FlagError(f"--{flag.name}: set twice in {where}")
        origin = f"--{flag.name} (key {key!r} in {where})"
        given[flag.field] = _negatable(flag, value, origin, negated)
    return given


def variables_of(flags: Sequence[Flag]) -> frozenset[str]:
    """Return the environment variables with our prefix that set ``flags``."""
    return frozenset(variable(name) for flag in flags for name in (flag.name, flag.opposite))


def unknown_variables(
    flags: Sequence[Flag], environ: Mapping[str, str], others: Sequence[str]
) -> list[str]:
    known = variables_of(flags) | {*others}
    return [
        f"${name} is not a setting"
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    ]


def _negatable(flag: Flag, value: Any, origin: str, negated: bool) -> RawValue:
    if not negated:
        return RawValue(value, origin)
    try:
        return RawValue(not convert(flag, value), origin)
    except ValueError as error:
        raise FlagError(f"{origin}: {error}") from None


def _suggestion(word: str, known: Sequence[str] | Mapping[str, object], otherwise: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else otherwise
