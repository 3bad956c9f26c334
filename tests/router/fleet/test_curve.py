"""Engines that join over tcp with CURVE: who is let in, as what, and who is not."""

from __future__ import annotations

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
from tests.conftest import unused_port
from tests.router.conftest import StartServer, eventually, text_of
from tests.router.scripted_engine import ScriptedEngine

Start = Callable[..., ScriptedEngine]


class CurveServer:
    """A router process with a second address, at which only known keys join."""

    def __init__(self, directory: Path, start_server: StartServer, host: str) -> None:
        self.directory = directory
        self.address = f"tcp://{host}:{unused_port()}"
        self.server_key = create_pair(directory, "server").public
        self.server = start_server(f"--engine-socket={self.address}", f"--curve-dir={directory}")

    def make_keys(self, directory: Path, *allowed_as: str) -> EngineKeys:
        """Return the keys of an engine, which are allowed if flags of `allow` are given."""
        made = EngineKeys(create_pair(directory, "engine"), self.server_key)
        if allowed_as:
            self.allow(made, *allowed_as)
        return made

    def allow(self, key: EngineKeys, *flags: str) -> None:
        assert keys.main(["allow", key.own.public, f"--curve-dir={self.directory}", *flags]) == 0

    def refused(self, reason: str) -> float:
        return self.server.metric(f'engines_refused_total{{reason="{reason}"}}')

    def engines(self) -> dict[str, bool]:
        """Return whether engines are ready, by name."""
        models = self.server.client.get("/health").json()["models"]
        return {each["name"]: each["ready"] for model in models for each in model["engines"]}


@pytest.fixture(scope="module")
def curve(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> CurveServer:
    return CurveServer(tmp_path_factory.mktemp("curve"), start_server, "127.0.0.1")


@pytest.fixture
def join(curve: CurveServer, model_dir: Path) -> Iterator[Start]:
    engines: list[ScriptedEngine] = []

    def start(key: EngineKeys | None, address: str = "", **options: Any) -> ScriptedEngine:
        options = {"says": "hello world", "keys": key, **options}
        engines.append(ScriptedEngine(address or curve.address, model_dir, **options))
        return engines[-1]

    yield start
    for engine in engines:
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


def test_an_engine_with_a_known_key_joins_under_the_keys_name(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    key = curve.make_keys(tmp_path, "--name=studio")
    join(key)
    curve.server.wait_ready()
    assert curve.engines()["studio.engine-0"]
    assert text_of(curve.server.chat()) == "hello world"
    text = curve.server.metrics
    assert 'mlx_lm_server_engines_joined_total{model="tiny"}' in text


def test_a_stream_goes_on_while_wrong_keys_are_refused_and_logged_once(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    good = curve.make_keys(tmp_path / "good", "--name=good")
    engine = join(good, hold_tokens_after=1)
    curve.server.wait_ready()
    before = {reason: curve.refused(reason) for reason in ("key", "handshake")}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(curve.server.chat, "x", stream=True)
        eventually(lambda: 1 in engine.sent_counts)
        stranger = curve.make_keys(tmp_path / "stranger")
        others = [
            join(stranger, name="stranger"),
            join(stranger, name="stranger-again"),
            join(None, name="plain"),
            join(EngineKeys(good.own, stranger.own.public), name="another-server"),
        ]
        eventually(lambda: curve.refused("key") >= before["key"] + 2)
        eventually(lambda: curve.refused("handshake") >= before["handshake"] + 2)
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


def test_an_engine_serves_only_models_that_its_key_may_serve(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    key = curve.make_keys(tmp_path, "--name=narrow", "--model=small")
    before = curve.refused("model")
    claims_another = join(key, name="liar", model="tiny")
    join(key, name="honest", model="small")
    eventually(lambda: curve.engines().get("narrow.honest", False))
    eventually(lambda: curve.refused("model") == before + 1)
    assert "narrow.liar" not in curve.engines()
    assert "its key may not serve tiny" in curve.server.log.read_text()
    curve.server.wait_ready()  # the tokenizer is loaded too
    assert curve.server.chat(model="small").status_code == 200
    assert not any(type(message).__name__ == "Submit" for message in claims_another.received)


def test_a_removed_key_is_out_at_once_and_back_when_it_is_allowed_again(
    curve: CurveServer, join: Start, tmp_path: Path
) -> None:
    key = curve.make_keys(tmp_path, "--name=fickle")
    join(key)
    eventually(lambda: curve.engines().get("fickle.engine-0", False))
    assert keys.main(["remove", "fickle", f"--curve-dir={curve.directory}"]) == 0
    eventually(lambda: "fickle.engine-0" not in curve.engines())
    assert "fickle.engine-0 is lost: sent no heartbeat" not in curve.server.log.read_text()
    curve.allow(key, "--name=fickle")
    eventually(lambda: curve.engines().get("fickle.engine-0", False))


def test_an_engine_joins_by_ipv6(start_server: StartServer, join: Start, tmp_path: Path) -> None:
    curve = CurveServer(tmp_path / "server", start_server, "[::1]")
    key = curve.make_keys(tmp_path / "engine")
    curve.allow(key)
    join(key, curve.address)
    eventually(lambda: any(curve.engines().values()))


def test_keys_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    def open_sockets() -> None:
        address = f"tcp://127.0.0.1:{unused_port()}"
        EngineSockets([address], tmp_path, lambda *_: None, lambda: None, lambda _: None).close()

    with pytest.raises(EngineSocketError, match=r"--curve-dir: cannot read .*server.key"):
        open_sockets()
    create_pair(tmp_path, "server")
    (tmp_path / "server.secret").chmod(0o644)
    with pytest.raises(EngineSocketError, match="can be read by other users: chmod 600"):
        open_sockets()
    (tmp_path / "server.secret").chmod(0o600)
    (tmp_path / "allowed").write_text("# nobody\nnonsense\n")
    with pytest.raises(EngineSocketError, match=r"allowed, line 2: 'nonsense' is not a public"):
        open_sockets()
    (tmp_path / "allowed").unlink()
    open_sockets()


def test_keys_that_are_allowed_at_the_same_time_are_all_on_the_list(tmp_path: Path) -> None:
    def allow(number: int) -> int:
        return keys.main(
            ["allow", f"--curve-dir={tmp_path}", f"{number:064x}", f"--name=k{number}"]
        )

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(allow, range(64))) == {0}
    assert len(read_allow_list(tmp_path / "allowed")) == 64


def test_the_command_line_makes_keys_and_says_who_may_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, engine = f"--curve-dir={tmp_path / 's'}", f"--curve-dir={tmp_path / 'e'}"
    assert keys.main(["server", server]) == 0
    public = capsys.readouterr().out.split()[-1]
    assert keys.main(["engine", engine, "--server", public]) == 0
    own = capsys.readouterr().out.split()[-1]
    loaded = EngineKeys.load(tmp_path / "e")
    assert (loaded.own.public, loaded.server) == (own, public)
    assert isinstance(loaded.own, KeyPair) and loaded.own.secret not in (own, public)
    assert (tmp_path / "e" / "engine.secret").stat().st_mode & 0o077 == 0
    assert keys.main(["server", server]) == 1, "keys are not overwritten"
    assert "already has keys of a server" in capsys.readouterr().err
    assert load_public(tmp_path / "s", "server") == public
    assert keys.main(["allow", server, "abc"]) == 1
    assert "'abc' is not a public key" in capsys.readouterr().err
    assert keys.main(["allow", server, own, "--name=a", "--model=x", "--model=y"]) == 0
    assert (tmp_path / "s" / "allowed").read_text() == f"{own} name=a models=x,y\n"
    for name in ("my model", "#1", "a,b"):
        assert keys.main(["allow", server, own, f"--model={name}"]) == 1
    assert "with a comma" in capsys.readouterr().err.splitlines()[-1]
    assert keys.main(["engine", server, "--server", "ab" * 32]) == 1
    assert "has the keys of another server" in capsys.readouterr().err
    assert keys.main(["list", server, "--json"]) == 0
    assert '"models": ["x", "y"]' in capsys.readouterr().out
    assert keys.main(["remove", server, "b"]) == 1
    assert keys.main(["list"]) == 1
    assert "--curve-dir or $MLX_LM_SERVER_CURVE_DIR" in capsys.readouterr().err
