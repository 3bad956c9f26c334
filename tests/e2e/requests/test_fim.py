"""Fill-in-the-middle on a whole server: other files in the cache, abandoned requests, all APIs."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, serving
from tests.tiny_models import make_inserting

EXTRA = [
    {"filename": f"{number}.py", "text": f"def f{number}(x):\n    return x + {number}\n" * 8}
    for number in range(4)
]
BLOCK = 16
NUM_ABANDONED, MANY = 200, 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_inserting(tmp_path_factory.mktemp("model"))
    with serving(model, "--no-ssd", _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


def infill(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"input_prefix": "", "input_suffix": "", **fields}
    return server.answer("/infill", **body)


def test_other_files_are_found_in_the_cache(server: Server) -> None:
    warm = infill(server, input_extra=EXTRA, n_predict=0)
    assert (warm["content"], warm["tokens_cached"]) == ("", 0)
    num_extra = warm["tokens_evaluated"] - 3
    for prefix in ("a = f1(", "a = f1(b"):
        answer = infill(
            server, input_extra=EXTRA, input_prefix=prefix, input_suffix=")\n", n_predict=8
        )
        assert num_extra - BLOCK <= answer["tokens_cached"] <= answer["tokens_evaluated"]
        timings = answer["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]
        assert answer["tokens_predicted"] <= 8


def test_every_api_gives_the_same_text(server: Server) -> None:
    prefix, suffix, limit = "the of and", "they be at", 12
    fields = {"prompt": prefix, "suffix": suffix, "temperature": 0, "max_tokens": limit}
    text = server.answer("/v1/completions", **fields)["choices"][0]["text"]
    answer = infill(server, input_prefix=prefix, input_suffix=suffix, n_predict=limit)
    assert answer["content"] == text
    for path in ("/v1/fim/completions", "/fim/completions"):
        (choice,) = server.answer(path, **fields)["choices"]
        assert choice["message"]["content"] == text
    options = {"temperature": 0, "num_predict": limit}
    body = {"model": server.client.get("/v1/models").json()["data"][0]["id"]}
    body |= {"prompt": prefix, "suffix": suffix, "stream": False, "options": options}
    assert server.answer("/api/generate", **body)["response"] == text
    # It is the text after the prompt that the layout makes.
    written = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    assert server.text(written, limit) == text


def test_abandoned_requests_leave_nothing(server: Server) -> None:
    """Editors close the connection when another key is pressed: in the queue, during a prompt, and
    during an answer."""
    infill(server)
    generated = "mlx_lm_server_key_generated_tokens_total"
    before = server.metric(generated)
    choose = random.Random(7)
    for number in range(NUM_ABANDONED):
        body = {
            "input_prefix": f"{number} " * choose.choice([5, 100, 300]),
            "input_suffix": "x",
            "n_predict": MANY,
            "ignore_eos": True,
            "stream": choose.random() < 0.5,
        }
        abandon(server.port, body, choose.choice([0.0, 0.002, 0.01, 0.03]))
    held = "mlx_lm_server_kv_unevictable_bytes"
    waiting = "mlx_lm_server_engine_waiting_sequences"
    server.wait_until(lambda: not server.sequences_in_flight(), what="sequences were left")
    server.wait_until(lambda: not server.metric("active_sequences"), what="rows were left")
    server.wait_until(
        lambda: not (server.metric(held) + server.metric(waiting)), what="memory was left"
    )
    assert server.metric(generated) - before < NUM_ABANDONED * MANY / 4
    assert server.metric("mlx_lm_server_work_waiting") == 0
    began = time.monotonic()
    assert infill(server, n_predict=4, ignore_eos=True)["tokens_predicted"] == 4
    assert time.monotonic() - began < 10


def abandon(port: int, body: dict[str, Any], after_s: float) -> None:
    """Send a request, and close the connection after ``after_s``."""
    content = json.dumps(body).encode()
    head = f"POST /infill HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        time.sleep(after_s)


def test_a_model_without_the_tokens_says_so(tmp_path: Path, tiny_model: Any) -> None:
    with serving(tiny_model("llama"), "--no-ssd") as plain:
        answer = plain.post("/infill", input_prefix="", input_suffix="")
        assert answer.status_code == 501
        answer = plain.post("/v1/completions", prompt="a", suffix="b")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
