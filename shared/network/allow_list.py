"""The list of keys that may connect over tcp: a file with one public key per line.

A line is a key in hexadecimal, optionally followed by fields::

    0f...e2 name=studio models=small,large

Empty lines and lines that begin with ``#`` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.watched_file import stamp

_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_NO_NAME = re.compile(r"[\s#]")
MAX_FILE_BYTES = 1_000_000


class AllowListError(ValueError):
    """The list is not usable; the message is one line for the user."""


class AllowListUnreadable(AllowListError):
    """Reading the file failed, for example for want of descriptors."""


@dataclass(frozen=True)
class AllowedKey:
    """One line of the list."""

    key: str
    """The public key, 64 hexadecimal digits."""
    name: str
    """The name given to engines with this key."""
    models: frozenset[str] | None = None
    """The names of models that engines with this key may serve; None: any."""

    def may_serve(self, names: Iterable[str]) -> bool:
        return self.models is None or self.models.issuperset(names)

    @property
    def line(self) -> str:
        models = "" if self.models is None else f" models={','.join(sorted(self.models))}"
        return f"{self.key} name={self.name}{models}"


class AllowList:
    """The keys of the file ``path``, by key. A missing file allows nobody."""

    def __init__(self, path: Path) -> None:
        """Raises `AllowListError`."""
        self._path = path
        self._stamp = stamp(path)
        self._keys = read_allow_list(path)

    def find(self, key: str) -> AllowedKey | None:
        return self._keys.get(key)

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether it has.

        Raises `AllowListError`; the keys then stay as they were.
        """
        found = stamp(self._path)
        if found == self._stamp:
            return False
        try:
            self._keys = read_allow_list(self._path)
        except AllowListUnreadable:
            raise  # The next call tries again: the file may have lost a key.
        except AllowListError:
            self._stamp = found
            raise
        self._stamp = found
        return True


def read_allow_list(path: Path) -> dict[str, AllowedKey]:
    """Raises `AllowListError`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise AllowListUnreadable(f"cannot read {path}: {error}") from None
    except UnicodeDecodeError as error:
        raise AllowListError(f"cannot read {path}: {error}") from None
    keys: dict[str, AllowedKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            allowed = parse_allowed_key(words[0], words[1:])
            if allowed.key in keys:
                raise AllowListError("the same key is listed twice")
            if any(other.name == allowed.name for other in keys.values()):
                raise AllowListError(f"the name {allowed.name} is given twice")
        except AllowListError as error:
            raise AllowListError(f"{path}, line {number}: {error}") from None
        keys[allowed.key] = allowed
    return keys


def write_allow_list(path: Path, keys: Iterable[AllowedKey]) -> None:
    """Replace the whole file: a reader sees either the old or the new list."""
    aside = path.with_name(path.name + ".new")
    aside.write_text("".join(key.line + "\n" for key in keys), encoding="utf-8")
    aside.replace(path)


def parse_allowed_key(key: str, fields: Iterable[str]) -> AllowedKey:
    """Raises `AllowListError`."""
    if not _KEY.fullmatch(key):
        raise AllowListError(f"{key[:70]!r} is not a public key of 64 hexadecimal digits")
    found: dict[str, str] = {}
    for field in fields:
        name, _, value = field.partition("=")
        if name not in ("name", "models") or not value or name in found:
            raise AllowListError(f"{field!r}: only name= and models= may follow the key, each once")
        found[name] = value
    name = found.get("name", key[:12])
    if not _NAME.fullmatch(name):
        raise AllowListError(
            f"name: {name!r} has characters other than letters, digits, '_' and '-', or more "
            "than 64"
        )
    models = frozenset(found["models"].split(",")) if "models" in found else None
    if models is not None and not all(models):
        raise AllowListError("models has an empty name")
    if models is not None and any(_NO_NAME.search(each) for each in models):
        raise AllowListError("models: a name on the list cannot contain whitespace or '#'")
    return AllowedKey(key, name, models)
