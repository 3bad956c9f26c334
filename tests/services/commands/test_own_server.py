"""Servers that a program starts for itself, and how they are asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.localai.server import LoadFailed, OwnServer
from services.supervision import own_server
from shared.network.opener import opener
from tests.conftest import unused_port
from tests.stand_ins.http_server import answering


@pytest.fixture
def tls_file(tmp_path: Path) -> Path:
    """A settings file of a server with TLS."""
    file = tmp_path / "server.toml"
    (tmp_path / "cert.pem").touch()
    file.write_text(f'ssl_certfile = "{tmp_path / "cert.pem"}"\n')
    return file


def test_tls_in_a_file_of_settings_is_refused(
    tls_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model=demo", f"--config={tls_file}"]
    with (
        pytest.raises(own_server.OwnServerFailed, match="has no TLS"),
        own_server.own_server(flags),
    ):
        pytest.fail("it started")
    monkeypatch.setenv("MLX_LM_SERVER_CONFIG", str(tls_file))
    with pytest.raises(LoadFailed, match="has no TLS"):
        asyncio.run(OwnServer.start("demo", ["--model=demo"]))


def test_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    opener.cache_clear()
    with answering(lambda path, headers: (200, path.encode())) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused_port()}")
        assert own_server._is_ready(proxy)
        opener.cache_clear()
        monkeypatch.setenv("http_proxy", proxy)
        with opener().open("http://example.invalid/x", timeout=60) as answer:
            assert answer.read() == b"http://example.invalid/x"
    opener.cache_clear()
