"""Models in the hub's cache, and hubs that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from engine.model.errors import ModelUnavailable
from engine.model.hub import download

ONE_FILE = {"config.json": "{}", "model.safetensors": ""}
INDEX = json.dumps(
    {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
)


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        (ONE_FILE, True),
        ({"config.json": "{}"}, False),
        ({"model.safetensors": ""}, False),
        ({"config.json": "{}", "model-1-of-2.safetensors": ""}, False),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": INDEX,
                "model-1-of-2.safetensors": "",
            },
            False,
        ),
        (ONE_FILE | {"model.safetensors.index.json": "nonsense"}, False),
    ],
)
def test_a_model_that_is_whole_is_used_while_the_hub_fails(
    files: dict[str, str],
    is_whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    def snapshot(model: str, *, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            raise ConnectionResetError("Connection reset by peer")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    if is_whole:
        assert download("me/tiny", lambda done, total: None) == tmp_path
        assert "the hub fails (ConnectionResetError: Connection reset by peer)" in caplog.text
    else:
        with pytest.raises(ModelUnavailable, match="cannot download me/tiny: ConnectionReset"):
            download("me/tiny", lambda done, total: None)
