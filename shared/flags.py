"""Flags that are declared once, as the fields of a dataclass, and read from four places.

A field made by `flag` carries its help, range and group. `resolve` fills the dataclass
from the command line, then the environment, then a TOML file, then the defaults, and
says in one line which flag is wrong and where its value came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

ENVIRONMENT_PREFIX = "MLX_LM_SERVER_"

_YES_NO = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class FlagError(Exception):
    """A flag, variable or key that makes no sense; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagDeclaration:
    """What is known of a flag beside its name, type and default.

    ``later`` is the feature that is still missing: any value but the default is refused.
    ``ignored`` is what is said when a flag without any effect is set. ``variables`` are
    environment variables read besides the flag's own; they belong to other programs
    too, so that a feature that is missing is no error when only they are set.
    ``word`` is the word that stands for None. ``split`` says whether a list in an
    environment variable is separated by commas.
    """

    help: str
    group: str
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    variables: tuple[str, ...] = ()
    later: str | None = None
    ignored: str | None = None
    secret: bool = False
    word: str | None = None
    existing_file: bool = False
    split: bool = True
    shown_default: str | None = None


def flag(default: object, help: str, *, group: str, **more: Any) -> Any:
    """A dataclass field for the flag of the same name; see `FlagDeclaration` for ``more``.

    A callable ``default`` is called for each new instance.
    """
    declared = FlagDeclaration(help=help, group=group, **more)
    options: dict[str, Any] = {"metadata": {"flag": declared}, "repr": not declared.secret}
    if callable(default):
        return dataclasses.field(default_factory=default, **options)
    return dataclasses.field(default=default, **options)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, ready to be read: the field's name, type and default, and `FlagDeclaration`."""

    field: str
    kind: Any
    choices: tuple[Any, ...]
    default: Any
    declared: FlagDeclaration

    @property
    def name(self) -> str:
        return self.field.replace("_", "-")

    @property
    def opposite(self) -> str:
        """The name by which a boolean is switched the other way."""
        return self.name.removeprefix("no-") if self.name.startswith("no-") else f"no-{self.name}"

    @property
    def variable(self) -> str:
        return variable(self.name)


@dataclasses.dataclass(frozen=True)
class _RawValue:
    """A raw value and where it came from, worded for an error message."""

    value: Any
    origin: str
    foreign: bool = False


def variable(name: str) -> str:
    """The environment variable of the flag ``name`` (without dashes in front)."""
    return ENVIRONMENT_PREFIX + name.replace("-", "_").upper()


def flags_of(cls: type[Any]) -> list[Flag]:
    """The flags that the dataclass ``cls`` declares, in order."""
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            default: Any = field.default_factory()
        else:
            default = field.default
        kind, choices = _kind_and_choices(hints[field.name])
        found.append(Flag(field.name, kind, choices, default, field.metadata["flag"]))
    return found


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
    """The instance of ``cls`` that the user asked for, and warnings for them.

    ``config`` names the flag with the TOML file; ``other_variables`` have our prefix
    without being flags. Raises `FlagError`; ``--help`` prints
    and raises SystemExit(0).
    """
    flags = flags_of(cls)
    parser = _parser(flags, prog, description)
    given = _from_environment(flags, environ) | _from_command_line(flags, parser, argv)
    if config in given:
        given = _from_file(flags, Path(str(given[config].value)).expanduser()) | given

    values: dict[str, Any] = {}
    warnings = _unknown_variables(flags, environ, other_variables)
    for one in flags:
        if one.field not in given:
            continue
        raw = given[one.field]
        try:
            value = _convert(one, raw.value)
            _check_range(one, value)
        except ValueError as error:
            raise FlagError(f"{raw.origin}: {error}") from None
        if one.declared.later and value != one.default:
            if raw.foreign:
                continue
            raise FlagError(
                f"{raw.origin}: {one.declared.later} not available in this version; "
                f"leave it at its default ({_shown(one)})"
            )
        if one.declared.ignored and value != one.default:
            warnings.append(f"{raw.origin}: {one.declared.ignored}")
        values[one.field] = value
    return cls(**values), warnings


# -- sources -------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message.removeprefix("argument "))


def _parser(flags: Sequence[Flag], prog: str, description: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        usage=f"{prog} [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    groups: dict[str, Any] = {}
    for one in flags:
        title = one.declared.group
        group = groups.setdefault(title, None) or parser.add_argument_group(title)
        groups[title] = group
        options: dict[str, Any] = {"dest": one.field, "help": _help(one).replace("%", "%%")}
        if one.kind is bool:
            group.add_argument(f"--{one.name}", action="store_const", const=True, **options)
            options["help"] = argparse.SUPPRESS if one.name.startswith("no-") else "the opposite"
            group.add_argument(f"--{one.opposite}", action="store_const", const=False, **options)
            continue
        metavar = "{" + ",".join(map(str, one.choices)) + "}" if one.choices else _metavar(one)
        action = "append" if one.kind is tuple else "store"
        group.add_argument(f"--{one.name}", action=action, metavar=metavar, **options)
    return parser


def _from_command_line(
    flags: Sequence[Flag], parser: _Parser, argv: Sequence[str]
) -> dict[str, _RawValue]:
    parsed, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].split("=", 1)[0]
        if not word.startswith("-"):
            raise FlagError(f"unexpected argument {word!r}")
        names = [f"--{name}" for one in flags for name in (one.name, one.opposite)]
        raise FlagError(f"unknown flag {word}{_suggestion(word, names)}")
    return {name: _RawValue(value, f"--{_dashed(name)}") for name, value in vars(parsed).items()}


def _from_environment(flags: Sequence[Flag], environ: Mapping[str, str]) -> dict[str, _RawValue]:
    given: dict[str, _RawValue] = {}
    for one in flags:
        names = {one.variable: False}
        if one.kind is bool:
            names[variable(one.opposite)] = True
        found = {name: negated for name, negated in names.items() if environ.get(name)}
        if len(found) > 1:
            raise FlagError(f"--{one.name}: both {' and '.join(found)} are set")
        for name, negated in found.items():
            given[one.field] = _raw_value(one, environ[name], f"--{one.name} (${name})", negated)
        for name in one.declared.variables:
            if one.field not in given and environ.get(name):
                given[one.field] = _RawValue(environ[name], f"--{one.name} (${name})", foreign=True)
        if one.kind is tuple and one.declared.split and one.field in given:
            raw = given[one.field]
            items = [item.strip() for item in raw.value.split(",")]
            given[one.field] = dataclasses.replace(raw, value=items)
    return given


def _from_file(flags: Sequence[Flag], path: Path) -> dict[str, _RawValue]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlagError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlagError(f"--config: {path} is not valid TOML: {_one_line(error)}") from None
    names = {one.name: (one, False) for one in flags}
    names |= {one.opposite: (one, True) for one in flags if one.kind is bool}
    given: dict[str, _RawValue] = {}
    for key, value in content.items():
        if key.replace("_", "-") not in names:
            raise FlagError(
                f"--config: unknown key {key!r} in {path}{_suggestion(_dashed(key), names)}"
            )
        one, negated = names[key.replace("_", "-")]
        if one.field == "config":
            raise FlagError(f"--config: {path} names another file, which is not followed")
        if one.field in given:
            raise FlagError(f"--{one.name}: set twice in {path}")
        origin = f"--{one.name} (key {key!r} in {path})"
        given[one.field] = _raw_value(one, value, origin, negated)
    return given


def _raw_value(one: Flag, value: Any, origin: str, negated: bool) -> _RawValue:
    if not negated:
        return _RawValue(value, origin)
    try:
        return _RawValue(not _convert(one, value), origin)
    except ValueError as error:
        raise FlagError(f"{origin}: {error}") from None


def _unknown_variables(
    flags: Sequence[Flag], environ: Mapping[str, str], others: Sequence[str]
) -> list[str]:
    known = {variable(name) for one in flags for name in (one.name, one.opposite)} | {*others}
    return [
        f"${name} is not a setting"
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    ]


# -- values --------------------------------------------------------------------


def _kind_and_choices(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The plain type behind an annotation, and the choices of a `Literal`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), get_args(hint)
    return get_origin(hint) or hint, ()


def _convert(one: Flag, raw: Any) -> Any:
    """``raw`` (a string, or what TOML has) as the flag's type; ValueError says what is wrong."""
    if one.declared.word is not None and raw == one.declared.word:
        return None
    value = _CONVERTERS[one.kind](raw)
    if one.choices and value not in one.choices:
        raise ValueError(f"{raw!r} is none of {', '.join(map(str, one.choices))}")
    return value


def _to_int(raw: Any) -> int:
    try:
        if isinstance(raw, str):
            return int(raw)
    except ValueError:
        pass
    if type(raw) is not int:
        raise ValueError(f"{raw!r} is not a whole number")
    return raw


def _to_float(raw: Any) -> float:
    try:
        if isinstance(raw, bool):
            raise ValueError
        value = float(raw)
    except (ValueError, TypeError):
        raise ValueError(f"{raw!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{raw!r} is not a finite number")
    return value


def _to_bool(raw: Any) -> bool:
    value = _YES_NO.get(raw.lower()) if isinstance(raw, str) else raw
    if not isinstance(value, bool):
        raise ValueError(f"{raw!r} is neither true nor false")
    return value


def _to_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("not a string")
    if not raw.strip():
        raise ValueError("empty")
    return raw


def _to_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, (str, list)):
        raise ValueError("neither a string nor a list of strings")
    return tuple(_to_text(item) for item in ([raw] if isinstance(raw, str) else raw))


def _to_object(raw: Any) -> dict[str, Any]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError as error:
        raise ValueError(f"not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


_CONVERTERS: dict[Any, Any] = {
    int: _to_int,
    float: _to_float,
    bool: _to_bool,
    str: _to_text,
    Path: lambda raw: Path(_to_text(raw)).expanduser(),
    tuple: _to_texts,
    dict: _to_object,
}


def _check_range(one: Flag, value: Any) -> None:
    limits = one.declared
    if isinstance(value, (int, float)):
        if limits.at_least is not None and value < limits.at_least:
            raise ValueError(f"{value} is less than {limits.at_least}")
        if limits.more_than is not None and value <= limits.more_than:
            raise ValueError(f"{value} is not more than {limits.more_than}")
        if limits.at_most is not None and value > limits.at_most:
            raise ValueError(f"{value} is more than {limits.at_most}")
    if limits.existing_file and not (value.is_file() and os.access(value, os.R_OK)):
        raise ValueError(f"no readable file {value}")


# -- words ---------------------------------------------------------------------


def _help(one: Flag) -> str:
    repeatable = "; repeatable" if one.kind is tuple else ""
    also = "".join(f", ${name}" for name in one.declared.variables)
    later = " [not available yet]" if one.declared.later else ""
    return f"{one.declared.help}{repeatable} (default: {_shown(one)}; ${one.variable}{also}){later}"


def _shown(one: Flag) -> str:
    if one.declared.shown_default is not None:
        return one.declared.shown_default
    if isinstance(one.default, bool):
        return "on" if one.default else "off"
    return one.declared.word or "none" if one.default in (None, (), {}) else str(one.default)


def _metavar(one: Flag) -> str:
    return {int: "N", float: "X", Path: "PATH", dict: "JSON"}.get(one.kind, "TEXT")


def _dashed(field: str) -> str:
    return field.replace("_", "-")


def _suggestion(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
