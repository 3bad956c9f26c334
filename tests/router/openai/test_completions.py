"""Both kinds of OpenAI's completions: their forms, streams, stop strings and sampling fields."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from router.generation.choice import OutputDelta
from router.openai.writer import ChatCompletionWriter, TextCompletionWriter
from router.tokens.logprobs import LogprobsContext
from router.tokens.reply_parser import ReplyDelta
from shared.wire import Abort, SamplingParams, Submit
from tests.router.conftest import Server, error_of, events, eventually, ok
from tests.router.scripted_engine import EOS, ScriptedEngine
from tests.router.tiny_tokenizer import BOS, write_tokenizer
from tests.router.tokens.test_detokenizer import cut_by_hand

HI = [{"role": "user", "content": "x"}]


def streamed(server: Server, **fields: Any) -> list[Any]:
    answer = ok(server.chat("x", **fields, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def submitted(server: Server, **fields: Any) -> Submit:
    """Return what the engine receives for a chat."""
    ok(server.chat("x", **fields))
    return server.engine.got(Submit)[-1]


def text_and_finish(body: Any) -> tuple[str, str]:
    (choice,) = body["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("text", ["plain", '"\\ \n', "日本\u2028", "🌍"])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", [ChatCompletionWriter, TextCompletionWriter])
def test_a_chunk_of_text_alone_is_written_as_any_other(kind: Any, usage: bool, text: str) -> None:
    body: Any = SimpleNamespace(
        model=None, include_usage=usage, continuous_usage=False, hides_reasoning=False
    )
    writer = kind(body, "m")
    vocabulary: Any = SimpleNamespace(unique_name=str)
    generation: Any = SimpleNamespace(logprobs_context=LogprobsContext(vocabulary, 0))
    parts = (ReplyDelta(text=text),)
    for index in (0, 3):
        choice: Any = SimpleNamespace(index=index)
        alone, scored = (
            json.loads(writer.delta(generation, choice, delta)[6:])
            for delta in (OutputDelta(parts), OutputDelta(parts, []))
        )
        assert alone.keys() == scored.keys()
        (one,), (other,) = alone["choices"], scored["choices"]
        assert one.pop("logprobs") is None and other.pop("logprobs") is not None
        assert one == other and alone == scored


def test_a_chat_answer_has_openais_form(served: Server) -> None:
    served.engine.behaviour.cached_tokens = 5
    answer = ok(served.chat("hello", seed=7))
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    message = {"role": "assistant", "content": "hello world", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    (submit,) = served.engine.got(Submit)
    details = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    assert body["usage"] == {
        "prompt_tokens": len(submit.token_ids),
        "completion_tokens": 5,
        "total_tokens": len(submit.token_ids) + 5,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": dict.fromkeys(details, 0),
    }
    assert answer.headers["x-seed"] == "7"
    assert answer.headers["x-request-id"].startswith("req_")


def test_the_template_is_rendered_and_tokenized(server: Server, engine: ScriptedEngine) -> None:
    parts = [{"type": "text", "text": text} for text in ("hel", "lo")]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    ok(server.chat(messages=messages, chat_template_kwargs={"extra": "!"}))
    assert engine.last_prompt == "<|system|>be kind\n<|user|>hello\n<|assistant|>!"
    ok(server.chat("x", chat_template_kwargs={"explode": True, "extra": "?"}))  # "boom", without
    assert engine.last_prompt.endswith("<|assistant|>?")


def test_many_tokens_at_once_are_read_in_pieces(server: Server, engine: ScriptedEngine) -> None:
    text = "hello world" * 60
    engine.says(text)
    engine.behaviour.tokens_per_step = 1000
    assert server.complete(max_tokens=400).json()["choices"][0]["text"] == text
    chunks = events(server.complete(max_tokens=400, stream=True).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize("tokens_per_step", [1, 5])
@pytest.mark.parametrize("text", ["hello world", "日本語 🌍🏽 é", "a\n\n  b ", "ends with \ufffd"])
@pytest.mark.parametrize("stop", [None, ["🌍"], [" w", "b"], ["本語 ", "orl"]])
def test_a_stream_adds_up_to_the_whole_answer(
    server: Server, engine: ScriptedEngine, text: str, stop: list[str] | None, tokens_per_step: int
) -> None:
    engine.says(text)
    engine.behaviour.tokens_per_step = tokens_per_step
    fields: dict[str, Any] = {"stop": stop, "seed": 1}
    whole = server.chat("x", **fields).json()
    chunks = streamed(server, **fields, stream_options={"include_usage": True})
    *deltas, last = chunks
    content = whole["choices"][0]["message"]["content"]
    assert deltas[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in deltas]
    assert "".join(parts) == content
    assert deltas[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in deltas)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert content == cut_by_hand(text, stop or [])


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_stop_string_frees_the_engine_at_once(server: Server, confirmed: bool) -> None:
    """The answer does not wait for the engine to confirm the stop."""
    engine = server.join("one two " * 40, step_s=0.02, cached_tokens=3, answer_aborts=confirmed)
    body = server.chat("x", stop=" two", max_tokens=300).json()
    assert text_and_finish(body) == ("one", "stop")
    assert body["usage"]["completion_tokens"] == 7
    assert not confirmed or body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    eventually(lambda: not engine.running)
    assert engine.got(Abort)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("hello", 1), (["hello", "abc"], 2), ([5, 6, 7], 1), ([[5, 6], [7, 8, 9]], 2)],
)
def test_completions_take_every_form_of_prompt(served: Server, prompt: Any, count: int) -> None:
    engine = served.engine
    body = served.complete(prompt).json()
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == list(range(count))
    assert all(choice["text"] == "hello world" for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == sum(len(s.token_ids) for s in engine.got(Submit))


def test_each_of_n_choices_has_a_seed_of_its_own_and_a_drawn_one_is_reported(
    served: Server,
) -> None:
    body = served.complete(["hello", "abc"], n=3, seed=11).json()
    submits = served.engine.got(Submit)
    seeds = [submit.sampling.seed for submit in submits]
    assert len(body["choices"]) == 6 and seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3 and seeds[0] == 11
    prompts = {tuple(submit.token_ids) for submit in submits}
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    drawn = int(served.chat().headers["x-seed"])
    assert served.engine.got(Submit)[6].sampling.seed == drawn
    # A prompt that is repeated counts as further choices, or its texts would be equal.
    ok(served.complete(["hello", "hello"], seed=11))
    assert [each.sampling.seed for each in served.engine.got(Submit)[7:]] == seeds[:2]


def test_fields_reach_the_engine(served: Server) -> None:
    sampling: dict[str, Any] = {"seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 40}
    sampling |= {"min_p": 0.1, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    sampling |= {"repetition_penalty": 1.2, "repetition_context_size": 64}
    sampling |= {"frequency_penalty": -0.5, "presence_penalty": 1}
    limits: dict[str, Any] = {"max_tokens": 7, "min_tokens": 2, "priority": -3, "cache_salt": "s"}
    without_effect: dict[str, Any] = {"n": 1, "tools": [], "user": "me"}
    without_effect |= {"some_unknown_field": {"deep": [1]}, "response_format": {"type": "text"}}
    lists = {"stop_token_ids": [9, 8], "logit_bias": {"7": 5, "12": -100}}
    submit = submitted(served, **sampling, **limits, **lists, **without_effect)
    assert submit.sampling == SamplingParams(
        **sampling,
        logit_bias=[(7, 5.0), (12, -100.0)],
        xtc_special_ids=sorted([EOS, *served.engine.tokenizer.encode("\n").ids]),
    )
    assert {name: getattr(submit, name) for name in limits} == limits
    assert submit.stop_token_ids == [EOS, 8, 9]


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 50},
    "chat/completions": {"messages": HI, "max_tokens": 50},
    "responses": {"input": "x", "max_output_tokens": 50, "user": "u", "background": False},
    "messages": {"messages": HI, "max_tokens": 50, "metadata": {"user_id": "u"}},
}


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_sampling_fields_of_other_apis_reach_the_engine(served: Server, path: str) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    without_effect = {"service_tier": "auto", "unknown": [1]}
    ok(served.post(f"/v1/{path}", **BODIES[path], **sampling, **without_effect))
    (submit,) = served.engine.got(Submit)
    assert submit.sampling == SamplingParams(**sampling)  # type: ignore[arg-type]
    assert submit.max_tokens == 50


@pytest.mark.parametrize(("fields", "temperature"), [({}, 0.0), ({"xtc_probability": 0.5}, 0.7)])
def test_the_best_of_one_token_is_greedy(served: Server, fields: Any, temperature: float) -> None:
    sampling = submitted(served, temperature=0.7, top_k=1, **fields).sampling
    assert sampling.temperature == temperature


def test_absent_fields_leave_sampling_at_its_defaults(served: Server) -> None:
    neutral: dict[str, Any] = {"repetition_penalty": 0, "logit_bias": {}, "temperature": 0}
    submit = submitted(served, logprobs=False, seed=1, **neutral)
    assert submit.sampling == SamplingParams(seed=1)
    assert submit.logprobs is None and submit.prompt_logprobs is None


def test_ignore_eos_leaves_only_the_clients_stop_tokens(served: Server) -> None:
    assert submitted(served, ignore_eos=True, stop_token_ids=[9]).stop_token_ids == [9]


def test_max_tokens_is_limited_by_the_context(server: Server, engine: ScriptedEngine) -> None:
    server.complete([7] * 500, max_tokens=400)
    assert engine.got(Submit)[0].max_tokens == 12


def test_the_models_generation_config_gives_the_defaults(server: Server, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p="no number")
    server.join_as("warm", "hi", directory=tmp_path)
    sampling = submitted(server, model="warm").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)


@pytest.mark.parametrize("prompt", ["hello", "hello ", [74, 71]])
def test_prompt_and_text_read_on(server: Server, prompt: Any) -> None:
    expected = " world wor"
    server.join(expected)
    choice = server.complete(prompt, logprobs=1).json()["choices"][0]
    assert choice["text"] == expected
    assert choice["logprobs"]["text_offset"][:2] == [0, expected.index("l")]
    stream = events(server.complete(prompt, stream=True).text)
    assert "".join(each["choices"][0]["text"] for each in stream) == expected
    echoed = server.complete(prompt, echo=True, logprobs=1).json()["choices"][0]
    text, scores = echoed["text"], echoed["logprobs"]
    assert text.endswith(expected) and len(text) > len(expected)
    tokens = zip(scores["tokens"], scores["text_offset"], strict=True)
    assert all(text.startswith(token, offset) for token, offset in tokens if offset)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repeat_penalty": 1.2}, (1.2, 64)),
        ({"repeat_penalty": 1.2, "repeat_last_n": 7}, (1.2, 7)),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, (1.2, 0)),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, (1.0, 0)),
        ({"repetition_penalty": 1.2, "repeat_last_n": 7}, (1.2, 7)),
        ({"repeat_penalty": 1.2, "repetition_context_size": 7}, (1.2, 7)),
        ({"repeat_penalty": 0}, (1.0, 64)),
    ],
)
def test_a_penalty_may_have_llama_cpps_name(served: Server, fields: Any, expected: Any) -> None:
    for path, body in BODIES.items():
        ok(served.post(f"/v1/{path}", **body, **fields))
        sampling = served.engine.got(Submit)[-1].sampling
        assert (sampling.repetition_penalty, sampling.repetition_context_size) == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("repetition_penalty", "repeat_penalty"), ("repetition_context_size", "repeat_last_n")],
)
def test_a_field_is_not_given_under_two_names(served: Server, ours: str, theirs: str) -> None:
    error = error_of(served.chat("x", **{ours: 1, theirs: 1}))
    assert error["param"] == theirs and ours in error["message"]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_chunks_have_the_usage_so_far(
    served: Server, include_usage: bool, logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine.behaviour, "step_s", 0.05)  # or one chunk has all tokens
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    chunks = streamed(served, logprobs=logprobs, stream_options=options)
    whole = served.chat("x", logprobs=logprobs).json()["usage"]
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
    assert usages[-1] == whole and (chunks[-1]["choices"] == []) == include_usage


def test_a_text_may_begin_without_special_tokens(server: Server, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = server.join_as("begins", "hi", directory=tmp_path)
    fields: dict[str, Any] = {"model": "begins", "prompt": "ab c", "echo": True, "logprobs": 0}
    ids = tokenizer.encode("ab c", add_special_tokens=False).ids
    for special, begin, first in ((False, [], "a"), (True, [BOS], "<s>")):
        answer = ok(server.complete(**fields, max_tokens=3, add_special_tokens=special))
        assert engine.got(Submit)[-1].token_ids == [*begin, *ids]
        (choice,) = answer.json()["choices"]
        assert choice["text"].startswith("ab c")
        assert choice["logprobs"]["tokens"][0] == first
