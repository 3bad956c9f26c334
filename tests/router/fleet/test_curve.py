"""Engines that join over tcp with CURVE: who is let in, as what, and who is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.fleet.engines.socket import EngineSocketError
from router.fleet.engines.sockets import EngineSockets
from services.commands import keys
from shared.network.allow_list import read_allow_list
from shared.network.curve import EngineKeys, KeyPair, create_pair, load_public
from shared.wire import Submit
from tests.conftest import unused_port
from tests.router.conftest import StartServer, eventually, ok
from tests.router.scripted_engine import ScriptedEngine

Start = Callable[..., ScriptedEngine]


class CurveServer:
    """A router process with a second address, at which only known keys join."""

    def __init__(self, directory: Path, start_server: StartServer) -> None:
        self.flag = f"--curve-dir={directory}"
        self.address = f"tcp://127.0.0.1:{unused_port()}"
        self.server_key = create_pair(directory, "server").public
        self.server = start_server(f"--engine-socket={self.address}", self.flag)

    def make_keys(self, directory: Path, *allowed_as: str) -> EngineKeys:
        """Return the keys of an engine, which are allowed if flags of `allow` are given."""
        made = EngineKeys(create_pair(directory, "engine"), self.server_key)
        if allowed_as:
            self.allow(made, *allowed_as)
        return made

    def allow(self, key: EngineKeys, *flags: str) -> None:
        assert keys.main(["allow", key.own.public, self.flag, *flags]) == 0

    def refused(self, reason: str) -> float:
        return self.server.metric(f'engines_refused_total{{reason="{reason}"}}')

    def engines(self) -> dict[str, bool]:
        """Return whether engines are ready, by name."""
        models = self.server.client.get("/health").json()["models"]
        return {each["name"]: each["ready"] for model in models for each in model["engines"]}

    def wait_for(self, name: str) -> None:
        eventually(lambda: self.engines().get(name, False))


@pytest.fixture(scope="module")
def curve(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> CurveServer:
    return CurveServer(tmp_path_factory.mktemp("curve"), start_server)


@pytest.fixture
def join(curve: CurveServer, model_dir: Path) -> Iterator[Start]:
    def start(key: EngineKeys | None, **options: Any) -> ScriptedEngine:
        options = {"says": "hello world", "keys": key, **options}
        engine = ScriptedEngine(curve.address, model_dir, **options)
        curve.server.engines.append(engine)
        return engine

    yield start
    for engine in curve.server.engines:
        engine.leave()
    eventually(lambda: not any(curve.engines().values()))


def test_one_command_makes_the_keys_of_both_sides(tmp_path: Path) -> None:
    command = ["init", f"--curve-dir={tmp_path}"]
    assert keys.main(command) == 0
    made = EngineKeys.load(tmp_path)
    assert made.server == load_public(tmp_path, "server")
    (allowed,) = read_allow_list(tmp_path / "allowed").values()
    assert (allowed.key, allowed.name, allowed.models) == (made.own.public, "native", None)
    assert keys.main(command) == 1  # those that there are stay
    assert EngineKeys.load(tmp_path) == made


def test_a_stream_goes_on_while_wrong_keys_are_refused_and_logged_once(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    good = curve.make_keys(tmp_path / "good", "--name=good")
    engine = join(good, hold_tokens_after=1)
    curve.server.wait_ready()
    before = {reason: curve.refused(reason) for reason in ("key", "handshake")}
    answer = curve.server.begin("x", stream=True)
    eventually(lambda: 1 in engine.sent_counts)
    stranger = curve.make_keys(tmp_path / "stranger")
    others = [
        join(stranger, name="stranger"),
        join(stranger, name="stranger-again"),
        join(None, name="plain"),
        join(EngineKeys(good.own, stranger.own.public), name="another-server"),
    ]
    for reason, count in before.items():
        eventually(lambda: curve.refused(reason) >= count + 2)  # noqa: B023
    assert not any(other.received for other in others)
    for other in others:
        other.kill()
    engine.behaviour.hold_tokens_after = None
    text = answer.result(60).text
    assert "[DONE]" in text and '"error"' not in text
    assert [name for name, ready in curve.engines().items() if ready] == ["good.engine-0"]
    log = curve.server.log.read_text()
    assert log.count(f"the key {stranger.own.public} is not on the allow list") == 1
    assert "Traceback" not in log


def test_a_key_limits_the_models(curve: CurveServer, join: Start, tmp_path: Path) -> None:
    key = curve.make_keys(tmp_path, "--name=narrow", "--model=small")
    before = curve.refused("model")
    claims_another = join(key, name="liar", model="tiny")
    join(key, name="honest", model="small")
    curve.wait_for("narrow.honest")
    eventually(lambda: curve.refused("model") == before + 1)
    assert "narrow.liar" not in curve.engines()
    assert "its key may not serve tiny" in curve.server.log.read_text()
    curve.server.wait_ready()  # the tokenizer is loaded too
    ok(curve.server.chat(model="small"))
    assert curve.server.metric('engines_joined_total{model="small"}') == 1
    assert not claims_another.got(Submit)


def test_a_removed_key_is_out_at_once_and_back_when_it_is_allowed_again(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    key = curve.make_keys(tmp_path, "--name=fickle")
    join(key)
    curve.wait_for("fickle.engine-0")
    assert keys.main(["remove", "fickle", curve.flag]) == 0
    eventually(lambda: "fickle.engine-0" not in curve.engines())
    assert "fickle.engine-0 is lost: sent no heartbeat" not in curve.server.log.read_text()
    for _ in range(20):  # its connection is open, and it says hello to a router that lost it
        time.sleep(0.1)
        assert "fickle.engine-0" not in curve.engines()
    curve.allow(key, "--name=fickle")
    curve.wait_for("fickle.engine-0")


def test_keys_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    def open_sockets() -> None:
        address = f"tcp://127.0.0.1:{unused_port()}"
        EngineSockets([address], tmp_path, lambda *_: None, lambda: None, lambda _: None).close()

    def refused(said: str) -> None:
        with pytest.raises(EngineSocketError, match=said):
            open_sockets()

    refused(r"--curve-dir: cannot read .*server.key")
    create_pair(tmp_path, "server")
    (tmp_path / "server.secret").chmod(0o644)
    refused("can be read by other users: chmod 600")
    (tmp_path / "server.secret").chmod(0o600)
    (tmp_path / "allowed").write_text("# nobody\nnonsense\n")
    refused(r"allowed, line 2: 'nonsense' is not a public")
    (tmp_path / "allowed").unlink()
    open_sockets()


def test_keys_that_are_allowed_at_the_same_time_are_all_on_the_list(tmp_path: Path) -> None:
    def allow(number: int) -> int:
        words = ["allow", f"--curve-dir={tmp_path}", f"{number:064x}", f"--name=k{number}"]
        return keys.main(words)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(allow, range(64))) == {0}
    assert len(read_allow_list(tmp_path / "allowed")) == 64


def test_commands_make_and_allow_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str, code: int = 0) -> str:
        assert keys.main(list(words)) == code
        out, err = capsys.readouterr()
        return err if code else out

    server, engine = f"--curve-dir={tmp_path / 's'}", f"--curve-dir={tmp_path / 'e'}"
    public = run("server", server).split()[-1]
    own = run("engine", engine, "--server", public).split()[-1]
    loaded = EngineKeys.load(tmp_path / "e")
    assert (loaded.own.public, loaded.server) == (own, public)
    assert isinstance(loaded.own, KeyPair) and loaded.own.secret not in (own, public)
    assert (tmp_path / "e" / "engine.secret").stat().st_mode & 0o077 == 0
    assert "already has keys of a server" in run("server", server, code=1)
    assert load_public(tmp_path / "s", "server") == public, "keys are not overwritten"
    assert "'abc' is not a public key" in run("allow", server, "abc", code=1)
    run("allow", server, own, "--name=a", "--model=x", "--model=y")
    assert (tmp_path / "s" / "allowed").read_text() == f"{own} name=a models=x,y\n"
    for name, said in (("my model", "whitespace"), ("#1", "'#'"), ("a,b", "with a comma")):
        assert said in run("allow", server, own, f"--model={name}", code=1)
    other = run("engine", server, "--server", "ab" * 32, code=1)
    assert "has the keys of another server" in other
    assert '"models": ["x", "y"]' in run("list", server, "--json")
    run("remove", server, "b", code=1)
    assert "--curve-dir or $MLX_LM_SERVER_CURVE_DIR" in run("list", code=1)
