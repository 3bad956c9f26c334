"""Images behind `https:` URLs, fetched from hosts that the operator allows.

A client that could make the server connect anywhere would reach what only the server can: its own
machine, its network, a cloud's metadata service. The host name must therefore be on the list, it is
resolved once, all its addresses must be public, and the connection goes to one of them. A redirect
is a new URL with the same checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import h11

from router.errors import Unavailable
from router.places import Places
from shared.network.host_names import MAX_LABEL_CHARS, MAX_NAME_CHARS, with_parents

TIMEOUT_S = 10.0
MAX_REDIRECTS = 3
MAX_AT_ONCE = 8
WAIT_S = 30.0
"""How long an image may wait for others to be fetched."""
_HTTPS = 443
_READ_BYTES = 65536
_MAX_URL_CHARS = 8192
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")
"""IPv4 addresses in a deprecated IPv6 form."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host. Raises OSError."""


class NotFetched(Exception):
    """The image was not fetched. Its message continues "the image"."""

    def __init__(self, text: str, *, is_forbidden: bool = False) -> None:
        super().__init__(text)
        self.is_forbidden = is_forbidden
        """Whether the URL was rejected before any connection."""


class _Target(NamedTuple):
    host: str
    path: str


class ImageFetcher:
    """Fetches images from ``hosts``: a name, a name that begins with a dot for all its subdomains,
    or ``*`` for all. The other parameters are for tests."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        port: int = _HTTPS,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._timeout_s = timeout_s
        self._port = port
        self._resolve = resolve or self._addresses
        self._is_public = is_public or is_public_address
        self._context = context or ssl.create_default_context()
        self._places = Places(MAX_AT_ONCE)
        # A name whose servers do not answer occupies its thread, but not one that others need.
        self._resolvers = ThreadPoolExecutor(MAX_AT_ONCE, "resolve")
        self._lookups: dict[asyncio.Task[object] | None, Future[Any]] = {}
        """The last lookup of a name, by the fetching task."""

    async def fetch(self, url: str, max_bytes: int, key: str = "") -> bytes:
        """Return the content at ``url``, of at most ``max_bytes``, for a request of ``key``.
        Raises `NotFetched`, and `Unavailable` if too many images are being fetched."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.take(key)
        except TimeoutError:
            raise Unavailable(
                "Too many images are being fetched at once.", code="server_busy", retry_after_s=5
            ) from None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, max_bytes)
        except TimeoutError:
            raise NotFetched(f"did not arrive within {self._timeout_s:g} s.") from None
        except ssl.SSLCertVerificationError:
            raise NotFetched("is on a host with an invalid certificate.") from None
        except (OSError, h11.RemoteProtocolError, EOFError):
            raise NotFetched("could not be fetched from its host.") from None
        finally:
            self._give_back(key)

    def _give_back(self, key: str) -> None:
        """Release the place, once no thread looks up a name for it any more."""
        lookup = self._lookups.pop(asyncio.current_task(), None)
        if lookup is None or lookup.done():
            self._places.give_back(key)
            return
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._places.give_back, key)

        lookup.add_done_callback(ended)

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(self._checked(url), max_bytes)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError:
                raise NotFetched("is behind a redirect to an invalid URL.") from None
        raise NotFetched(f"is behind more than {MAX_REDIRECTS} redirects.")

    def _checked(self, url: str) -> _Target:
        """Return the parsed URL. Raises `NotFetched` if it is not allowed."""
        try:
            parts = urlsplit(url[: _MAX_URL_CHARS + 1])
            host = _ascii_host(parts.hostname or "")
            path = (parts.path or "/").encode("ascii").decode()
            path += f"?{parts.query.encode('ascii').decode()}" if parts.query else ""
            port = parts.port
        except (ValueError, UnicodeError):
            raise NotFetched("has an invalid URL.", is_forbidden=True) from None
        if len(url) > _MAX_URL_CHARS or not all("!" <= char <= "~" for char in host + path):
            raise NotFetched("has an invalid URL.", is_forbidden=True)
        if parts.scheme != "https":
            raise NotFetched("has a URL that is not https:.", is_forbidden=True)
        if port not in (None, self._port) or parts.username is not None:
            raise NotFetched("has a URL with a port or a user name.", is_forbidden=True)
        if not host or self._hosts.isdisjoint({"*", *with_parents(host)}):
            raise NotFetched(
                "is on a host that --image-hosts does not allow.",
                is_forbidden=True,
            )
        return _Target(host, path)

    async def _addresses(self, host: str, port: int) -> list[str]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        lookup = self._resolvers.submit(ask)
        self._lookups[asyncio.current_task()] = lookup
        found = await asyncio.wrap_future(lookup)
        return [str(address[0]) for *_, address in found]

    async def _get(self, target: _Target, max_bytes: int) -> bytes | str:
        """Return the content, or the target of a redirect."""
        addresses = await self._resolve(target.host, self._port)
        if not addresses or not all(map(self._is_public, addresses)):
            raise NotFetched("is on a host with an address that is not public.", is_forbidden=True)
        reader, writer = await asyncio.open_connection(
            addresses[0], self._port, ssl=self._context, server_hostname=target.host
        )
        try:
            return await _ask(reader, writer, target, max_bytes)
        finally:
            writer.transport.abort()


def _ascii_host(name: str) -> str:
    """Return ``name`` as DNS has it. Raises UnicodeError.

    Its length is checked first: encoding a label takes time by the square of its length."""
    longest = max(map(len, name.split(".")))
    if len(name) > MAX_NAME_CHARS or longest > MAX_LABEL_CHARS:
        raise UnicodeError("the name of a host is too long")
    return name.encode("idna").decode().lower().removesuffix(".")


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: _Target, max_bytes: int
) -> bytes | str:
    http = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", target.host),
        ("User-Agent", "mlx-lm-server"),
        ("Accept", "image/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=target.path, headers=headers)
    writer.write((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    pieces: list[bytes] = []
    size = 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            place = _redirect(event, max_bytes)
            if place is not None:
                return place
        elif isinstance(event, h11.Data):
            size += len(event.data)
            pieces.append(bytes(event.data))
            if size > max_bytes:
                raise _too_large(max_bytes)
        elif isinstance(event, h11.EndOfMessage):
            return b"".join(pieces)
        elif not isinstance(event, h11.InformationalResponse):
            raise EOFError


def _redirect(response: h11.Response, max_bytes: int) -> str | None:
    """Return the redirect target of ``response``; None if the content follows. Raises
    `NotFetched`."""
    headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}
    status = response.status_code
    if status in (301, 302, 303, 307, 308) and "location" in headers:
        return headers["location"]
    if status != 200:
        raise NotFetched(f"was not returned by its host (status {status}).")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise NotFetched("was sent compressed.")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    return None


def _too_large(max_bytes: int) -> NotFetched:
    return NotFetched(f"exceeds the {max_bytes} bytes left for images.")


def is_public_address(text: str) -> bool:
    """Return whether ``text`` is a public internet address, also if it embeds another one."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            inner = address.ipv4_mapped or address.sixtofour
            # Deprecated but still in use: in QEMU's networks the host is fec0::2.
            if address.teredo is not None or address.is_site_local or address in _COMPATIBLE:
                return False
            if address in _NAT64:
                inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
            if inner is not None:
                return is_public_address(str(inner))
        return address.is_global and not address.is_multicast
    return False
