"""API keys and their permissions, from the flags and from ``--api-key-file``.

The file has one key per line, optionally followed by fields::

    sk-alice name=alice rpm=60 tpm=100000 concurrency=8 models=small,large priority=5
    { key = "sk-bob", name = "bob", rpm = 10 }

or it is TOML with a table ``[[key]]`` for each key. Empty lines and lines that begin with ``#`` are
ignored. Error messages name lines and fields, never a key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings

_MAX = 10**12  # of requests or tokens
_UNNAMED = "key-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TABLES = re.compile(r"^\s*\[\[?\s*\w+", re.MULTILINE)


class KeyFileError(ValueError):
    """The keys are not usable; the message is one line for the user."""


class KeyFileUnreadable(KeyFileError):
    """Reading the file failed, for example for want of descriptors."""


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One key of the file. Unset fields default to the flags."""

    key: str
    name: str | None = None
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int = 0
    models: list[str] | None = None
    priority: int | None = None


def read_tenants(settings: Settings) -> dict[bytes, Tenant]:
    """Return the tenants of ``--api-key`` and ``--api-key-file`` by the digest of their keys.

    Raises `KeyFileError`.
    """
    entries = [("--api-key", _KeyEntry(key=key)) for key in settings.api_key]
    if settings.api_key_file is not None:
        entries += _read_file(settings.api_key_file)
    tenants: dict[bytes, Tenant] = {}
    origins: dict[bytes, str] = {}
    for origin, entry in entries:
        key = digest(entry.key)
        if key in tenants and origin == origins[key] == "--api-key":
            continue
        if key in tenants:
            raise KeyFileError(f"{origin}: the key is already set in {origins[key]}")
        if settings.admin_key is not None and key == digest(settings.admin_key):
            raise KeyFileError(f"{origin}: the key is the --admin-key, which clients must not have")
        tenants[key], origins[key] = _tenant(entry, key, settings, origin), origin
    _check_names(tenants, origins)
    alone = len({tenant.name for tenant in tenants.values()}) <= 1
    return {key: _among(tenant, alone) for key, tenant in tenants.items()}


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _among(tenant: Tenant, alone: bool) -> Tenant:
    """Return ``tenant`` as one of several, unless it is ``alone``.

    By default, one of several has at most priority 0: otherwise any tenant could put its requests
    before all others.
    """
    if alone or tenant.max_priority is not None:
        return replace(tenant, alone=alone)
    return replace(tenant, alone=False, max_priority=0)


def _tenant(entry: _KeyEntry, key: bytes, settings: Settings, origin: str) -> Tenant:
    if not entry.key or not entry.key.isascii() or not entry.key.isprintable() or " " in entry.key:
        raise KeyFileError(f"{origin}: a key must be printable ASCII without spaces")
    name = entry.name
    if name is not None and (not _NAME.fullmatch(name) or name.startswith(_UNNAMED)):
        raise KeyFileError(
            f"{origin}: name: only letters, digits, '.', '_' and '-' are allowed, at most 64, "
            f"and it must not begin with '{_UNNAMED}'"
        )
    for field in ("rpm", "tpm", "concurrency"):
        if not 0 <= (getattr(entry, field) or 0) <= _MAX:
            raise KeyFileError(f"{origin}: {field} must be between 0 and {_MAX}")
    if entry.models is not None and not all(entry.models):
        raise KeyFileError(f"{origin}: models has an empty name")
    rpm = settings.rate_limit_requests if entry.rpm is None else entry.rpm
    tpm = settings.rate_limit_tokens if entry.tpm is None else entry.tpm
    return Tenant(
        name=entry.name or _UNNAMED + key.hex()[:12],
        requests_per_minute=rpm,
        tokens_per_minute=tpm,
        concurrency=entry.concurrency,
        models=None if entry.models is None else frozenset(entry.models),
        max_priority=entry.priority,
    )


def _check_names(tenants: dict[bytes, Tenant], origins: dict[bytes, str]) -> None:
    """Two keys may have the same name, so that one can replace the other, if their permissions are
    the same."""
    by_name: dict[str, tuple[Tenant, str]] = {}
    for key, tenant in tenants.items():
        other, origin = by_name.setdefault(tenant.name, (tenant, origins[key]))
        if other != tenant:
            raise KeyFileError(f"{origins[key]}: same name as {origin}, but other limits")


def _read_file(path: Path) -> list[tuple[str, _KeyEntry]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KeyFileUnreadable(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"--api-key-file: {path} is not UTF-8") from None
    raw = _tables(text, path) if _TABLES.search(text) else _lines(text, path)
    entries = [(origin, _convert(fields, origin)) for origin, fields in raw]
    if not entries:
        raise KeyFileError(f"--api-key-file: {path} has no keys")
    return entries


def _convert(fields: object, origin: str) -> _KeyEntry:
    try:
        return msgspec.convert(fields, _KeyEntry, strict=False)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{origin}: {error}") from None


def _tables(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    document = _toml(text, f"--api-key-file: {path}")
    if list(document) != ["key"] or not isinstance(document["key"], list):
        raise KeyFileError(f"--api-key-file: {path} contains something other than [[key]] tables")
    for number, fields in enumerate(document["key"], 1):
        yield f"--api-key-file: {path}, key {number}", fields


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        origin = f"--api-key-file: {path}, line {number}"
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("{"):
            yield origin, _toml(f"entry = {line}", origin)["entry"]
        else:
            yield origin, _fields(line.split(), origin)


def _fields(words: Sequence[str], origin: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"key": words[0]}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if word.startswith("#"):
            break
        if not equals or name in fields:
            raise KeyFileError(f"{origin}: only fields like rpm=60 may follow the key, each once")
        fields[name] = value.split(",") if name == "models" else value
    return fields


def _toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of long numbers and deep arrays
        # The message may show part of the line, and so of a key.
        place = re.search(r"\(at .*\)", str(error))
        shown = f" {place[0]}" if place else ""
        raise KeyFileError(f"{origin}: not valid TOML{shown}") from None
