"""Fields that would change the answer and are not supported, of every kind of request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.errors import InvalidRequest, NotSupported
from router.http.endpoints.rerank import RerankRequest, ScoreRequest
from router.http.endpoints.tokenize import TokenizeRequest
from router.ollama.schemas import OllamaGenerateRequest
from router.openai.embeddings import EmbeddingRequest
from router.responses.schemas import ResponsesRequest
from router.schemas.body import RequestBody, other_names, parse_body, refusals
from router.schemas.other_servers import OtherServersFields
from router.schemas.requests import ChatRequest, CompletionRequest
from shared.flags import flags_of
from shared.settings import Settings

PAGE = Path(__file__).parents[3] / "docs/api.md"
_MESSAGES = [{"role": "user", "content": "hi"}]
GENERATING: dict[type[RequestBody], dict[str, Any]] = {
    ChatRequest: {"messages": _MESSAGES},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": _MESSAGES, "max_tokens": 1},
}
BODIES = GENERATING | {
    CountTokensRequest: {"messages": _MESSAGES},
    EmbeddingRequest: {"input": "hi"},
    RerankRequest: {"query": "hi", "documents": ["ho"]},
    ScoreRequest: {"text_1": "hi", "text_2": "ho"},
    TokenizeRequest: {"prompt": "hi"},
    OllamaGenerateRequest: {"model": "m", "prompt": "hi"},
}
LIKELY: dict[str, tuple[Any, Any]] = {
    "n": (2, 3),
    **dict.fromkeys(("stop", "stop_sequences"), (["x"], ["y"])),
    **dict.fromkeys(("guided_regex", "cache_salt", "instruction"), ("a", "b")),
    "guided_json": ({"type": "object"}, {"type": "array"}),
    "truncate": (False, True),
}
UNLIKELY = {"no field": ["has this value"]}


def parse(kind: type[RequestBody], **fields: Any) -> RequestBody:
    return parse_body(json.dumps({**BODIES[kind], **fields}).encode(), kind)


@pytest.mark.parametrize("kind", BODIES)
def test_a_refused_field_is_named(kind: type[RequestBody]) -> None:
    assert refusals(kind)
    for name, refusal in refusals(kind).items():
        with pytest.raises(NotSupported) as raised:
            parse(kind, **{name: UNLIKELY})
        assert raised.value.param == name
        assert raised.value.message == f"'{name}' is not supported. {refusal.advice}".rstrip()
        for neutral in (None, *refusal.neutral):
            parse(kind, **{name: neutral})


@pytest.mark.parametrize("kind", BODIES)
def test_the_fields_to_use_instead_are_accepted(kind: type[RequestBody]) -> None:
    flags = {f"--{flag.name}" for flag in flags_of(Settings)}
    accepted = {each.encode_name for each in msgspec.structs.fields(kind)} - set(refusals(kind))
    advice = " ".join(refusal.advice for refusal in refusals(kind).values())
    for name in re.findall(r"'(.+?)'", advice):
        assert name in accepted | flags | {"/v1/rerank"}, name


def test_advice_is_left_out_where_it_names_a_field_of_another_api() -> None:
    assert refusals(ChatRequest)["n_probs"].advice == "Use 'logprobs'."
    assert refusals(MessagesRequest)["n_probs"].advice == ""


@pytest.mark.parametrize("kind", GENERATING)
def test_generating_endpoints_refuse_the_fields_of_other_servers(kind: type[RequestBody]) -> None:
    assert set(refusals(OtherServersFields)) <= set(refusals(kind))


def test_true_and_1_are_different() -> None:
    parse(ChatRequest, best_of=1, length_penalty=1.0, skip_special_tokens=True)
    parse(ChatRequest, mirostat=0, use_beam_search=False)
    wrong: list[dict[str, Any]] = [
        {"best_of": True},
        {"skip_special_tokens": 1},
        {"mirostat": False},
        {"use_beam_search": 0},
    ]
    for fields in wrong:
        with pytest.raises(NotSupported):
            parse(ChatRequest, **fields)


@pytest.mark.parametrize("kind", GENERATING)
def test_fields_that_the_page_calls_harmless_are_ignored(kind: type[RequestBody]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = page.split("\nAccepted without effect", 1)[1].split("\n## ", 1)[0]
    names = re.findall(r"`(\w+)`", listed)
    assert len(names) > 20
    known = {each.encode_name for each in msgspec.structs.fields(kind)}
    parse(kind, **{name: UNLIKELY for name in names if name not in known})
    assert not set(names) & set(refusals(kind))


@pytest.mark.parametrize(
    "field",
    [
        {"structural_tag": "{}"},
        {"whitespace_pattern": " *"},
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
    ],
)
def test_what_structured_outputs_cannot_do_is_named(field: dict[str, Any]) -> None:
    with pytest.raises(NotSupported) as raised:
        parse(ChatRequest, structured_outputs={"json": {"type": "object"}, **field})
    assert raised.value.param == f"structured_outputs.{min(field)}"


@pytest.mark.parametrize("kind", BODIES)
def test_other_names_of_a_field_are_taken_for_it(kind: type[RequestBody]) -> None:
    for name, other in other_names(kind).items():
        own = other.own or name
        value, differing = LIKELY.get(own, (7, 8))
        if own not in kind.__struct_fields__:  # of another API, to which the body is translated
            parse(kind, **{name: value})
            continue
        assert getattr(parse(kind, **{own: value, name: value}), own) == value
        usual = BODIES[kind].get(own)
        for unset in other.unset:
            assert getattr(parse(kind, **{name: unset}), own) == usual
        if other.own and usual is None:
            assert getattr(parse(kind, **{name: value}), own) == value
            with pytest.raises(InvalidRequest) as raised:
                parse(kind, **{own: value, name: differing})
            assert raised.value.param == name


def test_neutral_values_of_clients_have_no_effect() -> None:
    request = parse(ChatRequest, max_tokens=-1, stop="", top_p=0, n_predict=-2)
    assert isinstance(request, ChatRequest)
    assert (request.max_tokens, request.stop_strings, request.top_p) == (None, (), 0)
    assert parse_body(b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["", "x"]}',
                      ChatRequest).stop_strings == ("x",)  # fmt: skip
