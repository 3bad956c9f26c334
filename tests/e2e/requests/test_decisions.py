"""Typed decisions through a whole server, with the probabilities of mlx-lm's own forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from router.decisions.wording import INSTRUCTIONS
from tests.e2e.server import Server, serving
from tests.oracle import Oracle, oracle

STATE = (
    "Dear shop, my card was charged twice for order 1822 and nobody has replied to my two letters. "
    "I want my money back this week. I am very disappointed. Yours, A. Buyer. "
) * 6
ASKED = {
    "angry": {"type": "noul", "instructions": "Is the writer angry?"},
    "team": {
        "type": "choice",
        "instructions": "Who handles this?",
        "criteria": {"billing": "payments", "shipping": None, "press": None},
    },
    "urgent": {
        "type": "score",
        "instructions": "How urgent?",
        "criteria": ["later", "today", "now"],
    },
}
TEXTS = {
    "angry": ("Question: Is the writer angry?\nAnswer Yes or No.", ("Yes", "No")),
    "team": (
        "Question: Who handles this?\nA. billing: payments\nB. shipping\nC. press\n"
        "Answer with the label of one option.",
        ("A", "B", "C"),
    ),
    "urgent": (
        "Question: How urgent?\n0. later\n1. today\n2. now\nAnswer with the label of one level.",
        ("0", "1", "2"),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--kv-bits", "16", "--served-model-name", "demo")
    with serving("demo-fp32", *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> dict[str, tuple[list[float], float]]:
    """Return the probabilities of each question's labels, and their mass, by mlx-lm."""
    truth: Oracle = oracle(demo_model)
    encode = truth.tokenizer.encode
    found = {}
    for name, (text, labels) in TEXTS.items():
        messages = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"{STATE.strip()}\n\n{text}"},
        ]
        prompt = truth.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        before, after = prompt.split("Question:")
        ids = [piece for part in (before, "Question:" + after) for piece in encode(part)]
        tokens = [encode(label) for label in labels]
        assert all(len(each) == 1 for each in tokens)
        logits = truth.model(mx.array([ids]), cache=make_prompt_cache(truth.model))[0, -1]
        # MLX adds up in 32 bits, which is wrong by 4e-5 for this vocabulary.
        exact = np.array(logits.astype(mx.float32)).astype(np.float64)
        weights = np.exp(exact - exact.max())
        labels_weights = [float(weights[token]) for (token,) in tokens]
        mass = sum(labels_weights)
        found[name] = [each / mass for each in labels_weights], mass / float(weights.sum())
    return found


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"state": STATE.strip(), "questions": ASKED, **fields}
    return server.answer("/v1/systemone", **body)


def numbers(answers: dict[str, Any]) -> dict[str, tuple[list[float], float]]:
    found = {}
    for name, answer in answers.items():
        p = answer.get("noul")
        values = list(answer["probabilities"].values()) if p is None else [p, 1 - p]
        found[name] = values, answer["label_mass"]
    return found


def assert_expected(
    answers: dict[str, Any], expected: dict[str, tuple[list[float], float]]
) -> None:
    for name, (values, mass) in numbers(answers).items():
        assert values == pytest.approx(expected[name][0], abs=1e-5), name
        assert mass == pytest.approx(expected[name][1], abs=1e-5), name


def test_probabilities_are_those_of_mlx_lm_cold_warm_and_beside_streams(
    server: Server, expected: dict[str, tuple[list[float], float]]
) -> None:
    cold = ask(server)
    assert_expected(cold["answers"], expected)
    assert cold["usage"]["cached_tokens"] == 0
    warm = ask(server)
    assert warm["answers"] == cold["answers"]
    shared = cold["usage"]["input_tokens"] - 3 * 40
    assert warm["usage"]["cached_tokens"] > shared - 64
    stopped = threading.Event()

    def stream(number: int) -> None:
        for _ in server.stream(f"Number {number}: once upon a time", 200):
            if stopped.is_set():
                return

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert ask(server)["answers"] == cold["answers"]
        other = ask(server, cache_salt="another")  # computes it all again
        assert other["usage"]["cached_tokens"] == 0
        assert other["answers"] == cold["answers"]
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    for name in ASKED:
        alone = ask(server, questions={name: ASKED[name]}, cache_salt=name)
        assert alone["answers"][name] == cold["answers"][name]


def test_many_questions_are_answered_in_order_and_leave_nothing(server: Server) -> None:
    questions = {
        f"q{number}": {"type": "noul", "instructions": f"Is the order number {number}?"}
        for number in range(40)
    }
    before = server.metric("mlx_lm_server_prefill_tokens_total")
    answer = ask(server, questions=questions, cache_salt="many", samples=2)
    assert list(answer["answers"]) == list(questions)
    computed = server.metric("mlx_lm_server_prefill_tokens_total") - before
    assert computed <= answer["usage"]["input_tokens"] + 64
    server.wait_until(lambda: server.metric("active_sequences") == 0, 30, "idle")


def test_a_client_that_leaves_stops_everything(server: Server) -> None:
    questions = {
        f"q{number}": {"type": "noul", "instructions": f"{number} " * 200} for number in range(200)
    }
    before = server.metric("mlx_lm_server_decisions_total")
    with pytest.raises(httpx.ReadTimeout):
        body = {"state": STATE, "questions": questions}
        server.client.post("/v1/systemone", json=body, timeout=1.5)
    server.wait_until(lambda: server.metric("active_sequences") == 0, 30, "idle")
    assert server.metric("mlx_lm_server_decisions_total") == before
    assert server.metric("mlx_lm_server_aborts_total") >= 1


def test_questions_go_on_on_another_engine_after_a_kill(server: Server) -> None:
    questions = {
        f"q{number}": {"type": "noul", "instructions": f"Is it {number}?"} for number in range(60)
    }
    undisturbed = ask(server, questions=questions, cache_salt="a")["answers"]
    found: dict[str, Any] = {}
    thread = threading.Thread(
        target=lambda: found.update(ask(server, questions=questions, cache_salt="b"))
    )
    thread.start()
    server.wait_until(lambda: server.metric("active_sequences") > 0, 30, "running")
    server.kill("engine")
    thread.join()
    assert found["answers"] == undisturbed
