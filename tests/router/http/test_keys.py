"""API keys: their file, what each may use, and the places that none can take from the others."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from router.fleet.tenants.tenant import Tenant
from router.http.middleware.api_keys import ApiKeys
from router.http.middleware.key_file import KeyFileError, digest, read_tenants
from shared.settings import Settings
from shared.wire import Submit
from tests.conftest import in_loop
from tests.router.conftest import Server, StartServer, bearer, begin, error_of, eventually, key_flag
from tests.router.scripted_engine import ScriptedEngine


def tenants_of(tmp_path: Path, text: str, **flags: Any) -> dict[bytes, Tenant]:
    path = tmp_path / "keys"
    path.write_text(text)
    return read_tenants(Settings(api_key_file=path, **flags))


LINES = """
# comment
plain
sk=1 name=alice rpm=60 tpm=1000 concurrency=3 models=a,b priority=-2  # until May
{ key = "sk-2", name = "bob", models = ["c d"] }
"""
TABLES = """
[[key]]
key = "plain"
[[key]]
key = "sk=1"
name = "alice"
rpm = 60
tpm = 1000
concurrency = 3
models = ["a", "b"]
priority = -2
[[key]]
key = "sk-2"
name = "bob"
models = ["c d"]
"""


@pytest.mark.parametrize("text", [LINES, TABLES])
def test_a_key_has_its_own_limits_or_those_of_the_flags(tmp_path: Path, text: str) -> None:
    tenants = tenants_of(tmp_path, text, rate_limit_requests=7, rate_limit_tokens=8)
    own: dict[str, Any] = {"requests_per_minute": 60, "tokens_per_minute": 1000, "concurrency": 3}
    own |= {"name": "alice", "models": frozenset("ab"), "max_priority": -2, "alone": False}
    assert tenants[digest("sk=1")] == Tenant(**own)
    plain, bob = tenants[digest("plain")], tenants[digest("sk-2")]
    assert plain.name.startswith("key-") and "plain" not in plain.name
    assert (plain.requests_per_minute, plain.tokens_per_minute) == (7, 8)
    assert (bob.models, bob.max_priority) == (frozenset(["c d"]), 0)


def test_a_key_that_is_alone_has_any_priority(tmp_path: Path) -> None:
    (tenant,) = tenants_of(tmp_path, "one").values()
    assert tenant.alone and tenant.priority(99) == 99
    one, other = tenants_of(tmp_path, "one name=x\ntwo name=x").values()
    assert one is not other and one == other and one.alone, "one name is one tenant"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# nothing\n", "has no keys"),
        ("secret rpm", "line 1: only fields like rpm=60 may follow"),
        ("secret rpm=1 rpm=2", "line 1: only fields like rpm=60 may follow"),
        ("ok\nsecret rpm=many", "line 2: Expected `int |"),
        ("secret rpm=-1", "line 1: rpm must be between 0 and"),
        ("secret colour=red", "line 1: Object contains unknown field `colour`"),
        ("secret name=a/b", "line 1: name: only letters"),
        ("secret name=key-1", "line 1: name: only letters"),
        ("secret models=", "line 1: models has an empty name"),
        ("secret\nother\nsecret", "line 3: the key is already set in"),
        ("secret name=x rpm=1\nother name=x rpm=2", "line 2: same name as"),
        ("s\u00e9cret", "a key must be printable ASCII"),
        ('{ key = "secret', "line 1: not valid TOML"),
        ('[[key]]\nkey = "secret\n', "not valid TOML (at line 2"),
        ('{ key = "secret", rpm = ' + 5000 * "9" + " }", "line 1: not valid TOML"),
        ('{ key = "secret", x = ' + 100_000 * "[", "line 1: not valid TOML"),
        ("secret rpm=" + 400 * "9", "line 1: rpm must be between 0 and 1000000000000"),
        ("[key]\na = 1", "something other than [[key]] tables"),
        ('[[key]]\nname = "x"', "key 1: Object missing required field `key`"),
    ],
)
def test_a_bad_key_file_is_one_line_without_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        tenants_of(tmp_path, text)
    line = str(caught.value)
    assert message in line and line.startswith("--api-key-file: ")
    assert "\n" not in line and "secret" not in line.replace(str(tmp_path), "")


# -- a server ------------------------------------------------------------------

HI = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the flag for keys."""
    return key_flag(
        tmp_path_factory.mktemp("keys"),
        *("greedy name=greedy", "modest name=modest", "three concurrency=3 name=three"),
        *("barred models=other name=barred", "urgent priority=5 name=urgent"),
    )


@pytest.fixture(scope="module")
def shared_server(start_server: StartServer, keys: str) -> Server:
    return start_server(keys, "--max-concurrent-requests=8")


def ask(server: Server, key: str, **fields: Any) -> httpx.Response:
    body = {"messages": HI, **fields}
    return server.client.post("/v1/chat/completions", json=body, headers=bearer(key))


def done(answers: list[Future[httpx.Response]]) -> list[httpx.Response]:
    return [answer.result() for answer in answers if answer.done()]


def status_of(server: Server, key: str) -> int:
    return server.client.get("/v1/models", headers=bearer(key)).status_code


@pytest.fixture
def slow_engine(shared_server: Server) -> Iterator[ScriptedEngine]:
    engine = shared_server.join("hi", hold_tokens_after=0, max_sequences=8)
    yield engine
    engine.behaviour.hold_tokens_after = None


def test_one_key_cannot_take_all_places(shared_server: Server, slow_engine: ScriptedEngine) -> None:
    greedy = [begin(ask, shared_server, "greedy") for _ in range(12)]
    eventually(lambda: len(done(greedy)) == 8)
    for refused in done(greedy):
        assert error_of(refused, 429)["code"] == "too_many_concurrent_requests"
        assert int(refused.headers["retry-after"]) >= 1
    # Of the other four places one more tenant gets two, and the next one of those that are left.
    others = [begin(ask, shared_server, "modest") for _ in range(5)]
    eventually(lambda: len(done(others)) == 3)
    more = [begin(ask, shared_server, "urgent") for _ in range(3)]
    eventually(lambda: len(done(more)) == 2)
    slow_engine.behaviour.hold_tokens_after = None
    answers = [answer.result(60).status_code for answer in (*greedy, *others, *more)]
    assert answers.count(200) == 4 + 2 + 1


def test_a_key_has_its_own_bound(shared_server: Server, slow_engine: ScriptedEngine) -> None:
    answers = [begin(ask, shared_server, "three") for _ in range(4)]
    eventually(lambda: len(done(answers)) == 1)
    message = "This API key has reached its limit of 3 concurrent requests."
    assert error_of(done(answers)[0], 429)["message"] == message
    slow_engine.behaviour.hold_tokens_after = None
    assert sorted(answer.result(60).status_code for answer in answers) == [200, 200, 200, 429]


def test_a_model_that_the_key_may_not_use_is_a_403(shared_server: Server) -> None:
    shared_server.join("hi")
    client, headers = shared_server.client, {"x-api-key": "barred"}
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ):
        answer = client.post(path, json=body, headers=headers)
        assert error_of(answer, 403)["type"] == "permission_error", path
    assert client.get("/v1/models", headers=headers).json()["data"] == []
    assert client.get("/v1/models/tiny", headers=headers).status_code == 403
    assert ask(shared_server, "barred", model="nothing").status_code == 404
    assert ask(shared_server, "modest").status_code == 200


def test_a_priority_above_the_keys_is_lowered(shared_server: Server) -> None:
    engine = shared_server.join("hi")
    for key, asked in (("modest", 9), ("modest", -3), ("urgent", 9), ("urgent", 2)):
        assert ask(shared_server, key, priority=asked).status_code == 200
    assert [submit.priority for submit in engine.got(Submit)] == [0, -3, 5, 2]


def test_a_row_is_kept_for_other_keys(start_server: StartServer, keys: str) -> None:
    server = start_server(keys, "--max-concurrent-requests=64")
    engine = server.join("hi", hold_tokens_after=0, max_sequences=4)
    greedy = [begin(ask, server, "greedy") for _ in range(12)]
    eventually(lambda: len(engine.running) == 3)
    time.sleep(0.2)
    assert len(engine.running) == 3
    other = begin(ask, server, "modest")
    eventually(lambda: len(engine.running) == 4)
    engine.behaviour.hold_tokens_after = None
    assert {answer.result(60).status_code for answer in (other, *greedy)} == {200}
    # Engines compute the prompts of all of the first ones before the others.
    assert [submit.priority for submit in engine.got(Submit)[:4]] == [0, -1, -1, 0]


def test_a_greedy_key_delays_no_first_token_of_others(start_server: StartServer, keys: str) -> None:
    """The engine computes one row as fast as all, so the wait is all that may differ."""
    server = start_server(keys, "--max-concurrent-requests=64")
    server.join("hello" * 24, step_s=0.03, max_sequences=4)

    def first_token_s() -> float:
        began = time.monotonic()
        body = {"messages": HI, "stream": True, "max_tokens": 2}
        sent: Any = {"json": body, "headers": bearer("modest")}
        with server.client.stream("POST", "/v1/chat/completions", **sent) as answer:
            for line in answer.iter_lines():
                if '"content":"h' in line:
                    return time.monotonic() - began
        raise AssertionError("no token came")

    alone_s = median(first_token_s() for _ in range(5))
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            if ask(server, "greedy").status_code == 429:
                stop.wait(0.05)

    for _ in range(16):
        begin(flood)
    try:
        eventually(lambda: 'queued_requests{model="tiny"} 13.0' in server.metrics, 10)
        beside_s = median(first_token_s() for _ in range(5))
    finally:
        stop.set()
    assert beside_s <= 2 * alone_s


def test_keys_are_reread_at_changes_or_on_sighup(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")
    server = start_server(f"--api-key-file={path}")
    assert status_of(server, "first") == 200
    path.write_text("second\n")
    eventually(lambda: status_of(server, "second") == 200)
    assert status_of(server, "first") == 401
    path.write_text("")
    eventually(
        lambda: "the API keys, they stay as they were: --api-key-file: " in server.log.read_text()
    )
    path.unlink()
    eventually(lambda: "stay as they were: --api-key-file: cannot read" in server.log.read_text())
    assert status_of(server, "second") == 200
    # Unchanged as far as its status tells: only the signal makes the server read it.
    path.write_text("third0\n")
    eventually(lambda: status_of(server, "third0") == 200)
    before = path.stat()
    with path.open("r+") as file:
        file.write("third1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    time.sleep(1.2)
    assert status_of(server, "third1") == 401
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: status_of(server, "third1") == 200)
    assert "third" not in server.log.read_text()


def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> tuple[Path, ApiKeys]:
    """Return a key file, and its keys, which look at it often once they follow it."""
    monkeypatch.setattr("router.http.middleware.api_keys._POLL_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(content)
    return path, ApiKeys(Settings(api_key_file=path))


@in_loop
async def test_a_key_that_was_removed_is_out_though_the_file_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = followed(tmp_path, monkeypatch, "sk-a name=a\nsk-b name=b\n")
    read_text, failures = Path.read_text, [errno.EMFILE] * 2

    def fails(self: Path, *args: Any, **kwargs: Any) -> str:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", fails)
    following = asyncio.create_task(keys.follow())
    path.write_text("sk-b name=b\n")
    async with asyncio.timeout(10):
        while keys.named("a"):
            await asyncio.sleep(0.01)
    following.cancel()
    assert not failures and keys.named("b")


@in_loop
async def test_a_changed_file_is_read_once_it_was_left_alone_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = followed(tmp_path, monkeypatch, "sk-a name=a\n")
    path.write_text("sk-bb name=b\n")
    events: list[str] = []

    async def poll(event: asyncio.Event, seconds: float | None) -> None:
        events.append("poll")
        await asyncio.sleep(0.01)

    def read(settings: Settings) -> dict[bytes, Tenant]:
        events.append("read")
        return read_tenants(settings)

    monkeypatch.setattr("router.http.middleware.api_keys.wait_at_most", poll)
    monkeypatch.setattr("router.http.middleware.api_keys.read_tenants", read)
    following = asyncio.create_task(keys.follow())
    async with asyncio.timeout(10):
        while events.count("poll") < 4:
            await asyncio.sleep(0.01)
    following.cancel()
    assert events == ["poll", "read", "poll", "poll", "poll"] and keys.named("b")


def test_the_admin_key_is_no_key_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="line 1: the key is the --admin-key"):
        tenants_of(tmp_path, "boss name=alice", admin_key="boss")


def test_a_key_file_that_is_still_written_or_has_the_admin_key_changes_nothing(
    start_server: StartServer, tmp_path: Path
) -> None:
    flag, file = key_flag(tmp_path, "first-key"), tmp_path / "keys"
    server = start_server(flag, "--admin-key=boss")

    def status(key: str) -> int:
        return server.client.get("/v1/models", headers=bearer(key)).status_code

    file.write_text("boss\n")
    eventually(lambda: "the key is the --admin-key" in server.log.read_text(), 30)
    assert status("first-key") == 200 and status("boss") == 401
    with file.open("w") as slow:
        server.process.send_signal(signal.SIGHUP)
        for part in ("second", "-k", "ey nam", "e=x\n"):
            slow.write(part)
            slow.flush()
            assert status("second") == 401 and status("second-k") == 401
            time.sleep(0.3)
    eventually(lambda: status("second-key") == 200, 30)
    assert status("first-key") == 401


def test_metrics_name_keys_only_to_those_who_may_see_them(
    start_server: StartServer, tmp_path: Path
) -> None:
    flag = key_flag(tmp_path, "sesame name=alice")
    server = start_server(flag, "--admin-key=boss")
    ok = server.client.get("/v1/models", headers=bearer("sesame"))
    assert ok.status_code == 200
    for headers, shown in (({}, False), (bearer("sesame"), False), (bearer("boss"), True)):
        text = server.client.get("/metrics", headers=headers).text
        assert ("alice" in text) == shown and "mlx_lm_server_requests_total" in text
    guarded = start_server(flag, "--metrics-key=scrape")
    guarded.client.get("/v1/models", headers=bearer("sesame"))
    assert "alice" in guarded.client.get("/metrics", headers=bearer("scrape")).text
