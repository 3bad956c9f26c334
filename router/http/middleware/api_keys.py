"""The API keys that clients may use."""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import replace
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.types import Scope

from router.errors import AdminForbidden, Unauthorized
from router.fleet.tenants.tenant import ADMINISTRATOR, EVERYBODY, Tenant
from router.http.middleware.addresses import ClientAddresses
from router.http.middleware.key_file import (
    KeyFileError,
    KeyFileUnreadable,
    digest,
    read_tenants,
)
from router.waiting import wait_at_most
from shared.logs import RateLimitedLogger
from shared.settings import Settings
from shared.watched_file import stamp

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_LOOKS = 10


class ApiKeys:
    """The accepted keys. Only digests are kept."""

    def __init__(self, settings: Settings) -> None:
        """Read ``--api-key`` and ``--api-key-file``. Raises `KeyFileError`."""
        self._settings = settings
        self._path = settings.api_key_file
        self._stamp = self._look()
        self._tenants = read_tenants(settings)
        self._everybody = replace(
            EVERYBODY,
            requests_per_minute=settings.rate_limit_requests,
            tokens_per_minute=settings.rate_limit_tokens,
            max_priority=0,
        )
        self._addresses = ClientAddresses(settings.trusted_proxy)
        self._reload_asked = asyncio.Event()
        self._warnings = RateLimitedLogger(logger)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def identify(self, headers: Headers, scope: Scope) -> Tenant:
        """Return the tenant of the key in ``headers``, or of the client's address if there are no
        keys. Raises `Unauthorized`."""
        if self._tenants:
            return self.owner(headers)
        address = self._addresses.of(scope, headers)
        alone = self._addresses.is_alone(address)
        return replace(self._everybody, address=address, alone=alone)

    def owner(self, headers: Headers) -> Tenant:
        """Return the tenant of the key in ``headers``. Raises `Unauthorized`."""
        # The lookup uses a digest, so its timing reveals nothing about almost correct keys.
        tenant = self._tenants.get(digest(given_key(headers)))
        if tenant is None:
            raise Unauthorized("The API key is not valid.")
        return tenant

    def named(self, name: str) -> Tenant | None:
        """Return the tenant called ``name``, if one of the keys still belongs to it."""
        if not self._tenants:
            return self._everybody if name == self._everybody.name else None
        return next((each for each in self._tenants.values() if each.name == name), None)

    def reload_soon(self) -> None:
        """Make `follow` reload the keys, whether or not the file seems to have changed."""
        self._reload_asked.set()

    async def follow(self) -> NoReturn:
        """Reload the keys whenever the file has changed."""
        while True:
            await wait_at_most(self._reload_asked, None if self._path is None else _POLL_S)
            found = await asyncio.to_thread(self._look)
            if self._reload_asked.is_set() or found != self._stamp:
                self._reload_asked.clear()
                await self._try_reload()

    def _look(self) -> tuple[int, int, int] | None:
        return None if self._path is None else stamp(self._path)

    async def reload(self) -> int:
        """Reload the keys, and return their number. Running requests continue.

        Raises `KeyFileError`; the old keys then stay.
        """
        self._tenants = await self._read_whole()
        logger.info("reloaded %d API keys", len(self._tenants))
        return len(self._tenants)

    async def _read_whole(self) -> dict[bytes, Tenant]:
        """Return the keys, once the file was left alone for a moment: a part of a key would be
        another key. Raises `KeyFileError`."""
        for _ in range(_LOOKS):
            before = await asyncio.to_thread(self._look)
            if before is not None:
                await asyncio.sleep(_POLL_S)
            if before == await asyncio.to_thread(self._look):
                try:
                    found = await asyncio.to_thread(read_tenants, self._settings)
                except KeyFileUnreadable:
                    raise
                except KeyFileError:
                    self._stamp = before  # read again once it has changed
                    raise
                if before == await asyncio.to_thread(self._look):
                    self._stamp = before
                    return found
        raise KeyFileUnreadable(f"--api-key-file: {self._path} is still being written")

    async def _try_reload(self) -> None:
        try:
            await self.reload()
        except KeyFileUnreadable as error:
            self._warnings.warning(
                "cannot reload the API keys yet, they stay as they were: %s", error
            )
        except KeyFileError as error:
            logger.error("cannot reload the API keys, they stay as they were: %s", error)


class SingleKey:
    """The single key of a path, such as ``--metrics-key``; None allows everyone."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else digest(key)

    def __bool__(self) -> bool:
        return self._digest is not None

    def check(self, headers: Headers) -> None:
        """Raise `Unauthorized` unless ``headers`` contain the key."""
        if self._digest is None or hmac.compare_digest(self._digest, digest(given_key(headers))):
            return
        raise Unauthorized("The key is not valid.")


class AdminKey:
    """The key of ``/admin`` and of ``paths``, if one is set. API ``keys`` are recognized but not
    sufficient."""

    def __init__(self, key: str | None, keys: ApiKeys, paths: frozenset[str]) -> None:
        self._paths = paths
        self._digest = None if key is None else digest(key)
        self._keys = keys

    def guards(self, path: str) -> bool:
        is_guarded = path.startswith("/admin/") or path in self._paths
        return self._digest is not None and is_guarded

    def is_sent(self, headers: Headers) -> bool:
        """Return whether ``headers`` have the key."""
        try:
            given = digest(given_key(headers))
        except Unauthorized:
            return False
        return self._digest is not None and hmac.compare_digest(self._digest, given)

    def check(self, headers: Headers) -> Tenant:
        """Return the administrator's tenant. Raises `AdminForbidden` and `Unauthorized`."""
        given_key(headers)
        if self.is_sent(headers):
            return ADMINISTRATOR
        if self._keys:
            self._keys.owner(headers)
            raise AdminForbidden("This is not the admin key.")
        raise Unauthorized("The admin key is not valid.")


def given_key(headers: Headers) -> str:
    """Return the key sent by a client. Raises `Unauthorized` if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    given = given or headers.get("x-api-key", "")
    if not given:
        raise Unauthorized("An API key is required: Authorization: Bearer KEY.")
    return given
