"""Models that embed and rank, beside one that generates: whole servers."""

from __future__ import annotations

import base64
import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.server import Server, assert_error, serving
from tests.router.batches.conftest import BatchClient, line
from tests.text_models import MAX_TOKENS, make_text_model
from tests.tiny_models import make_tiny

MODELS = {
    "chat": ("llama", "generate"),
    "bert": ("bert", "auto"),
    "qwen": ("qwen3", "auto"),
    "ranker": ("xlm_roberta_reranker", "auto"),
    "asked": ("qwen3_reranker", "rerank"),
}
ASKED: dict[str, Any] = {"model": "asked", "query": "what", "documents": ["this"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    tables = []
    for name, (kind, task) in MODELS.items():
        path = folder / name
        make_tiny("llama", path) if name == "chat" else make_text_model(kind, path)
        lines = f'[[model]]\nid = "{name}"\npath = "{path}"\ntask = "{task}"\n'
        if name == "asked":
            lines += "idle_unload_s = 1\n"
        tables.append(lines)
    config = folder / "server.toml"
    config.write_text("\n".join(tables))
    flags = "--admin-key=root", f"--batch-dir={folder / 'batches'}"
    with serving(None, "--config", str(config), *flags) as running:
        for name in MODELS:
            running.wait_until(lambda name=name: state(running, name) != "loading", 240, name)  # type: ignore[misc]
        yield running


def state(server: Server, name: str) -> str:
    return str(server.client.get(f"/v1/models/{name}").json()["state"])


def vectors(server: Server, texts: Any, model: str = "bert", **fields: Any) -> Any:
    data = server.answer("/v1/embeddings", model=model, input=texts, **fields)["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data])


def ranked(server: Server, path: str = "/v1/rerank", **fields: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = server.answer(path, **fields)["results"]
    return results


@pytest.mark.parametrize("model", ["bert", "qwen"])
def test_vectors_come_in_the_order_of_the_texts(server: Server, model: str) -> None:
    texts = [("this is of " * length).strip() for length in (40, 1, 7, 1, 90)]
    together = vectors(server, texts, model)
    assert together.shape == (5, 64)
    assert np.allclose(np.linalg.norm(together, axis=1), 1)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(vectors(server, text, model)[0], vector)


def test_a_batch_embeds_too(server: Server) -> None:
    texts = ["this is", ["one", "of two"], "this " * 5000]
    client = BatchClient(server.url)
    url = "/v1/embeddings"
    given = [line(str(n), url, model="bert", input=text) for n, text in enumerate(texts)]
    done = client.run(given, endpoint=url)
    found = client.lines(done.output_file_id)
    for text, each in zip(texts, found, strict=False):
        data = each["response"]["body"]["data"]
        numbers = np.array([item["embedding"] for item in data])
        assert np.array_equal(numbers, vectors(server, text))
    (failed,) = client.lines(done.error_file_id)
    assert failed["response"]["status_code"] == 400  # it is too long
    assert done.usage.input_tokens > 0 == done.usage.output_tokens


def test_base64_has_the_same_numbers(server: Server) -> None:
    fields = {"model": "bert", "input": "this is", "encoding_format": "base64"}
    answer = server.answer("/v1/embeddings", **fields)
    numbers = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.array_equal(numbers, vectors(server, "this is")[0].astype(np.float32))
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_token_ids_are_taken_as_they_are(server: Server) -> None:
    tokens = server.post("/tokenize", model="bert", prompt="this is").json()["tokens"]
    wanted = vectors(server, "this is")
    assert np.array_equal(vectors(server, tokens), wanted)
    assert np.array_equal(vectors(server, [tokens, tokens]), np.repeat(wanted, 2, 0))


def test_fewer_dimensions_are_the_first_ones_with_the_length_1(server: Server) -> None:
    whole, short = vectors(server, "this")[0], vectors(server, "this", dimensions=8)[0]
    assert np.allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


def test_ollamas_endpoints_give_the_same_vectors(server: Server) -> None:
    texts = ["this is", "of", "x " * MAX_TOKENS]
    wanted = vectors(server, texts, truncate=True).astype(np.float32)
    found = server.answer("/api/embed", model="bert:latest", input=texts)
    assert np.array_equal(np.array(found["embeddings"], np.float32), wanted)
    assert found["model"] == "bert:latest" and found["prompt_eval_count"] == MAX_TOKENS + 9
    one = server.post("/api/embeddings", model="bert", prompt="of").json()
    assert np.array_equal(np.array(one["embedding"], np.float32), wanted[1])
    short = server.post("/api/embed", model="bert", input="of", dimensions=8).json()
    assert np.allclose(short["embeddings"][0], wanted[1][:8] / np.linalg.norm(wanted[1][:8]))
    assert server.post("/api/embed", model="bert", input=[]).json()["embeddings"] == []
    for fields in ({"input": texts, "truncate": False}, {"input": 3}, {"model": "chat"}):
        refused = server.post("/api/embed", **{"model": "bert", "input": "of", **fields})
        assert refused.status_code == 400 and set(refused.json()) == {"error"}
    shown = server.post("/api/show", model="bert").json()
    assert shown["capabilities"] == ["embedding"]


def test_a_prompt_of_the_checkpoint_is_put_before_each_text(server: Server) -> None:
    asked = vectors(server, "this", prompt_name="query")
    assert np.array_equal(asked, vectors(server, "query: this"))
    assert not np.array_equal(asked, vectors(server, "this"))


def test_a_text_that_is_too_long_is_refused_or_cut(server: Server) -> None:
    long = "x " * MAX_TOKENS
    refused = server.post("/v1/embeddings", model="bert", input=["this", long])
    assert assert_error(refused, 400, "context_length_exceeded")["param"] == "input[1]"
    cut = server.post("/v1/embeddings", model="bert", input=[long], truncate=True)
    assert cut.json()["usage"]["prompt_tokens"] == MAX_TOKENS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "title"}, "prompt_name"),
        ({"input": [1], "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "model": "chat"}, "model"),
        ({"input": "a", "model": "ranker"}, "model"),
        ({}, "input"),
    ],
)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", **{"model": "bert", **fields})
    assert assert_error(answer, 400)["param"].startswith(param)


def test_a_model_for_something_else_is_refused_with_the_name_of_one_that_fits(
    server: Server,
) -> None:
    asked = {"model": "bert", "messages": [{"role": "user", "content": "a"}]}
    for path, fields, advice in (
        ("embeddings", {"model": "chat", "input": "a"}, "Use bert or qwen instead."),
        ("chat/completions", asked, "Use chat instead."),
    ):
        error = assert_error(server.post(f"/v1/{path}", **fields), 400, "wrong_task")
        assert advice in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_scores(server: Server, path: str) -> None:
    documents = ["this is", {"text": "that was"}, "of the", "x " * MAX_TOKENS]
    body = {"model": "ranker", "query": "what is", "documents": documents}
    results = ranked(server, path, **body, return_documents=True)
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    by_index = {result["index"]: result for result in results}
    assert by_index[1]["document"] == {"text": "that was"}
    best = ranked(server, path, **body, top_n=2)
    assert [result["index"] for result in best] == [result["index"] for result in results[:2]]
    texts = ["this is", "that was", "of the"]
    pairs = server.answer("/v1/score", model="ranker", text_1="what is", text_2=texts)["data"]
    for pair in pairs:
        assert math.isclose(pair["score"], by_index[pair["index"]]["relevance_score"])
    renamed = server.answer("/v1/score", model="ranker", queries="what is", documents=texts)
    assert renamed["data"] == pairs


def test_a_decoder_ranks_by_the_answer_to_its_prompt(server: Server) -> None:
    def score(**fields: Any) -> float:
        (result,) = ranked(server, **ASKED, **fields)
        return float(result["relevance_score"])

    assert 0 < score() < 1
    assert score(instruction="Find it.") != score()


def test_pairs_that_are_too_much_are_refused(server: Server) -> None:
    too_many = {"documents": ["a"] * 2048}
    for model, fields, code in (
        ("ranker", {"query": "x " * MAX_TOKENS, "documents": ["a"]}, "context_length_exceeded"),
        ("ranker", {"query": "x" * 510, **too_many}, "request_too_large"),
        ("asked", {"query": "x", "instruction": "x" * 510, **too_many}, "request_too_large"),
    ):
        assert_error(server.post("/v1/rerank", model=model, **fields), 400, code)
    for texts, named in (
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"queries": ["a", "b"], "documents": ["c"]}, "documents"),
        ({"text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "queries": "a", "documents": "c"}, "text_1"),
    ):
        refused = server.post("/v1/score", model="ranker", **texts)
        assert assert_error(refused, 400)["param"] == named


def test_a_score_of_a_model_that_embeds_is_the_cosine(server: Server) -> None:
    first, second = vectors(server, ["this", "that"])
    long = "word " * 5000
    for text_1, text_2, name in ((long, ["a", "b"], "text_1"), ("a", ["b", long], "text_2[1]")):
        refused = server.post("/v1/score", model="bert", text_1=text_1, text_2=text_2)
        assert refused.json()["error"]["param"] == name
    refused = server.post("/v1/score", model="ranker", queries=long, documents=["a"])
    assert refused.json()["error"]["param"] == "queries"
    answer = server.answer("/v1/score", model="bert", text_1="this", text_2=["that", "this"])
    scores = [item["score"] for item in answer["data"]]
    assert np.allclose(scores, [first @ second, 1], atol=1e-5)


def test_text_streams_while_texts_are_embedded(server: Server) -> None:
    texts = [f"this is number {i} of the many " * 8 for i in range(300)]
    with ThreadPoolExecutor(1) as pool:
        embedding = pool.submit(vectors, server, texts)
        events = list(server.stream("this is", 60, model="chat"))
        assert events[-1] == {"done": True}
        assert embedding.result().shape == (300, 64)


def long_texts(count: int) -> list[list[int]]:
    """Return token ids of texts that take seconds together."""
    return [[3 + i % 300, 3 + i // 300] + [5] * 480 for i in range(count)]


def test_a_killed_engine_costs_only_time(server: Server) -> None:
    texts = long_texts(400)
    wanted = vectors(server, texts[:3])
    (engine,) = server.pids("/bert ")

    def kill() -> None:
        server.wait_until(lambda: server.sequences_in_flight() > 0, 60, "texts are computed")
        os.kill(engine, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = vectors(server, texts)
    killer.join()
    assert np.array_equal(found[:3], wanted)
    assert any("engine bert-0 is lost" in line for line in server.log)
    assert any("is resubmitted" in line for line in server.log)


def test_a_client_that_leaves_frees_its_texts(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.client.base_url.join("/v1/embeddings"),
            json={"model": "bert", "input": long_texts(900)},
            timeout=0.5,
        )

    def requests() -> int:
        headers = {"authorization": "Bearer root"}
        return int(server.client.get("/admin/requests", headers=headers).json()["total"])

    server.wait_until(lambda: requests() == 0, 20, "requests of a client that left")


def test_a_model_is_unloaded_when_idle_and_loaded_again(server: Server) -> None:
    before = ranked(server, **ASKED)
    server.wait_until(lambda: state(server, "asked") == "unloaded", 60, "unloading")
    assert ranked(server, **ASKED) == before
