"""A server with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving
from tests.oracle import Oracle
from tests.tiny_models import make_adapter

PROMPT = "it is that they have this one on the way to be at"


def cached(server: Server) -> tuple[str, int]:
    answer = server.complete(PROMPT, 24, ignore_eos=True)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_the_adapter_speaks_and_takes_no_blocks_of_the_plain_model(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    adapter = make_adapter(model, tmp_path / "adapter")
    flags = ("--block-size=4", "--ssd-policy=write_through", "--ssd-cache-dir", f"{tmp_path}/ssd")
    with serving(model, *flags) as server:
        plain, _ = cached(server)
        server.wait_until(lambda: server.metric("mlx_lm_server_store_writes_total") > 5, 30, "kept")
    with serving(model, *flags, "--adapter-path", str(adapter)) as server:
        text, first = cached(server)
        server.wait_until(lambda: server.metric("mlx_lm_server_store_writes_total") > 5, 30, "kept")
    assert first == 0
    assert text != plain
    speaker = Oracle(model, adapter)
    speaker.check(speaker.tokenizer.encode(PROMPT), 24, text)
    with serving(model, *flags, "--adapter-path", str(adapter)) as server:
        assert cached(server)[1] > 0, "what the adapter computed is found again"
        assert cached(server)[0] == text
