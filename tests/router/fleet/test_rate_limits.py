"""Requests and tokens per minute: in memory, and in a Redis that two routers share."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client

from router.errors import InvalidRequest, TooManyRequests
from router.fleet.metrics.prometheus import Metrics
from router.fleet.tenants.rate_limits import RateLimits
from router.fleet.tenants.rate_windows import MemoryWindows, RateWindows
from router.fleet.tenants.tenant import Tenant
from tests.conftest import in_loop
from tests.router.conftest import StartServer, bearer, begin, eventually, key_flag

CLIENTS = 120
LOST_S = 2.0


class Redis:
    """A Redis of our own, behind a socket in a private directory."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "redis"
        self.url = f"redis+unix://{self.socket}"
        self.start()

    def start(self) -> None:
        words = ["redis-server", "--port", "0", "--unixsocket", str(self.socket)]
        words += ["--save", "", "--appendonly", "no", "--dir", str(self.socket.parent)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        eventually(self.socket.exists, 30)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(60)
        self.socket.unlink(missing_ok=True)


@pytest.fixture
def redis() -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine")
    with tempfile.TemporaryDirectory(prefix="rd-") as directory:
        server = Redis(Path(directory))
        yield server
        server.stop()


# -- windows -------------------------------------------------------------------


@pytest.fixture
def now() -> list[float]:
    """Return a time that a test sets, for `MemoryWindows`."""
    return [0.0]


@pytest.fixture
def windows(now: list[float]) -> MemoryWindows:
    return MemoryWindows(clock=lambda: now[0])


@in_loop
async def test_no_minute_uses_more_than_the_limit(windows: MemoryWindows, now: list[float]) -> None:
    taken: list[float] = []
    while now[0] < 300:
        if await windows.acquire_entry("x", 10, 60):
            taken.append(now[0])
        now[0] += 0.7
        recent = sum(at > now[0] - 60 for at in taken)
        assert (await windows.get_moving_window("x", 10, 60))[1] in (recent, recent + 1)
    for began in taken:
        assert sum(began <= at < began + 60 for at in taken) <= 10
    assert len(taken) >= 45


@in_loop
async def test_small_amounts_take_little_memory(windows: MemoryWindows, now: list[float]) -> None:
    for _ in range(7000):
        await windows.acquire_entry("x", 10**9, 60)
        now[0] += 0.01
    assert len(windows._entries["x"]) <= 1001


@pytest.mark.parametrize("shared", [False, True])
@in_loop
async def test_what_is_said_of_limits_is_true(shared: bool, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis").url if shared else None
    limits = RateLimits(url, Metrics("test"))
    tenant = Tenant(name="a", requests_per_minute=3, tokens_per_minute=10_000)
    headers: dict[str, str] = {}
    for left in (2, 1, 0):
        await limits.admit_request(tenant, headers)
        assert headers["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(TooManyRequests) as caught:
        await limits.admit_request(tenant, headers)
    assert 58 <= (caught.value.retry_after_s or 0) <= 61
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-reset-requests"] in ("59s", "1m0s", "1m1s")
    # Another tenant has its own.
    await limits.admit_request(Tenant(name="b", requests_per_minute=1), headers)

    await limits.admit_prompt(tenant, 6000, headers)
    assert int(headers["x-ratelimit-remaining-tokens"]) == pytest.approx(4000, abs=3)
    limits.on_generated(tenant, 3001)
    await limits.admit_prompt(tenant, 500, headers)
    assert int(headers["x-ratelimit-remaining-tokens"]) == pytest.approx(499, abs=3)
    limits.on_generated(tenant, 2000)  # what runs goes on, and is counted
    with pytest.raises(TooManyRequests, match="has 0 of 10000 tokens"):
        await limits.admit_prompt(tenant, 1, headers)
    with pytest.raises(InvalidRequest, match="is limited to 10000 tokens per minute"):
        await limits.admit_prompt(tenant, 10_001, headers)
    await limits.close()


@in_loop
async def test_a_retry_at_the_time_said_succeeds(windows: MemoryWindows, now: list[float]) -> None:
    rates = RateWindows(None, Metrics("test"))
    rates._own = windows
    for at, amount in ((0.0, 50), (10.0, 30), (40.0, 20)):
        now[0] = at
        assert await rates.acquire("x", 100, amount)
    for amount in (1, 50, 51, 80, 81, 100):
        wait_s = await rates.wait_s("x", 100, amount)
        assert not await rates.acquire("x", 100, amount)
        now[0] = 40.0 + wait_s - 1
        assert await rates.used("x") + amount > 100, "a shorter time would do"
        now[0] = 40.0 + wait_s
        assert await rates.used("x") + amount <= 100
        now[0] = 40.0


# -- servers -------------------------------------------------------------------


async def flood(urls: list[str]) -> list[httpx.Response]:
    """Return the answers to requests of many clients at once, spread over ``urls``."""
    body = {"prompt": "hello", "max_tokens": 2}
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(timeout=60, limits=limits, headers=bearer("limited")) as http:
        paths = [f"{urls[i % len(urls)]}/v1/completions" for i in range(CLIENTS)]
        return await asyncio.gather(*(http.post(path, json=body) for path in paths))


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_limit_holds_to_within_one_request_under_many_clients(
    num_routers: int, request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Path
) -> None:
    flags = [key_flag(tmp_path, "limited name=limited rpm=80", "other")]
    flags += ["--max-concurrent-requests=0", "--max-queue-size=1000", "--admin-key=boss"]
    if num_routers > 1:
        flags.append(f"--limits-url={request.getfixturevalue('redis').url}")
    servers = [start_server(*flags) for _ in range(num_routers)]
    for server in servers:
        server.join("hi", max_sequences=64)
    began = time.monotonic()
    answers = asyncio.run(flood([server.url for server in servers]))
    took_s = time.monotonic() - began
    assert took_s < 55, "the machine is too slow for this test"
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and abs(statuses.count(200) - 80) <= 1
    for answer in answers:
        assert answer.headers["x-ratelimit-limit-requests"] == "80"
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert 60 - took_s - 1 <= int(answer.headers["retry-after"]) <= 61
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    remaining = [int(a.headers["x-ratelimit-remaining-requests"]) for a in answers]
    assert min(remaining) == 0 and (num_routers > 1 or max(remaining) == 79)
    scrapes = [server.client.get("/metrics", headers=bearer("boss")) for server in servers]
    metrics = "".join(scrape.text for scrape in scrapes)
    assert 'key_refusals_total{code="rate_limit_exceeded",key="limited"}' in metrics
    assert 'key_requests_total{key="limited",status="200"}' in metrics


def test_tokens_are_charged_as_they_come_and_not_if_aborted(start_server: StartServer) -> None:
    server = start_server("--rate-limit-tokens=1000")
    engine = server.join("hello world", hold_tokens_after=3)

    def left(answer: httpx.Response) -> int:
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    body = {"prompt": [5] * 10, "max_tokens": 400, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        assert left(answer) == 990
        server.wait_tokens(3)
    eventually(lambda: not engine.running)
    engine.behaviour.hold_tokens_after = None
    whole = server.complete([5] * 10)
    assert left(whole) == 990 - 3 - 10
    used = whole.json()["usage"]["completion_tokens"]
    assert left(server.complete([5] * 10)) == 990 - 3 - 10 - used - 10
    assert 'key_prompt_tokens_total{key=""} 30.0' in server.metrics


def test_what_only_counts_tokens_is_a_request_too(start_server: StartServer) -> None:
    server = start_server("--rate-limit-requests=3")
    server.join()
    counted = ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})
    others = ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})
    answers = [server.client.post(path, json=body) for path, body in (counted, *others, counted)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]


@in_loop
async def test_an_amount_whose_reply_is_lost_counts_once(redis: Redis) -> None:
    open_writers: list[asyncio.StreamWriter] = []
    held: list[asyncio.StreamWriter] = []
    """Connections that have no replies any more."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(redis.socket)
        open_writers.append(writer)

        async def answer() -> None:
            while data := await there.read(2**16):
                if writer not in held:
                    writer.write(data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(2**16):
            back.write(data)
        answering.cancel()
        back.close()
        writer.close()

    path = redis.socket.with_name("relay")
    async with await asyncio.start_unix_server(relay, path):
        windows = RateWindows(f"redis+unix://{path}", Metrics("test"))
        assert await windows.acquire("x", 10, 1)  # connected
        held.extend(open_writers)
        assert await windows.acquire("x", 10, 1)
        async with asyncio.timeout(30):
            while windows._lost and not await windows.recover():
                await asyncio.sleep(0.05)
        assert await windows.used("x") == 2
        await windows.close()


def test_without_its_redis_a_router_counts_alone(redis: Redis, start_server: StartServer) -> None:
    server = start_server(f"--limits-url={redis.url}", "--rate-limit-requests=5")
    server.join("hi")
    assert server.chat("x").headers["x-ratelimit-remaining-requests"] == "4"
    redis.stop()
    began = time.monotonic()
    answers = [server.chat("x") for _ in range(6)]
    assert time.monotonic() - began < 6
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert "limits_store_up 0.0" in server.metrics
    assert server.log.read_text().count("this router counts alone") == 1
    redis.start()
    eventually(lambda: server.chat("x").status_code == 200)
    assert server.log.read_text().count("connected again") == 1
    assert "limits_store_up 1.0" in server.metrics


def test_no_request_notices_what_happens_to_redis(redis: Redis, start_server: StartServer) -> None:
    server = start_server(f"--limits-url={redis.url}", "--rate-limit-requests=1000000")
    server.join("hi", max_sequences=64)
    admin = redis_client.Redis(unix_socket_path=str(redis.socket))
    answers: list[tuple[int, float]] = []
    is_over = threading.Event()

    def load() -> None:
        while not is_over.wait(0.1):
            began = time.monotonic()
            answers.append((server.chat("x").status_code, time.monotonic() - began))

    def away(begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        begin()
        time.sleep(LOST_S)
        end()

    def refuse_writes(command: Callable[..., Any], begin: Any, end: Any) -> None:
        command(*begin)
        eventually(lambda: "limits_store_up 0.0" in server.metrics)
        time.sleep(LOST_S)
        assert "limits_store_up 0.0" in server.metrics, "it takes no amounts, though it answers"
        command(*end)

    stop, go_on = (partial(redis.send, one) for one in (signal.SIGSTOP, signal.SIGCONT))
    faults: list[Callable[[], Any]] = [
        partial(away, redis.stop, redis.start),
        partial(away, stop, go_on),
        partial(refuse_writes, admin.config_set, ("maxmemory", 1), ("maxmemory", 0)),
        partial(refuse_writes, admin.replicaof, ("127.0.0.1", 1), ("no", "one")),
        partial(admin.client_kill_filter, _type="normal"),
        admin.flushall,
    ]
    clients = [begin(load) for _ in range(2)]
    try:
        for fault in faults:
            fault()
            eventually(lambda: "limits_store_up 1.0" in server.metrics)
            count = len(answers)
            eventually(lambda: len(answers) > count + 8)  # noqa: B023
    finally:
        is_over.set()
    for client in clients:
        client.result(60)
    assert {status for status, _ in answers} == {200}
    assert max(seconds for _, seconds in answers) < 6
    log = server.log.read_text()
    assert 4 <= log.count("this router counts alone") <= len(faults)
    assert log.count("this router counts alone") == log.count("connected again")
