"""Penalties, biases and log-probabilities through the whole server, compared with mlx-lm's logits.

Once with a model that has a prefix cache, once with one that has none: its layers keep state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from router.tokens.vocabulary import Vocabulary
from tests.e2e.server import Server, at_once, cached_tokens, serving
from tests.oracle import Oracle, oracle
from tests.tiny_models import EOS, VOCAB_SIZE

PROMPT = [(17 * i * i + 5) % (VOCAB_SIZE - 3) + 3 for i in range(70)]
# No end token is likely enough: every text has its full length.
ENDLESS: dict[str, Any] = {"ignore_eos": True, "logit_bias": {str(i): -100 for i in range(3)}}
CLOSE = 5e-4


class Running(NamedTuple):
    server: Server
    truth: Oracle


@pytest.fixture(scope="module", params=["llama", "mamba"])
def running(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Running]:
    path = tiny_model(request.param)
    with serving(path, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
        yield Running(server, oracle(path))


def logprobs_after(truth: Oracle, tokens: list[int]) -> mx.array:
    """Return the log-probabilities of the model's own distribution: (len(tokens), vocab)."""
    logits = truth.model(mx.array([tokens]), cache=make_prompt_cache(truth.model))[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def penalized(truth: Oracle, prompt: list[int], count: int) -> list[int]:
    """Return a greedy continuation with mlx-lm's processors.

    The repetition penalty sees prompt and output, the other penalties the output only.
    """
    bias = dict.fromkeys(range(3), -100.0)
    everything = make_logits_processors(bias, 1.5, 12)
    generated = make_logits_processors(None, None, None, 0.1, 1000, 0.05, 1000)
    cache = make_prompt_cache(truth.model)
    truth.model(mx.array([prompt[:-1]]), cache=cache)
    out: list[int] = []
    for _ in range(count):
        seen = prompt + out
        logits = truth.model(mx.array([seen[-1:]]), cache=cache)[:, -1]
        for process in everything:
            logits = process(mx.array(seen), logits)
        for process in generated if out else ():
            logits = process(mx.array(out), logits)
        out.append(int(mx.argmax(logits[0])))
    return out


def biased(truth: Oracle, prompt: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        logits = logprobs_after(truth, prompt + out)[-1]
        logits[mx.array([0, 1, 2])] -= 100
        out.append(int(mx.argmax(logits)))
    return out


def test_penalties_and_biases_choose_the_tokens_of_mlx_lm(running: Running) -> None:
    server, truth = running
    name = Vocabulary(truth.tokenizer).unique_name
    count, ask = 100, {"logprobs": 0, **ENDLESS}
    plain = server.complete(PROMPT, count, **ask)["choices"][0]["logprobs"]["tokens"]
    ask |= {
        "repetition_penalty": 1.5,
        "repetition_context_size": 12,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.05,
    }
    expected = [name(token) for token in penalized(truth, PROMPT, count)]
    for _ in range(2):  # the second time with a cached prefix
        tokens = server.complete(PROMPT, count, **ask)["choices"][0]["logprobs"]["tokens"]
        assert tokens == expected != plain


def test_log_probabilities_are_the_models_own(running: Running) -> None:
    server, truth = running
    ids = biased(truth, PROMPT, 8)
    direct = logprobs_after(truth, PROMPT + ids)[len(PROMPT) - 1 :]
    found = server.complete(PROMPT, 8, logprobs=4, **ENDLESS)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(
        [direct[i, token].item() for i, token in enumerate(ids)], abs=CLOSE
    )
    for i, alternatives in enumerate(found["top_logprobs"]):
        best = mx.sort(direct[i])[-4:].tolist()
        assert sorted(alternatives.values())[-4:] == pytest.approx(best, abs=CLOSE)
    # Sampling parameters change which token is chosen, but not its reported probability.
    sampled = {"temperature": 1.3, "top_k": 30, "frequency_penalty": 1.0, "seed": 4, "n": 2}
    first = direct[0].tolist()
    for choice in server.complete(PROMPT, 8, logprobs=4, **ENDLESS, **sampled)["choices"]:
        found = choice["logprobs"]
        assert min(abs(found["token_logprobs"][0] - value) for value in first) < CLOSE
        assert sorted(found["top_logprobs"][0].values())[-4:] == pytest.approx(
            sorted(first)[-4:], abs=CLOSE
        )


def test_a_chat_reports_the_log_probabilities_of_its_text(running: Running) -> None:
    server, truth = running
    prompt = truth.chat("hello there")
    ids = biased(truth, prompt, 8)
    direct = logprobs_after(truth, prompt + ids)[len(prompt) - 1 :]
    answer = server.chat("hello there", 8, logprobs=True, top_logprobs=3, **ENDLESS)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    said = b"".join(bytes(token["bytes"]) for token in content).decode(errors="replace")
    assert said.removeprefix(" ") == choice["message"]["content"].removeprefix(" ")
    assert [token["logprob"] for token in content] == pytest.approx(
        [direct[i, token].item() for i, token in enumerate(ids)], abs=CLOSE
    )
    for i, token in enumerate(content):
        best = sorted(direct[i].tolist())[-3:][::-1]
        found = [other["logprob"] for other in token["top_logprobs"]]
        assert found == pytest.approx(best, abs=CLOSE)


def test_prompt_log_probabilities_do_not_depend_on_the_cache(running: Running) -> None:
    server, truth = running
    prompt = PROMPT[::-1] * 4  # longer than a scored chunk
    direct = logprobs_after(truth, prompt)
    expected = [direct[i, token].item() for i, token in enumerate(prompt[1:])]
    for _ in range(2):
        server.complete(prompt, 1)
        answer = server.complete(prompt, 2, prompt_logprobs=1, echo=True, logprobs=0)
        (choice,) = answer["choices"]
        assert cached_tokens(answer) == 0
        entries = choice["prompt_logprobs"]
        assert entries[0] is None and len(entries) == len(prompt)
        own = [entries[i][str(token)]["logprob"] for i, token in enumerate(prompt) if i]
        assert own == pytest.approx(expected, abs=CLOSE)
        for i, entry in enumerate(entries[1:]):
            best = [value["logprob"] for value in entry.values() if value["rank"] == 1]
            assert best == pytest.approx([mx.max(direct[i]).item()], abs=CLOSE)
        echoed = choice["logprobs"]["token_logprobs"]
        assert echoed[0] is None and len(echoed) == len(prompt) + 2
        assert echoed[1 : len(prompt)] == own
        assert choice["text"].startswith(truth.text(prompt).rstrip("\ufffd"))


def test_a_text_sampled_with_every_parameter_does_not_depend_on_the_load(running: Running) -> None:
    server = running.server
    ask = {
        "temperature": 1.1,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.001,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.005,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "seed": 21,
        **ENDLESS,
    }
    alone = server.text(PROMPT, 20, **ask)

    def complete(number: int) -> str:
        own = {"seed": number, "top_k": number} if number else {}
        return server.text(PROMPT[number:], 25 if number else 20, **ask | own)

    assert at_once(complete, range(6))[0] == alone
    assert server.text(PROMPT, 20, **ask | {"xtc_probability": 0}) != alone


def test_min_tokens_ignore_eos_and_stop_tokens_determine_the_end(running: Running) -> None:
    server = running.server
    eos_first = {"logit_bias": {str(EOS): 100}}
    assert server.complete(PROMPT, 9, **eos_first)["usage"]["completion_tokens"] == 1
    late = server.complete(PROMPT, 9, min_tokens=4, **eos_first)
    assert late["usage"]["completion_tokens"] == 5
    assert late["choices"][0]["finish_reason"] == "stop"
    never = server.complete(PROMPT, 9, ignore_eos=True, **eos_first)
    assert never["usage"]["completion_tokens"] == 9
    assert never["choices"][0]["finish_reason"] == "length"
    other = server.complete(PROMPT, 9, stop_token_ids=[50], logit_bias={"50": 100}, logprobs=0)
    assert other["usage"]["completion_tokens"] == 1 and other["choices"][0]["text"] == ""
    assert other["choices"][0]["logprobs"]["tokens"] == []


def test_choices_share_the_prefill_of_their_prompt(running: Running) -> None:
    server = running.server
    if "prefix-cache" not in server.client.get("/v1/models").json()["data"][0]["capabilities"]:
        pytest.skip("this model has no prefix cache")
    prompt = [(7 * i + 100) % 300 + 3 for i in range(161)]
    prefilled = "mlx_lm_server_prefill_tokens_total"
    generated = "mlx_lm_server_generated_tokens_total"
    before = settled(server, prefilled)
    expected = server.metric(generated) + 4 * 4
    answer = server.complete(prompt, 4, n=4, temperature=1, seed=3, **ENDLESS)
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    # A heartbeat that reports these tokens also reports the whole prefill before them.
    server.wait_until(lambda: server.metric(generated) >= expected, 30, "the beat after the answer")
    assert 160 <= server.metric(prefilled) - before <= 160 + 3 * 16


def settled(server: Server, name: str) -> float:
    """Return a metric of the engine, once the heartbeats report nothing new."""
    seen = -1.0
    while seen != (seen := server.metric(name)):
        time.sleep(2.5)
    return seen
