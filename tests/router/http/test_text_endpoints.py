"""The endpoints for texts, where only a model that generates is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Server, error_of
from tests.router.scripted_engine import ScriptedEngine

EMBED: dict[str, Any] = {"input": "hello"}
RERANK: dict[str, Any] = {"query": "hello", "documents": ["world"]}


@pytest.mark.parametrize(
    ("path", "body", "example"),
    [
        ("/v1/embeddings", EMBED, "Qwen/Qwen3-Embedding-0.6B"),
        ("/v1/rerank", RERANK, "BAAI/bge-reranker-v2-m3"),
    ],
)
def test_an_error_names_a_model_to_load(
    server: Server, engine: ScriptedEngine, path: str, body: dict[str, Any], example: str
) -> None:
    unnamed = error_of(server.client.post(path, json=body))
    assert unnamed["message"].startswith("'model' is required: ")
    wrong = error_of(server.client.post(path, json={**body, "model": "tiny"}))
    assert wrong["code"] == "wrong_task"
    for error in (unnamed, wrong):
        assert error["param"] == "model"
        assert f"No such model is loaded here; load one such as {example}." in error["message"]
