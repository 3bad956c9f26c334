"""The API keys that requests may use."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers

from router.errors import Unauthorized
from shared.settings import Settings


class ApiKeys:
    """The keys that are accepted. Only digests are kept; they are compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_settings(cls, settings: Settings) -> ApiKeys:
        """Read ``--api-key`` and ``--api-key-file``, one key per line.

        Raises `OSError` if the file cannot be read, `ValueError` if it has no key.
        """
        keys = list(settings.api_key)
        if settings.api_key_file is not None:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
            found = [line.strip() for line in lines]
            found = [line for line in found if line and not line.startswith("#")]
            if not found:
                raise ValueError(f"--api-key-file: no key in {settings.api_key_file}")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, headers: Headers) -> str:
        """Return a short name of the key in ``headers``, safe to log. Raises `Unauthorized`."""
        given = _bearer(headers) or headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("An API key is needed: Authorization: Bearer KEY.")
        digest = _digest(given)
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorized("The API key is not valid.")
        return found[0].hex()[:12]


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
