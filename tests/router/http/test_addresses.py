"""Clients without keys are told apart by their addresses, and share fairly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from router.api.body import receive_body
from router.errors import ClientDisconnected, Unavailable
from router.fleet.body_budget import BodyBudget, BodyBytes
from router.fleet.tenants.rate_windows import MemoryWindows
from router.http.acceptor import AddressLimit
from router.http.middleware.addresses import ClientAddresses
from shared.wire import Submit
from tests.conftest import in_loop
from tests.router.conftest import Server, StartServer, begin, error_of, eventually, ok

PROXY = "10.0.0.1"


def address_of(client: str | None, *forwarded: str, trusted: tuple[str, ...] = (PROXY,)) -> str:
    raw = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    scope: dict[str, Any] = {"client": None if client is None else (client, 1)}
    return ClientAddresses(trusted).of(scope, Headers(raw=raw))


@pytest.mark.parametrize(
    ("client", "forwarded", "expected"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["192.0.2.9"], "192.0.2.1"),  # a client's own header
        (PROXY, [], PROXY),
        (PROXY, ["192.0.2.9"], "192.0.2.9"),
        (PROXY, ["1.1.1.1, 192.0.2.9"], "192.0.2.9"),  # the client wrote the first
        (PROXY, ["1.1.1.1", "192.0.2.9"], "192.0.2.9"),
        (PROXY, ["192.0.2.9, 10.0.0.1"], "192.0.2.9"),  # two proxies
        (PROXY, ["nonsense"], PROXY),
        (PROXY, ["192.0.2.9, unknown"], PROXY),
        (PROXY, ["2001:db8::1"], "2001:db8::/64"),
        ("2001:db8::2", [], "2001:db8::/64"),
        ("::ffff:192.0.2.1", [], "192.0.2.1"),
        ("::ffff:10.0.0.1", ["192.0.2.9"], "192.0.2.9"),
        ("fe80::1%eth0", [], "fe80::/64"),
        (None, [], ""),
    ],
)
def test_the_address_of_a_client(client: str | None, forwarded: list[str], expected: str) -> None:
    assert address_of(client, *forwarded) == expected


def test_networks_of_proxies_are_trusted_as_a_whole() -> None:
    forwarded = "192.0.2.9, 10.1.2.3"
    assert address_of("10.9.9.9", forwarded, trusted=("10.0.0.0/8",)) == "192.0.2.9"


def test_an_address_is_alone_a_minute_after_the_last_request_of_another() -> None:
    now = 0.0
    addresses = ClientAddresses((), lambda: now)
    assert addresses.is_alone("a") and addresses.is_alone("a")
    assert not addresses.is_alone("b") and not addresses.is_alone("a")
    now = 59.0
    assert not addresses.is_alone("a")
    now = 61.0
    assert addresses.is_alone("a")


def test_windows_of_addresses_that_left_are_dropped() -> None:
    import asyncio

    now = 0.0
    windows = MemoryWindows(lambda: now)

    async def ask() -> None:
        nonlocal now
        for number in range(20_000):
            now = number / 10
            assert await windows.acquire_entry(f"requests/{number}", 1, 60)

    asyncio.run(ask())
    assert len(windows._entries) < 6_000


def test_no_share_takes_all_memory_of_bodies() -> None:
    budget = BodyBudget(lambda: 1000)
    with budget.reading("greedy") as greedy, budget.reading("other") as other:
        greedy.add(500)
        with pytest.raises(Unavailable) as refused:
            greedy.add(1)
        assert refused.value.code == "too_many_bodies"
        other.add(250)
        assert budget.used_bytes == 750
    assert budget.used_bytes == 0


@in_loop
async def test_one_piece_of_a_large_body_is_read_at_each_turn_of_the_loop() -> None:
    budget, loop = BodyBudget(lambda: 1000), asyncio.get_running_loop()
    turns, read = 0, list[tuple[int, str]]()

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    async def read_body(share: str, pieces: int) -> None:
        with budget.reading(share) as body:
            for _ in range(pieces):
                await body.turn()
                read.append((turns, share))

    loop.call_soon(count)
    left = asyncio.create_task(read_body("greedy", 9))
    greedy = [asyncio.create_task(read_body("greedy", 2)) for _ in range(20)]
    other = asyncio.create_task(read_body("other", 3))
    await asyncio.sleep(0)
    left.cancel()  # holds up nobody
    await other
    assert [share for _, share in read][:6].count("other") == 3
    await asyncio.gather(*greedy)
    assert len(read) == 43
    assert len({turn for turn, _ in read}) == 43


@in_loop
async def test_each_large_piece_of_a_body_and_its_end_take_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = list[BodyBytes]()

    async def turn(body: BodyBytes) -> None:
        turns.append(body)

    async def received(*messages: Any) -> bytes:
        turns.clear()
        left = iter(messages)

        async def receive() -> Any:
            return next(left)

        with BodyBudget(lambda: 10**9).reading("a") as counted:
            request = Request({"type": "http", "headers": []}, receive)
            return (await receive_body(request, 10**9, counted))[0]

    monkeypatch.setattr(BodyBytes, "turn", turn)
    large = {"type": "http.request", "body": bytes(100_000), "more_body": True}
    last = {"type": "http.request", "body": b"x"}
    assert len(await received(large, large, last)) == 200_001
    assert len(turns) == 2
    with pytest.raises(ClientDisconnected):
        await received({"type": "http.disconnect"})
    assert len(turns) == 1, "hundreds may leave at once"


def test_connections_of_an_address_are_limited_unless_it_is_a_proxy() -> None:
    limit = AddressLimit(2, ["10.0.0.0/8"])
    assert [limit.take("192.0.2.1", "192.0.2.1") for _ in range(3)] == [True, True, False]
    assert limit.take("192.0.2.2", "192.0.2.2")
    limit.give_back("192.0.2.1")
    assert limit.take("192.0.2.1", "192.0.2.1")
    assert all(limit.take("10.1.1.1", "10.1.1.1") for _ in range(9))


@pytest.fixture(scope="module")
def open_server(start_server: StartServer) -> Iterator[Server]:
    """A server without keys, behind a proxy on this machine, with little memory for bodies."""
    yield start_server(
        *("--trusted-proxy=127.0.0.1", "--max-concurrent-requests=4"),
        *("--body-memory-mb=1", "--max-request-bytes=300000"),
    )


def from_address(number: int) -> dict[str, str]:
    return {"x-forwarded-for": f"192.0.2.{number}"}


def ask(server: Server, number: int, **fields: Any) -> Any:
    body = {"prompt": "hello", **fields}
    return server.client.post("/v1/completions", json=body, headers=from_address(number))


def test_one_address_does_not_take_all_places(open_server: Server) -> None:
    engine = open_server.join(step_s=0.05, script=lambda _: [5] * 100)
    asked = [begin(ask, open_server, 1, max_tokens=100, ignore_eos=True) for _ in range(2)]
    eventually(lambda: len(engine.got(Submit)) == 2)
    asked.append(begin(ask, open_server, 2, max_tokens=10))
    eventually(lambda: len(engine.got(Submit)) == 3)
    error = error_of(ask(open_server, 1), 429)
    assert error["code"] == "too_many_concurrent_requests" and "This address" in error["message"]
    for one in asked:
        ok(one.result())


def test_priority_has_no_effect_without_keys(open_server: Server) -> None:
    engine = open_server.join("x")
    ok(ask(open_server, 3, priority=9, max_tokens=1))
    ok(ask(open_server, 3, priority=-2, max_tokens=1))
    assert [each.priority for each in engine.got(Submit)][-2:] == [0, -2]


def test_bodies_that_stall_leave_memory_for_those_of_others(open_server: Server) -> None:
    open_server.join("x")
    host, port = open_server.url.removeprefix("http://").split(":")
    large = b"x" * 290_000
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-forwarded-for: 192.0.2.66\r\ncontent-length: {len(large) + 1}\r\n\r\n"
    )
    with ExitStack() as opened:
        stalled = []
        for _ in range(12):  # 3.4 MB of 1.2
            stalled.append(opened.enter_context(socket.create_connection((host, int(port)))))
            stalled[-1].settimeout(30)
            with suppress(ConnectionError):  # it may be refused already
                stalled[-1].sendall(head.encode() + large)
        answers = []
        for one in stalled:
            one.settimeout(0.2)
            with suppress(TimeoutError):
                answers.append(one.recv(100))
        refused = [each for each in answers if b" 503 " in each]
        assert len(refused) >= 9, answers
        assert open_server.metric("request_body_bytes") <= 620_000
        ok(ask(open_server, 5, prompt="y" * 200, max_tokens=1))
        assert (
            error_of(
                open_server.client.post(
                    "/v1/completions",
                    content=b'{"prompt": "' + large,
                    headers={**from_address(66), "content-type": "application/json"},
                ),
                503,
            )["code"]
            == "too_many_bodies"
        )
    eventually(lambda: open_server.metric("request_body_bytes") == 0)


def test_connections_beyond_the_limit_of_an_address_are_closed(start_server: StartServer) -> None:
    server = start_server("--max-connections-per-address=5")
    host, port = server.url.removeprefix("http://").split(":")
    ok(server.client.get("/livez"))  # one, which is kept
    with ExitStack() as opened:
        held = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(9)]
        time.sleep(0.2)
        closed = 0
        for one in held:
            one.settimeout(0.2)
            try:
                closed += one.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                closed += 1
        assert closed == 5
        ok(server.client.get("/livez"))
    assert "--max-connections-per-address" in server.log.read_text()
    eventually(lambda: _is_open(host, int(port)))


def _is_open(host: str, port: int) -> bool:
    with socket.create_connection((host, port)) as one:
        one.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        with suppress(ConnectionError):
            return b" 200 " in one.recv(100)
    return False
