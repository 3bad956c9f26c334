"""Encrypted reasoning kept by clients, for a server that stores nothing:
`reasoning.encrypted_content`."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)

_PREFIX = "mls1."


class ReasoningSeal:
    """Encrypts and authenticates reasoning and summaries. ``key`` may be any text; None: a random
    key in the user's state directory, which outlives this process. Routers that share clients need
    the same key."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._log = RateLimitedLogger(logger)

    def seal(self, text: str) -> str:
        return _PREFIX + self._fernet.encrypt(text.encode()).decode()

    def unseal(self, sealed: str) -> str | None:
        """Return the reasoning in ``sealed``. None: it was encrypted elsewhere or with another key.

        That is not an error: a client may bring a conversation from another server, and an error
        would make it impossible to continue. The summary next to it is kept.
        """
        if not sealed.startswith(_PREFIX):
            return None
        try:
            return self._fernet.decrypt(sealed.removeprefix(_PREFIX)).decode()
        except (InvalidToken, ValueError):
            self._log.warning("ignored reasoning that was encrypted with another key")
            return None

    @cached_property
    def _fernet(self) -> Fernet:
        key = _stored_key() if self._key is None else self._key.encode("utf-8", "surrogateescape")
        return Fernet(base64.urlsafe_b64encode(hashlib.sha256(key).digest()))


def _stored_key() -> bytes:
    """Return the key in the state directory, created if missing. Without such a directory, the key
    lasts as long as this process."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "mlx-lm-server" / "reasoning.key"
    try:
        with suppress(FileNotFoundError):  # first: to create one may fail, on a full disk
            return path.read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Linked as a complete file: two routers that start at once then use the same key.
        new = path.with_suffix(f".{os.getpid()}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
        return path.read_bytes()
    except OSError as error:
        logger.warning("encrypted reasoning will not be readable after a restart: %s", error)
        return secrets.token_bytes(32)
