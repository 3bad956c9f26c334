"""Who is let in at a CURVE socket, and whose messages are taken."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.network import curve
from shared.network.allow_list import (
    AllowedKey,
    AllowList,
    AllowListError,
    parse_allowed_key,
    read_allow_list,
    write_allow_list,
)
from shared.network.curve import (
    ALLOW_LIST,
    EngineKeyFiles,
    EngineKeys,
    Gatekeeper,
    create_pair,
)

PATIENCE_MS = 20_000
Context = zmq.Context[zmq.Socket[bytes]]


@contextmanager
def guarded(directory: Path, **options: Any) -> Iterator[tuple[Gatekeeper, zmq.Socket[bytes]]]:
    """Yield a gatekeeper with the allow list in ``directory``, and the socket that it guards."""
    context: Context = zmq.Context()
    gatekeeper = Gatekeeper(context, directory, **options)
    socket = context.socket(zmq.ROUTER)
    gatekeeper.protect(socket)
    socket.linger = 0
    socket.bind("tcp://127.0.0.1:*")
    gatekeeper.start()
    try:
        yield gatekeeper, socket
    finally:
        gatekeeper.close()
        socket.close()
        context.term()


def test_keys_for_some_models_are_refused_where_any_model_counts(tmp_path: Path) -> None:
    server = create_pair(tmp_path, "server").public
    bound, free = (create_pair(tmp_path / name, "engine") for name in ("bound", "free"))
    write_allow_list(
        tmp_path / ALLOW_LIST,
        [AllowedKey(bound.public, "bound", frozenset({"small"})), AllowedKey(free.public, "free")],
    )
    refused: list[str] = []
    with guarded(tmp_path, on_refused=refused.append, any_model_only=True) as (gatekeeper, ours):
        address = ours.get_string(zmq.LAST_ENDPOINT)
        context: Context = zmq.Context()
        try:
            peers = [context.socket(zmq.DEALER) for _ in range(2)]
            for pair, peer in zip((bound, free), peers, strict=True):
                EngineKeys(pair, server).protect(peer)
                peer.connect(address)
                peer.send(pair.public.encode())
            assert ours.poll(PATIENCE_MS)
            frames = ours.recv_multipart(copy=False)
            assert frames[-1].bytes == free.public.encode()
            found = gatekeeper.find(frames)
            assert found is not None and found.name == "free"
            while not refused:
                assert not ours.poll(50), "nothing else arrives"
            assert refused == ["key"]
            write_allow_list(tmp_path / ALLOW_LIST, [])
            while gatekeeper.find(frames) is not None:
                assert not ours.poll(50)
        finally:
            context.destroy(linger=0)


KEY = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("xyz", "line 1: 'xyz' is not a public key"),
        (f"{KEY}\n{KEY}", "line 2: the same key is listed twice"),
        (f"{KEY} name=a\n{KEY[::-1]} name=a", "line 2: the name a is given twice"),
        (f"{KEY} rpm=5", "line 1: 'rpm=5': only name= and models= may follow the key"),
        (f"{KEY} name=a.b", "line 1: name: 'a.b' has characters other than letters"),
        (f"{KEY} models=a,", "line 1: models has an empty name"),
    ],
)
def test_a_list_that_makes_no_sense_is_one_line(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "allowed"
    path.write_text(text)
    with pytest.raises(AllowListError, match=error):
        read_allow_list(path)


def test_a_list_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    assert read_allow_list(path) == {}
    path.write_text(f"# a comment\n\n{KEY} models=b,a name=n # another\n")
    (found,) = read_allow_list(path).values()
    assert found == parse_allowed_key(KEY, ["name=n", "models=a,b"])
    assert found.may_serve(["a"]) and found.may_serve(["a", "b"])
    assert not found.may_serve(["a", "c"])
    write_allow_list(path, [found])
    assert path.read_text() == f"{KEY} name=n models=a,b\n"


def test_a_key_that_was_removed_is_out_though_the_list_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"{KEY}\n")
    keys = AllowList(path)
    path.write_text("")

    def no_descriptors(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", no_descriptors)
        with pytest.raises(AllowListError, match="Too many open files"):
            keys.refresh()
    assert keys.find(KEY)
    assert keys.refresh() and not keys.find(KEY)
    path.write_text("no key\n")
    with pytest.raises(AllowListError, match="line 1"):
        keys.refresh()
    assert not keys.refresh(), "it is said once"


def test_keys_that_are_replaced_while_they_are_read_stay_until_the_new_ones_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create_pair(tmp_path, "server")
    old = create_pair(tmp_path, "engine")
    files = EngineKeyFiles(tmp_path)

    def read(path: Path) -> str:
        text = kept(path)
        if path.suffix == ".secret":
            path.unlink()
        return text

    for name in ("engine.key", "engine.secret"):
        (tmp_path / name).unlink()
    new, kept = create_pair(tmp_path, "engine"), curve._read
    secret = (tmp_path / "engine.secret").read_text()
    monkeypatch.setattr(curve, "_read", read)
    assert files.refresh().own == old
    assert "cannot use the new keys yet" in caplog.text
    monkeypatch.undo()
    (tmp_path / "engine.secret").write_text(secret)
    (tmp_path / "engine.secret").chmod(0o600)
    assert files.refresh().own == new
