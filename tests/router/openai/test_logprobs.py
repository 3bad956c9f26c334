"""Log-probabilities and echoed prompts, in both of OpenAI's formats, streamed and not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from router.tokens.logprobs import TokenAligner
from router.tokens.vocabulary import Vocabulary
from shared.wire import Submit, TokenLogprobs
from tests.router.conftest import Server, error_of, events, ok
from tests.router.scripted_engine import ScriptedEngine, prompt_scores_of, scores_of
from tests.router.tiny_tokenizer import loaded_as, sentencepiece, write_tokenizer


def logprobs_of(chunks: list[Any]) -> dict[str, list[Any]]:
    """Return the log-probabilities of a stream's chunks, joined."""
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    return {name: [each for part in parts for each in part[name] or ()] for name in parts[0]}


def choices_in(answer: httpx.Response) -> list[Any]:
    """Return the choices of the chunks of a stream."""
    return [event["choices"][0] for event in events(answer.text)]


def test_a_chat_has_each_token_with_its_bytes_and_alternatives(
    server: Server, engine: ScriptedEngine, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    engine.says("hello é")
    choice = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert engine.got(Submit)[0].logprobs == 2
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    ids = tokenizer.encode("hello é").ids
    assert [bytes(token["bytes"]) for token in content] == [b"hello", b" ", b"\xc3", b"\xa9"]
    assert [token["token"] for token in content] == ["hello", " ", "\ufffd", "\ufffd"]
    assert choice["message"]["content"] == "hello é"
    for position, (token, entry) in enumerate(zip(ids, content, strict=True)):
        scores = scores_of(token, position, 2)
        assert entry["logprob"] == scores.chosen
        assert [other["logprob"] for other in entry["top_logprobs"]] == list(scores.top)
        expected = [list(vocabulary.token_bytes(other)) for other in scores.top_ids]
        assert [other["bytes"] for other in entry["top_logprobs"]] == expected
    alone = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert engine.got(Submit)[1].logprobs == 0
    assert alone and all(token["top_logprobs"] == [] for token in alone)


def test_a_completion_has_parallel_lists(
    server: Server, engine: ScriptedEngine, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    text = "hello world é"
    engine.says(text)
    choice = server.complete("x", logprobs=3).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == text
    half = ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["tokens"] == ["hello", " wor", "l", "d", " ", *half]
    assert found["text_offset"] == [0, 5, 9, 10, 11, 12, 12]
    for position, token in enumerate(tokenizer.encode(text).ids):
        scores = scores_of(token, position, 3)
        assert found["token_logprobs"][position] == scores.chosen
        expected = dict(zip(map(vocabulary.unique_name, scores.top_ids), scores.top, strict=True))
        expected.setdefault(vocabulary.unique_name(token), scores.chosen)
        assert found["top_logprobs"][position] == expected


@pytest.mark.parametrize("text", ["hello world", "日本語 🌍🏽 é", " a\n\n  b ", "end \ufffd"])
@pytest.mark.parametrize("stop", [None, ["🌍"], ["lo w", "b"]])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_a_stream_has_the_logprobs_of_its_text_and_of_the_whole_answer(
    server: Server, text: str, stop: list[str] | None, tokens_per_step: int
) -> None:
    server.join(text, tokens_per_step=tokens_per_step)
    body: dict[str, Any] = {"stop": stop, "seed": 1, "prompt": "x", "logprobs": 2}
    whole = server.complete(**body).json()["choices"][0]
    chunks = choices_in(server.complete(**body, stream=True))
    assert logprobs_of(chunks) == whole["logprobs"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    shown = 0
    for chunk in chunks:
        shown += len(chunk["text"])
        assert all(offset <= shown for offset in (chunk["logprobs"] or {}).get("text_offset", ()))
    if whole["finish_reason"] == "stop" and stop and len(whole["text"]) < len(text.strip(" ")):
        assert all(offset < len(whole["text"]) for offset in whole["logprobs"]["text_offset"])
    chat = {"stop": stop, "seed": 1, "logprobs": True, "top_logprobs": 2}
    whole = server.chat("x", **chat).json()["choices"][0]
    content = logprobs_of(choices_in(server.chat("x", **chat, stream=True)))["content"]
    assert content == whole["logprobs"]["content"]
    said = b"".join(bytes(token["bytes"]) for token in content).decode(errors="replace")
    assert said.startswith(whole["message"]["content"].rstrip("\ufffd"))


@pytest.mark.parametrize("prompt", ["hello 🌍 wor", " a ", "é", "<s>hello", [5, 6, 7, 200], [0, 9]])
def test_an_echoed_prompt_comes_before_its_answer(served: Server, prompt: Any) -> None:
    engine = served.engine
    engine.says(" world")
    body = {"prompt": prompt, "echo": True, "seed": 1, "n": 2}
    choices = served.complete(**body).json()["choices"]
    first = engine.got(Submit)[0]
    assert first.logprobs is None and first.prompt_logprobs is None
    if isinstance(prompt, str):
        expected = prompt + " world"
    else:
        ids = [*prompt, *engine.tokenizer.encode(" world").ids]
        expected = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert [choice["text"] for choice in choices] == [expected, expected]
    chunks = choices_in(served.complete(**body, stream=True))
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == expected
        assert mine[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello é wor", [5, 6, 7], "x"])
def test_an_echoed_prompt_has_log_probabilities_too(
    server: Server, engine: ScriptedEngine, vocabulary: Vocabulary, prompt: Any, stream: bool
) -> None:
    engine.says("hello")
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "stream": stream}
    answer = server.complete(**body)
    submits = engine.got(Submit)
    # The first token of a prompt follows nothing, so it has no log-probability.
    wanted = 2 if len(submits[0].token_ids) > 1 else None
    assert [submit.prompt_logprobs for submit in submits] == [wanted, None]
    choices = choices_in(answer) if stream else answer.json()["choices"]
    ids, scores = submits[0].token_ids, prompt_scores_of(submits[0])
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        text, found = "".join(choice["text"] for choice in mine), logprobs_of(mine)
        assert found["token_logprobs"][: len(ids)] == [None, *(own.chosen for own in scores)]
        assert found["top_logprobs"][0] is None
        assert all(len(each) in (2, 3) for each in found["top_logprobs"][1:])
        assert found["tokens"] == [*map(vocabulary.unique_name, ids), "hello"]
        assert found["text_offset"][len(ids)] == len(text) - len("hello")
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_log_probabilities_of_a_prompt_have_vllms_form(served: Server) -> None:
    decode = served.engine.tokenizer.decode
    body = served.complete(["hello wor", "abc"], prompt_logprobs=1, n=2).json()
    submits = served.engine.got(Submit)
    assert [submit.prompt_logprobs for submit in submits] == [1, None, 1, None]
    assert body["choices"][0]["logprobs"] is None
    first, second, third, _ = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first == second and first != third
    assert third[0] is None and len(third) == len(submits[2].token_ids)
    token = submits[2].token_ids[1]
    scores = scores_of(token, 0, 1)
    expected = {token: (scores.chosen, None)} | dict.fromkeys(scores.top_ids, (scores.top[0], 1))
    assert third[1] == {
        str(i): {"logprob": logprob, "rank": rank, "decoded_token": decode([i])}
        for i, (logprob, rank) in expected.items()
    }
    body = served.chat(prompt_logprobs=0).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in served.chat().json()


def test_choices_that_wait_for_the_prompts_scores_do_not_hold_up_the_server(served: Server) -> None:
    """Tokens of the other choices come before the scores, which come with the first choice."""
    answer = ok(served.complete([[5] * 100] * 3, n=4, echo=True, logprobs=2, max_tokens=3))
    assert len(answer.json()["choices"]) == 12
    ok(served.client.get("/livez"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"logprobs": 20, "max_tokens": 200}, "logprobs"),
        ({"echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
    ],
)
def test_too_many_log_probabilities_are_refused(served: Server, fields: Any, param: str) -> None:
    """The fields are small by themselves, and their product is not."""
    prompt = [[5] * 250] * 8
    error = error_of(served.complete(prompt, n=16, **fields))
    assert (error["param"], error["code"]) == (param, "request_too_large")
    assert not served.engine.got(Submit)
    ok(served.complete(prompt[:1], n=2, **fields))


@pytest.mark.parametrize("field", [{"logprobs": 1}, {"prompt_logprobs": 1}])
def test_an_engine_that_omits_log_probabilities_is_a_503(
    server: Server, engine: ScriptedEngine, field: dict[str, int]
) -> None:
    engine.behaviour.omit_logprobs = True
    assert error_of(server.complete("abc", **field), 503)["code"] == "engine_lost"


def byte_level(path: Path) -> Any:
    return loaded_as(write_tokenizer(path), path)


def whole_words(path: Path) -> Any:
    """Return a tokenizer of neither kind: mlx-lm decodes with the tokenizer itself."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return loaded_as(tokenizer, path)


@pytest.mark.parametrize("kind", [sentencepiece, byte_level, whole_words])
def test_tokens_have_their_bytes(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    tokenizer = kind(tmp_path)
    text = "a b" if kind is whole_words else "ab a b é 🌍"
    ids = tokenizer.encode(text, add_special_tokens=False)
    vocabulary = Vocabulary(tokenizer)
    pieces = [vocabulary.token_bytes(token) for token in ids]
    joined = b"".join(pieces).decode().removeprefix(" ")
    assert joined == (text.replace(" ", "") if kind is whole_words else text)
    assert vocabulary.unique_name(ids[0]) == pieces[0].decode()
    if kind is not whole_words:
        assert vocabulary.decode(ids) == vocabulary.decode([*ids, ids[-4]]) == text
        assert vocabulary.unique_name(ids[-1]) == "bytes:\\x8d"
        assert vocabulary.token_text(ids[-1]) == "\ufffd"
    assert vocabulary.token_bytes(10**6) == b""


@pytest.mark.parametrize("kind", [sentencepiece, byte_level])
def test_offsets_are_those_of_the_detokenized_text(kind: Any, tmp_path: Path) -> None:
    tokenizer = kind(tmp_path)
    ids = tokenizer.encode(" ab a é b", add_special_tokens=False)
    decoder = Vocabulary(tokenizer).decoder()
    text = "".join([*map(decoder.add, ids), decoder.finish()])
    alignment = TokenAligner(Vocabulary(tokenizer))
    alignment.add(ids, [TokenLogprobs(chosen=-1.0)] * len(ids))
    tokens = alignment.take(len(text))
    assert [token.id for token in tokens] == ids and not alignment.take_rest()
    for token in tokens:
        piece = tokenizer.decode([token.id]).strip()
        if "\ufffd" not in piece:
            assert text[token.offset :].lstrip(" ").startswith(piece)
    assert tokens[-1].offset + len(tokenizer.decode([ids[-1]]).strip()) >= len(text) - 1
