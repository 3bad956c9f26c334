"""Images behind URLs: which hosts are asked, and what they can do with the answer."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from router.images.fetching import MAX_AT_ONCE, ImageFetcher, NotFetched, is_public_address
from tests.conftest import in_loop

HOST = "pictures.example"
MOST = 100_000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = builder.public_key(key.public_key()).not_valid_before(now - day)
    builder = builder.not_valid_after(now + day)
    names = x509.SubjectAlternativeName([x509.DNSName(HOST)])
    made = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(private + made.public_bytes(pem))
    return path


def fetched(
    certificate: Path,
    answers: dict[str, bytes],
    url: str,
    *,
    addresses: Sequence[str] = ("127.0.0.1",),
    is_public: Callable[[str], bool] | None = lambda address: True,
    trusted: bool = True,
    hosts: Sequence[str] = (HOST, f".{HOST}"),
) -> tuple[bytes | str, list[str]]:
    """Return what a fetch of ``url`` gives, or why it gives nothing, and the paths that were asked.

    ``answers`` has what the server says by path; it says nothing to others."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        asked.append(path)
        if path not in answers:
            await asyncio.sleep(5)
        writer.write(answers.get(path, b""))
        await writer.drain()
        writer.close()

    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    async def run() -> bytes | str:
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own.load_cert_chain(certificate)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=own)
        port = server.sockets[0].getsockname()[1]
        context = ssl.create_default_context(cafile=str(certificate) if trusted else None)
        fetcher = ImageFetcher(
            hosts, timeout_s=1, port=port, resolve=resolve, is_public=is_public, context=context
        )
        try:
            return await fetcher.fetch(url, MOST)
        except NotFetched as error:
            return str(error)
        finally:
            server.close()

    return asyncio.run(run()), asked


def ok(content: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def to(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()


def test_a_redirect_is_followed_to_allowed_hosts_only(certificate: Path) -> None:
    answers = {"/a?b=1": to("/b"), "/b": ok(b"x"), "/out": to("https://other.example/")}
    answers |= {"/plain": to(f"http://{HOST}/b"), "/loop": to("/loop"), "/odd": to("https://[")}
    assert fetched(certificate, answers, f"https://{HOST}/a?b=1") == (b"x", ["/a?b=1", "/b"])
    words = {"/out": "host", "/plain": "https", "/loop": "redirects", "/odd": "valid URL"}
    for path, word in words.items():
        reason, _ = fetched(certificate, answers, f"https://{HOST}{path}")
        assert word in str(reason), reason


@pytest.mark.parametrize(
    "url",
    [
        *("http://pictures.example/a", "file:///etc/passwd", "https://other.example/a"),
        *("https://pictures.example.evil/a", "https://user@pictures.example/a"),
        *("https://pictures.example:1/a", "https://127.0.0.1/a", "https://[/"),
        *("https://pictures.example/a b", "https://pictures.example/a\x7f"),
        *("https://other.example\x00.pictures.example/a", "https://" + "a" * 9000),
        "https://" + "".join(map(chr, range(0x4E00, 0x6D00))) + "/",  # IDNA would take 20 s
        "https://" + "a" * 64 + ".pictures.example/",
    ],
)
def test_other_urls_are_not_asked(certificate: Path, url: str) -> None:
    reason, asked = fetched(certificate, {"/a": ok(b"x")}, url)
    assert isinstance(reason, str) and not asked


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], []])
def test_a_private_address_is_not_asked(certificate: Path, addresses: list[str]) -> None:
    options: dict[str, Any] = {"addresses": addresses, "is_public": None}  # the fetcher's own
    reason, asked = fetched(certificate, {"/a": ok(b"x")}, f"https://{HOST}/a", **options)
    assert "not public" in str(reason) and not asked


def test_what_a_host_sends_is_bounded(certificate: Path) -> None:
    large = b"x" * (MOST + 1)
    answers = {
        "/large": ok(large),
        "/unsaid": b"HTTP/1.1 200 OK\r\n\r\n" + large,
        "/zip": ok(b"x", "Content-Encoding: gzip"),
        "/gone": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "/nonsense": b"nonsense\r\n\r\n",
        "/cut": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx",
    }
    for path in (*answers, "/silent"):
        reason, asked = fetched(certificate, answers, f"https://{HOST}{path}")
        assert isinstance(reason, str) and asked == [path]


def test_a_certificate_of_another_is_not_believed(certificate: Path) -> None:
    reason, asked = fetched(certificate, {"/a": ok(b"x")}, f"https://{HOST}/a", trusted=False)
    assert "certificate" in str(reason) and not asked


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "::1", "fe80::1%eth0", "fd00::1", "fec0::2", "::127.0.0.1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "no address"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public_address(address)


class SlowFetcher(ImageFetcher):
    """Every image takes a while, and its host is as slow as may be."""

    order: ClassVar[list[str]] = []

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        await asyncio.sleep(0.05)
        self.order.append(url)
        return b""


@in_loop
async def test_no_key_waits_for_the_many_images_of_another_one() -> None:
    fetcher = SlowFetcher([HOST], timeout_s=0.08)
    many = [fetcher.fetch(f"many {n}", MOST, "many") for n in range(5 * MAX_AT_ONCE)]
    begun = [asyncio.ensure_future(each) for each in many]
    await asyncio.sleep(0)
    await fetcher.fetch("other", MOST, "other")
    # And waiting for a place is not held against a host.
    assert await asyncio.gather(*begun) == [b""] * len(many)
    assert SlowFetcher.order.index("other") <= 2 * MAX_AT_ONCE


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event until which lookups of names hang."""
    event = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: event.wait(10) and [])
    return event


@in_loop
async def test_unresolved_names_hold_up_images_alone(hangs: threading.Event) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    fetcher = ImageFetcher([HOST], timeout_s=0.2)
    begun = [asyncio.ensure_future(fetcher.fetch(f"https://{HOST}/a", MOST)) for _ in range(4)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(lambda: "read") == "read"  # such as the file of keys
    found = await asyncio.gather(*begun, return_exceptions=True)
    assert all(isinstance(each, NotFetched) for each in found)
    hangs.set()


@in_loop
async def test_a_hanging_lookup_keeps_the_place_of_its_key(hangs: threading.Event) -> None:
    """Another key waits for a place then, within its own limit, and not for a thread within that of
    its host."""
    fetcher = ImageFetcher([HOST], timeout_s=0.2)
    url = f"https://{HOST}/a"
    many = (fetcher.fetch(url, MOST, "many") for _ in range(MAX_AT_ONCE))
    for late in await asyncio.gather(*many, return_exceptions=True):
        assert "did not arrive" in str(late)
    other = asyncio.ensure_future(fetcher.fetch(url, MOST, "other"))
    await asyncio.sleep(0.4)
    hangs.set()
    with pytest.raises(NotFetched, match="not public"):
        await other
