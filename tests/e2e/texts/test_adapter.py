"""A server with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.server import Server, cached_tokens, content_of, serving
from tests.oracle import Oracle
from tests.tiny_models import make_adapter

PROMPT = "it is that they have this one on the way to be at " * 6
"""More than two pages."""


def complete(server: Server) -> tuple[str, int]:
    """Return the text for `PROMPT` and the number of its cached tokens."""
    answer = server.complete(PROMPT, 24, ignore_eos=True)
    return content_of(answer), cached_tokens(answer)


def wait_stored(server: Server) -> None:
    writes = "mlx_lm_server_store_writes_total"
    server.wait_until(lambda: server.metric(writes) >= 2, 30, "pages on the SSD")


@pytest.mark.slow
def test_an_adapter_changes_the_text_and_shares_no_blocks_with_the_plain_model(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    adapter = make_adapter(model, tmp_path / "adapter")
    flags = ("--block-size=4", "--ssd-policy=write_through", "--ssd-cache-dir", f"{tmp_path}/ssd")
    with serving(model, *flags) as server:
        plain, _ = complete(server)
        wait_stored(server)
    with serving(model, *flags, "--adapter-path", str(adapter)) as server:
        text, first = complete(server)
        wait_stored(server)
    assert first == 0
    assert text != plain
    truth = Oracle(model, adapter)
    truth.check(truth.tokenizer.encode(PROMPT), 24, text)
    with serving(model, *flags, "--adapter-path", str(adapter)) as server:
        assert complete(server)[1] > 0, "the adapter's own blocks are not found"
        assert complete(server)[0] == text
