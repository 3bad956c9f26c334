"""Keys and traces of requests for vectors."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.stand_ins.collector import Collector, collecting
from tests.text_models import make_text_model


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Collector]]:
    folder = tmp_path_factory.mktemp("model")
    keys = folder / "keys"
    keys.write_text("many name=many\nfew name=few tpm=30\none name=one concurrency=1\n")
    with (
        collecting() as collector,
        serving(
            make_text_model("bert", folder / "bert"),
            *("--no-ssd", f"--api-key-file={keys}", f"--otlp-endpoint={collector.url}"),
            *("--served-model-name", "bert"),
            OTEL_BSP_SCHEDULE_DELAY="200",
        ) as server,
    ):
        yield server, collector


def embed(server: Server, key: str, texts: Any, **headers: str) -> httpx.Response:
    return httpx.post(
        server.client.base_url.join("/v1/embeddings"),
        json={"input": texts},
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=120,
    )


def test_tokens_of_texts_count_against_the_limit_of_a_key(
    traced: tuple[Server, Collector],
) -> None:
    server, _ = traced
    answer = embed(server, "few", [[5] * 10, [6] * 10])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-remaining-tokens"] == "10"
    assert embed(server, "few", [[5] * 11]).status_code == 429
    assert embed(server, "few", [[5] * 31]).json()["error"]["code"] == "prompt_over_rate_limit"
    assert embed(server, "unknown", "a").status_code == 401


def test_a_text_does_not_wait_for_the_many_of_another_key(
    traced: tuple[Server, Collector],
) -> None:
    """The many came first and fill a pass. The engine has all texts before it begins."""
    server, collector = traced
    requests = {"many": [[3 + number] + [5] * 511 for number in range(16)], "one": "this"}
    traces = {key: secrets.token_hex(16) for key in requests}
    with ThreadPoolExecutor() as pool:
        engine = server.kill("engine", signal.SIGSTOP)
        try:
            answers = []
            for key, texts in requests.items():
                parent = f"00-{traces[key]}-{secrets.token_hex(8)}-01"
                answers.append(pool.submit(embed, server, key, texts, traceparent=parent))
                server.wait_until(lambda: server.sequences_in_flight() == len(answers))
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [answer.result().status_code for answer in answers] == [200, 200]
    server.wait_until(lambda: all("texts" in collector.trace(trace) for trace in traces.values()))
    many, one = (collector.trace(trace)["texts"] for trace in traces.values())
    assert one.ended_ns < many.ended_ns


def test_a_trace_has_the_texts_in_the_engine(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    trace_id = secrets.token_hex(16)
    secret = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    assert embed(server, "one", "xyzzy", **secret).status_code == 200
    names = {"POST /v1/embeddings", "texts"}
    server.wait_until(lambda: collector.trace(trace_id).keys() == names)
    spans = collector.trace(trace_id)
    assert spans["texts"].parent_id == spans["POST /v1/embeddings"].span_id
    assert "mlx_lm_server.compute_s" in spans["texts"].attributes
    assert spans["texts"].attributes["mlx_lm_server.engine"] == "engine-0"
    assert not any("xyzzy" in str(span.attributes) for span in collector.spans)
    assert not any("xyzzy" in line for line in server.log)
