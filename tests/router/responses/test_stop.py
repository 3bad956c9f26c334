"""Stop sequences of responses, as vLLM and SGLang have them. OpenAI has none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Server, ok


@pytest.mark.parametrize("stop", ["wor", ["x", "wor"]])
def test_a_stop_sequence_ends_a_response(server: Server, stop: Any) -> None:
    server.join("hello world")
    body = ok(server.client.post("/v1/responses", json={"input": "hi", "stop": stop})).json()
    (message,) = body["output"]
    assert (body["status"], message["content"][0]["text"]) == ("completed", "hello ")
