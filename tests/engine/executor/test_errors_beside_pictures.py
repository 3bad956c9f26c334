"""The step in flight fails while a picture is encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.vision.encoder import EncoderPass, VisionEncoder
from tests.engine.stream_errors import BrokenPiece
from tests.engine.vision_requests import Seeing
from tests.vision_models import make_vision_model, needs_mlx_vlm

needs_mlx_vlm()


def test_a_picture_does_not_take_the_error_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-vlm reads values while a picture is encoded, which raises what failed before."""
    path = make_vision_model("idefics3", tmp_path / "model")
    with forced_gpu_path():
        one = Seeing(path)
        one.renew()
        broken = BrokenPiece(one.whole, tmp_path / "broken.npy", monkeypatch)
        begin = VisionEncoder.begin

        def reads_values(self: VisionEncoder, *given: Any) -> EncoderPass:
            broken.send()
            assert (mx.ones(2) + 1).tolist() == [2, 2]
            return begin(self, *given)

        monkeypatch.setattr(VisionEncoder, "begin", reads_values)
        one.start("text")
        for _ in range(3):
            one.whole.turn()
        one.run("one")
        broken.check()
        one.assert_same("text", "one")
