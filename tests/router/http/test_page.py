"""The status and chat page: its files, and the feed of the server's state."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from router.errors import ClientDisconnected, Unavailable
from router.fleet.router import Router
from router.fleet.tenants.tenant import EVERYBODY
from router.http.app import create_app
from router.http.middleware.api_keys import ApiKeys
from router.http.status.feed import MAX_VIEWERS, StatusFeed
from router.http.status.page import PATHS
from router.http.status.sampler import StatusSampler
from shared.settings import Settings
from shared.wire import DraftCounts, DraftStats, EngineStats, StoreStats
from tests.conftest import in_loop
from tests.router.conftest import Server, StartServer, bearer, eventually, ok, until
from tests.router.scripted_engine import make_hello

LINK = re.compile(r"""(?:src|href|from) ?=?["' ]+([\w./-]+\.(?:js|css|svg))""")
AppOf = Callable[..., ASGIApp]
RouterOf = Callable[..., Router]
KEYS = {"api_key": ("sesame",), "metrics_key": "scrape"}


@pytest.fixture
def router_of(socket_dir: Path) -> Iterator[RouterOf]:
    """Return a function that makes a router, with settings, in this process."""
    routers: list[Router] = []

    def make(**settings: Any) -> Router:
        address = f"ipc://{socket_dir}/engines-{len(routers)}"
        routers.append(Router(Settings(**settings), [address], "test"))
        return routers[-1]

    yield make
    for router in routers:
        router.engine_sockets.close()


@pytest.fixture
def app_of(router_of: RouterOf) -> AppOf:
    """Return a function that makes the application of such a router."""

    def make(**settings: Any) -> ASGIApp:
        router = router_of(**settings)
        return create_app(router, ApiKeys(router.settings))

    return make


def get(app: ASGIApp, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


class Viewer:
    """Reads the feed of an application until it has ``count`` pieces, and then goes away."""

    def __init__(
        self, count: int, *, stuck: bool = False, key: str | None = None, method: str = "GET"
    ) -> None:
        self.count, self.stuck, self.method = count, stuck, method
        self.headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self.status = 0
        self.pieces: list[bytes] = []
        self.gone = asyncio.Event()

    async def read(self, app: ASGIApp) -> None:
        scope = {"type": "http", "method": self.method, "path": "/page/feed", "query_string": b""}
        headers = [(b"host", b"localhost"), *self.headers]
        state = {"tenant": EVERYBODY}
        try:
            await app({**scope, "headers": headers, "state": state}, self._receive, self._send)
        except ClientDisconnected:
            assert self.gone.is_set()

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.pieces.append(message["body"])
        if len(self.pieces) >= self.count:
            self.gone.set()
        if self.stuck:
            await self.gone.wait()


def events_of(data: bytes) -> list[tuple[str, Any]]:
    found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", data)
    return [(name.decode(), json.loads(text)) for name, text in found]


# -- files ---------------------------------------------------------------------


def test_the_page_loads_its_own_files_and_nothing_else(app_of: AppOf) -> None:
    app = app_of(**KEYS)  # none of it needs a key
    start = get(app, "/")
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|style=", start.text)
    linked = {f"/{path}" for path in LINK.findall(start.text)}
    for path in sorted(PATHS):
        answer = ok(get(app, path))
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/)\w|innerHTML|eval\(", answer.text), path
        linked |= {f"/page/{name.removeprefix('./')}" for name in LINK.findall(answer.text)}
    assert linked == PATHS
    assert get(app, "/page/nothing.js").status_code == 401  # as any path that there is not
    assert get(app, "/page/..%2fapp.py", **bearer("sesame")).status_code == 404


def test_a_500_has_the_requests_id_and_nothing_of_the_error(app_of: AppOf) -> None:
    app = app_of()
    del app.state.router.model_names  # type: ignore[attr-defined]
    answer = get(app, "/v1/models")
    assert answer.status_code == 500 and answer.headers["x-request-id"]
    assert "model_names" not in answer.text and "Traceback" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_clients_keep_files_and_ask_whether_they_have_changed(app_of: AppOf, path: str) -> None:
    app = app_of()
    etag = get(app, path).headers["etag"]
    again = get(app, path, **{"if-none-match": f'"other", W/{etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag and again.headers["cache-control"] == "no-cache"
    assert get(app, path, **{"if-none-match": '"other"'}).status_code == 200
    assert get(app, path, "HEAD").status_code == 200


def test_below_a_path_addresses_begin_with_it(app_of: AppOf) -> None:
    app = app_of(root_path="/llm/")
    for path in ("/", "/llm", "/llm/"):
        assert '<base href="/llm/">' in get(app, path).text
    assert get(app, "/llm/page/main.js").status_code == 200
    assert "<base" not in get(app_of(), "/").text
    assert get(app, "/llmother").status_code == 404


def test_without_the_page_there_is_nothing(app_of: AppOf) -> None:
    app = app_of(no_page=True)
    for path in ("/page/main.js", "/page/feed"):
        assert get(app, path).status_code == 404
    assert get(app, "/").headers["content-type"].startswith("text/plain")
    assert "/page" not in get(app, "/openapi.json").text
    assert get(app, "/livez").status_code == 200


# -- the feed ------------------------------------------------------------------


def test_the_feed_needs_the_metrics_key_or_else_an_api_key(app_of: AppOf) -> None:
    def statuses(*keys: str | None, **settings: Any) -> list[int]:
        viewers = [Viewer(1, key=key) for key in keys]
        for viewer in viewers:
            asyncio.run(viewer.read(app_of(**settings)))
        return [viewer.status for viewer in viewers]

    assert statuses(None, "sesame", "scrape", **KEYS) == [401, 401, 200]
    assert statuses(None, "scrape", "sesame", api_key=("sesame",)) == [401, 401, 200]
    assert statuses(None) == [200]
    assert get(app_of(), "/page/feed", host="attacker.example").status_code == 403


@in_loop
async def test_viewers_share_samples_and_a_slow_one_hurts_nobody(router_of: RouterOf) -> None:
    feed, before = StatusFeed(router_of()), asyncio.all_tasks()
    quick, other, slow = Viewer(3), Viewer(3), Viewer(9, stuck=True)
    slow_task = asyncio.create_task(slow.read(feed))
    await asyncio.gather(quick.read(feed), other.read(feed))
    assert quick.pieces == other.pieces
    assert [name for name, _ in events_of(quick.pieces[0])] == ["history", "status"]
    times = [events_of(piece)[-1][1]["now"]["at"] for piece in quick.pieces]
    assert all(later - earlier > 0.9 for earlier, later in pairwise(times))
    assert len(slow.pieces) == 1  # and nothing is kept for it
    late = Viewer(1)
    await late.read(feed)
    (_, points), (_, status) = events_of(late.pieces[0])
    assert [point["at"] for point in points][: len(times)] == times
    assert points[-1] == status["now"]
    slow.gone.set()
    await slow_task
    await until(lambda: asyncio.all_tasks() == before)  # nobody looks: the sampler ends


@asynccontextmanager
async def many_viewers(
    app: ASGIApp, key: str | None = None
) -> AsyncIterator[list[tuple[Viewer, asyncio.Task[None]]]]:
    """Yield `MAX_VIEWERS` viewers that have an answer and stay, with their tasks."""
    viewers = [Viewer(10**6, key=key) for _ in range(MAX_VIEWERS)]
    tasks = [asyncio.create_task(viewer.read(app)) for viewer in viewers]
    await until(lambda: all(viewer.pieces for viewer in viewers))
    yield list(zip(viewers, tasks, strict=True))
    for viewer in viewers:
        viewer.gone.set()
    await asyncio.gather(*tasks)


@in_loop
async def test_viewers_are_bounded(app_of: AppOf) -> None:
    app = app_of()
    async with many_viewers(app) as ((first, task), *_):
        refused, welcome = Viewer(1), Viewer(1)
        await refused.read(app)
        assert refused.status == 429 and b"too_many_viewers" in refused.pieces[0]
        first.gone.set()
        await task
        await welcome.read(app)
        assert welcome.status == 200


@in_loop
async def test_no_key_takes_all_places_of_viewers(app_of: AppOf) -> None:
    app = app_of(api_key=("sesame", "other"))
    async with many_viewers(app, "sesame") as viewers:
        refused = [viewer for viewer, _ in viewers if viewer.status == 429]
        assert len(refused) == MAX_VIEWERS // 2
        other = Viewer(1, key="other")
        await other.read(app)
        assert other.status == 200


@in_loop
async def test_a_head_request_for_the_feed_ends(app_of: AppOf) -> None:
    viewer = Viewer(1, method="HEAD")
    await asyncio.wait_for(viewer.read(app_of()), 10)
    assert viewer.status == 200 and viewer.pieces == [b""]


def test_pages_of_other_sites_get_no_feed(app_of: AppOf) -> None:
    mine, bad, app = b"http://localhost", b"https://bad.example", b"https://app.example"
    same, cross, listed = b"same-origin", b"cross-site", (app.decode(),)
    for site, origin, allowed, status in (
        *((None, None, (), 200), (same, None, (), 200), (None, mine, (), 200)),  # a program first
        *((cross, None, (), 403), (None, bad, (), 403)),  # plain http addresses are told no site
        *((cross, app, listed, 200), (cross, bad, listed, 403), (cross, bad, ("*",), 200)),
        (cross, None, listed, 403),  # an image, for instance
    ):
        viewer, headers = Viewer(1), {b"sec-fetch-site": site, b"origin": origin}
        viewer.headers += [(name, value) for name, value in headers.items() if value is not None]
        asyncio.run(asyncio.wait_for(viewer.read(app_of(cors_origin=allowed)), 60))
        assert viewer.status == status, (site, origin, allowed)


@pytest.mark.parametrize("end", ["drained", "at once", "for another router"])
@in_loop
async def test_the_feed_ends_when_the_server_does(router_of: RouterOf, end: str) -> None:
    router, viewer = router_of(), Viewer(10**6)
    feed = StatusFeed(router)
    task = asyncio.create_task(viewer.read(feed))
    await until(lambda: bool(viewer.pieces))
    match end:
        case "drained":
            await router.drain(0)
        case "at once":
            router.abort_all("now")
        case _:
            router.ending.set()
    await task
    assert viewer.pieces[-1] == b""  # the end of the answer
    with pytest.raises(Unavailable, match="shutting down"):
        await Viewer(1).read(feed)


class FeedReader:
    """Reads the feed of a server on a thread, and keeps the last status."""

    def __init__(self, server: Server) -> None:
        self.status: dict[str, Any] = {}
        self.ended = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: bool(self.status))

    def _read(self) -> None:
        with httpx.stream("GET", f"{self._server.url}/page/feed", timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith('data: {"started"'):
                    self.status = json.loads(line[6:])
        self.ended.set()


def test_the_feed_shows_what_engines_say_and_what_went_wrong(start_server: StartServer) -> None:
    server = start_server()
    reader = FeedReader(server)
    assert reader.status["reasons"] == ["no engine has joined yet"]
    for _ in range(2):
        assert server.chat("x").status_code == 503
    engine = server.join("hello world", name="first")
    assert server.chat("x").status_code == 200

    def engine_shown() -> dict[str, Any]:
        engines: dict[str, Any] = reader.status["engines"]
        return next(iter(engines.values()), {})

    engine.behaviour.store = StoreStats(blocks=7, bytes=2**20, limit_bytes=2**30, state="full")
    engine.behaviour.stats = EngineStats(total_blocks=64, used_blocks=16)
    eventually(lambda: engine_shown().get("blocks", {}).get("used") == 16)
    steps, tokens, status = 0, 0, reader.status

    def busy() -> bool:
        """Generate, a little more each time, and see whether that is shown as a rate."""
        nonlocal steps, tokens, status
        steps, tokens, status = steps + 1, tokens + 4, reader.status
        stats: dict[str, Any] = {"steps_total": steps, "step_seconds_total": 0.02 * steps}
        stats |= {"batch_rows_total": 4 * steps, "generated_tokens_total": tokens}
        stats |= {"prompt_tokens_total": 100, "cached_ram_tokens_total": 60}
        stats |= {"cached_ssd_tokens_total": 20, "prefill_tokens_total": 20}
        stats |= {"drafts": DraftStats(sources={"ngram": DraftCounts(1, 8, 6, 1.5)})}
        engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=25, **stats)
        rates = status["engines"]["first"]["rates"]
        return bool(rates and rates["generated"] > 0 and rates["batch"] == 4.0)

    eventually(busy)
    shown, now = status["engines"]["first"], status["now"]
    assert status["models"][0]["engines"] == ["first"]
    assert shown["rates"]["step_s"] == pytest.approx(0.02, rel=0.01)
    assert now["generated"] > 0 and now["batch"] == 4.0
    assert (now["hit_rate"], now["memory_pressure"]) == (0.8, 0.25)
    assert shown["recent_prompts"] == {"ram": 60, "ssd": 20, "computed": 20}
    assert shown["drafts"] == {"drafted": 8, "accepted": 6, "saved_s": 1.5}
    assert shown["ssd"]["state"] == "full"
    assert reader.status["first_token"]["count"] == 1
    assert reader.status["models"][0]["first_token"]["p50"] > 0
    engine.kill()
    eventually(lambda: engine_shown()["silence_s"] > 2.6)  # one that speaks keeps its name
    server.start_engine("hello world", name="first")
    eventually(lambda: engine_shown()["ready"] and engine_shown()["losses"] == 1)
    joined, lost, refused = reader.status["incidents"]
    wanted = {"subject": "first", "what": "joined", "is_error": False, "count": 2}
    assert wanted.items() <= joined.items()
    assert (lost["subject"], lost["is_error"]) == ("first", True)
    wanted = {"subject": "/v1/chat/completions", "what": "503 no_engine_ready", "count": 2}
    assert (wanted | {"is_error": True}).items() <= refused.items()
    assert refused["request_id"].startswith("req_")
    server.process.send_signal(signal.SIGTERM)
    eventually(reader.ended.is_set)
    assert server.process.wait(60) == 0


def test_the_feed_shows_how_far_long_prompts_are(start_server: StartServer) -> None:
    server = start_server()
    engine = server.join("hello", hold_tokens_after=0, name="only")
    reader = FeedReader(server)
    engine.behaviour.computed_prompt_tokens = 4

    def shown() -> dict[str, int]:
        return reader.status["engines"]["only"]["computing"] or {}

    answers = [server.begin("a rather long question " * 8) for _ in range(2)]
    eventually(lambda: len(engine.running) == 2)
    eventually(lambda: shown().get("prompts") == 2)
    before = shown()
    assert before["computed"] == 8 < before["tokens"]
    engine.behaviour.computed_prompt_tokens = 6
    eventually(lambda: shown() == before | {"computed": 12})
    engine.behaviour.hold_tokens_after = None
    assert all(answer.result(60).status_code == 200 for answer in answers)
    eventually(lambda: not shown())


@in_loop
async def test_a_sample_has_every_engine_of_a_large_fleet(router_of: RouterOf) -> None:
    router, count = router_of(), 40
    for number in range(count):
        hello = make_hello(f"engine-{number}", incarnation=f"{number}")
        router.registry.on_hello(b"\0%d" % number, hello)
    sample = StatusSampler(router).sample(1)
    assert set(sample.engines) == {f"engine-{number}" for number in range(count)}
    assert sample.models[0].engines == [*sample.engines]
