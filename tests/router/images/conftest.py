from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.conftest import Server
from tests.router.images.pictures import VISION
from tests.router.scripted_engine import ScriptedEngine
from tests.vision_models import make_vision_model, needs_mlx_vlm

Ask = Callable[..., httpx.Response]
"""Asks about images, which are URLs, through the chat API."""


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_mlx_vlm()
    directory = make_vision_model("idefics3", tmp_path_factory.mktemp("models") / "idefics3")
    (directory / "model.safetensors").unlink()  # a router gets no weights
    return directory


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    batch_dir = tmp_path_factory.mktemp("batches")
    return start_server(
        "--restart-wait-s=20", "--max-request-bytes=100000", f"--batch-dir={batch_dir}"
    )


@pytest.fixture(scope="module")
def seeing(server: Server, vision_dir: Path) -> Iterator[ScriptedEngine]:
    """An engine of a model that takes images, and says two tokens."""
    model: dict[str, Any] = {"vision": VISION, "vocab_size": 512, "context_length": 2048}
    script = [ord("h"), ord("i"), 2]
    engine = ScriptedEngine(
        server.address, vision_dir, max_sequences=8, script=lambda submit: script, **model
    )
    server.wait_ready()
    yield engine
    engine.leave()


@pytest.fixture
def ask(server: Server) -> Ask:
    def ask(*urls: str, text: str = "What is this?") -> httpx.Response:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*parts, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return server.client.post("/v1/chat/completions", json=body)

    return ask
