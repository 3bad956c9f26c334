"""Flag values: conversion from text or TOML to the flag's type, and range checks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from shared.flags.declaration import Flag
from shared.paths import user_path

_YES_NO = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def convert(flag: Flag, raw: Any) -> Any:
    """Return ``raw`` (a string, or a value of TOML) as the flag's type. Raises: ValueError."""
    if flag.declared.word is not None and raw == flag.declared.word:
        return None
    value = _CONVERTERS[flag.kind](raw)
    if flag.choices and value not in flag.choices:
        raise ValueError(f"{raw!r} is not one of {', '.join(map(str, flag.choices))}")
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
    except (ValueError, TypeError, OverflowError):
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
    if "\0" in raw:  # neither a path nor a process argument can have one
        raise ValueError("contains a NUL character")
    if not _is_unicode(raw):
        raise ValueError("contains bytes that are not UTF-8")
    return raw


def _to_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, (str, list)):
        raise ValueError("neither a string nor a list of strings")
    return tuple(_to_text(item) for item in ([raw] if isinstance(raw, str) else raw))


def _to_object(raw: Any) -> dict[str, Any]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
        written = json.dumps(value, ensure_ascii=False)  # TOML also has dates
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if not _is_unicode(written):
        raise ValueError("contains half of a surrogate pair")
    return value


def _is_unicode(text: str) -> bool:
    """Return whether messages between processes can carry ``text``: Python keeps bytes of arguments
    that are not UTF-8 as halves of surrogate pairs."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


_CONVERTERS: dict[Any, Any] = {
    int: _to_int,
    float: _to_float,
    bool: _to_bool,
    str: _to_text,
    Path: lambda raw: user_path(_to_text(raw)),
    tuple: _to_texts,
    dict: _to_object,
}


def check_range(flag: Flag, value: Any) -> None:
    limits = flag.declared
    if isinstance(value, (int, float)):
        if limits.at_least is not None and value < limits.at_least:
            raise ValueError(f"{value} is less than {limits.at_least}")
        if limits.more_than is not None and value <= limits.more_than:
            raise ValueError(f"{value} must be greater than {limits.more_than}")
        if limits.at_most is not None and value > limits.at_most:
            raise ValueError(f"{value} is greater than {limits.at_most}")
    if limits.existing_file and not (value.is_file() and os.access(value, os.R_OK)):
        raise ValueError(f"{value} is not a readable file")


def arguments(flag: Flag, value: Any) -> list[str]:
    """Return the command-line arguments that set ``flag`` to its ``value``."""
    if flag.kind is bool:
        return [f"--{flag.name if value else flag.opposite}"]
    if flag.kind is tuple:
        return [f"--{flag.name}={item}" for item in value]
    if value is None:
        return [] if flag.declared.word is None else [f"--{flag.name}={flag.declared.word}"]
    return [f"--{flag.name}={json.dumps(value) if flag.kind is dict else value}"]


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
