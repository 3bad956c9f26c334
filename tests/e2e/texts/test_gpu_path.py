"""A whole server whose engine computes as on a GPU, with keys and values in 8 bits.

mlx-lm computes every answer once more, over keys and values that it rounds as slots do: the
log-probability of each token has to be the same. So random texts need no ties.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from engine.backend import gpu_path
from engine.cache.quantization import Precision
from engine.proving.oracle import make_rounding_cache
from router.tokens.vocabulary import Vocabulary
from tests.e2e.server import RESUMED, Server, assert_error, at_once, cached_tokens, serving
from tests.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

PATIENCE_S = 120.0
HEAD = [(17 * i * i + 5) % (VOCAB_SIZE - 3) + 3 for i in range(70)]
CLOSE = 5e-3
"""Of log-probabilities. One rounding error in fp32 may change a code."""
ENDLESS: dict[str, Any] = {"ignore_eos": True, "logprobs": 1, "temperature": 0}
SAMPLED = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.1}
LONGEST = 1000
TOKENS = 300
"""So many that an engine is killed before its streams end."""
PATTERN = "[a-z ]{400}"
GRAMMAR = {"guided_regex": PATTERN, "temperature": 1.0, "seed": 3}


class Said(NamedTuple):
    """An answer: the names of its tokens, their log-probabilities, and the text."""

    names: list[str]
    logprobs: list[float]
    text: str

    @classmethod
    def of(cls, choices: Sequence[dict[str, Any]]) -> Said:
        marks = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        return cls(
            [name for each in marks for name in each["tokens"]],
            [value for each in marks for value in each["token_logprobs"]],
            "".join(choice["text"] for choice in choices),
        )


class Truth:
    """mlx-lm, whose cache keeps values rounded to 8 bits."""

    def __init__(self, path: Path) -> None:
        oracle = Oracle(path)
        self._model = oracle.model
        name = Vocabulary(oracle.tokenizer).unique_name
        self._ids = {name(token): token for token in range(VOCAB_SIZE)}
        assert len(self._ids) == VOCAB_SIZE

    def check(self, prompt: list[int], said: Said, *, greedy: bool = False) -> None:
        """Compare the log-probabilities of all tokens of an answer to ``prompt``."""
        ids = [self._ids[name] for name in said.names]
        caches = make_rounding_cache(self._model, Precision(8))
        logits = self._model(mx.array([prompt + ids]), cache=caches)[0, len(prompt) - 1 : -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = mx.take_along_axis(logprobs, mx.array(ids)[:, None], axis=-1)[:, 0]
        assert said.logprobs == pytest.approx(expected.tolist(), abs=CLOSE)
        if greedy:
            assert mx.all(expected > mx.max(logprobs, axis=-1) - CLOSE)


@pytest.fixture(scope="module")
def truth(tiny_model: Callable[..., Path]) -> Truth:
    return Truth(tiny_model("llama"))


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    flags = f"--kv-bits 8 --num-blocks 118 --max-kv-size {LONGEST} --ssd-policy write_through"
    flags += " --streams-share 0.05"  # sequences that arrive together also run together
    environment = {gpu_path.VARIABLE: "1", "_MLX_LM_SERVER_CHECK_INTEGRITY": "1"}
    with serving(tiny_model("llama"), *flags.split(), **environment) as running:
        assert any(gpu_path.VARIABLE in line for line in running.log)
        yield running


def stream(server: Server, prompt: list[int], **fields: Any) -> Iterator[dict[str, Any]]:
    for event in server.stream(prompt, TOKENS, **{**ENDLESS, **fields}):
        if "choices" in event:
            yield event["choices"][0]


def test_answers_are_mlx_lms_with_prefixes_from_ram_and_ssd_and_an_engine_that_is_killed(
    server: Server, truth: Truth
) -> None:
    first, again = (server.complete(HEAD, 20, **ENDLESS) for _ in range(2))
    assert (cached_tokens(first), cached_tokens(again)) == (0, 64)
    for answer in (first, again):
        truth.check(HEAD, Said.of(answer["choices"]), greedy=True)
    server.wait_metric("mlx_lm_server_store_writes_total")
    asked: list[dict[str, Any]] = [{}, SAMPLED, GRAMMAR]
    pairs = [([*HEAD, 5 + i, 9], fields) for i, fields in enumerate(asked)]
    running = [stream(server, prompt, **fields) for prompt, fields in pairs]
    begun = at_once(next, running)
    server.kill("engine")
    rest = at_once(list, running)
    assert server.metric(RESUMED) >= 1
    server.wait_metric("mlx_lm_server_cached_ssd_tokens_total")
    for (prompt, fields), before, after in zip(pairs, begun, rest, strict=True):
        said = Said.of([before, *after])
        truth.check(prompt, said, greedy=not fields)
        if fields is GRAMMAR:
            assert re.fullmatch(PATTERN, said.text)
        else:
            assert len(said.names) == TOKENS


def test_answers_are_mlx_lms_while_sequences_are_preempted(server: Server, truth: Truth) -> None:
    """What is reserved for four answers fits, and they are longer than that."""
    prompts = [[7 + number, *HEAD[number:]] for number in range(4)]
    unevictable = "mlx_lm_server_kv_unevictable_bytes"
    # What is left of the test before would let them run only one after another.
    server.wait_until(lambda: server.metric(unevictable) == 0, PATIENCE_S, "all pages free")
    choices = server.complete(prompts, 700, **ENDLESS)["choices"]  # they start at the same time
    server.wait_metric("mlx_lm_server_preemptions_total")
    server.wait_until(lambda: server.metric(unevictable) == 0, PATIENCE_S, "all pages free")
    for prompt, choice in zip(prompts, choices, strict=True):
        said = Said.of([choice])
        assert len(said.names) == 700
        truth.check(prompt, said, greedy=True)


def test_max_kv_size_is_reported_and_enforced(server: Server) -> None:
    model = server.client.get("/v1/models").json()["data"][0]
    assert LONGEST in model.values()
    refused = server.post("/v1/completions", prompt=[5] * LONGEST, max_tokens=1)
    assert_error(refused, 400, "context_length_exceeded")
    cut = server.complete([5] * (LONGEST - 3), 50, ignore_eos=True)
    assert cut["usage"]["completion_tokens"] == 3
    assert cut["choices"][0]["finish_reason"] == "length"
