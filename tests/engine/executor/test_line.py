"""Errors of a device, which it may report late."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from engine.executor.line import DeviceLine
from tests.engine.stream_errors import unreadable

NO_MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory."


def send_unreadable(line: DeviceLine, path: Path) -> None:
    """Send a piece that fails on MLX's own thread, long after all of it is dispatched."""
    broken, slow = unreadable(path), mx.ones((2000, 2000))
    line.send([slow @ slow])
    line.send([broken])


def test_a_piece_is_done_only_once_the_device_has_reported_its_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metal signals the event of a piece before it reports them."""

    def synchronize() -> None:
        raise RuntimeError(NO_MEMORY)

    line = DeviceLine()
    piece = line.send([mx.ones(3) + 1])
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.gpu)
        patch.setattr(mx, "synchronize", synchronize)
        with pytest.raises(RuntimeError, match="Insufficient Memory"):
            line.wait()
    assert piece.elapsed_s is None, "its results would be read"
    line.wait()
    assert piece.elapsed_s is not None


def test_the_error_of_a_piece_that_is_abandoned_is_not_that_of_the_next(tmp_path: Path) -> None:
    line = DeviceLine()
    send_unreadable(line, tmp_path / "broken.npy")
    line.abandon()
    assert line.piece is None
    found = mx.ones(3) + 1
    line.send([found])
    line.wait()
    assert found.tolist() == [2, 2, 2]


def test_the_error_of_a_piece_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    line = DeviceLine()
    send_unreadable(line, tmp_path / "broken.npy")
    with pytest.raises(RuntimeError, match="Unable to read"):
        line.wait()
    line.abandon()


def test_a_line_that_waits_has_nothing_in_flight(tmp_path: Path) -> None:
    line = DeviceLine(waits=True)
    piece = line.send([mx.ones(3) + 1])
    assert line.piece is None
    assert piece.elapsed_s is not None
    with pytest.raises(RuntimeError, match="Unable to read"):
        send_unreadable(line, tmp_path / "broken.npy")
    found = mx.ones(3) + 1
    line.send([found])
    assert found.tolist() == [2, 2, 2]
