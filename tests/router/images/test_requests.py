"""Images through the real router to an engine, in all APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.wire import Submit, check_images
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import Server, error_of, eventually, ok
from tests.router.images.conftest import Ask
from tests.router.images.pictures import IMAGE_TOKEN, data_url, encoded, in_base64, picture
from tests.router.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.usefixtures("seeing")
RED = encoded(picture("red"))
BLUE = encoded(picture("blue"), "JPEG")
TOKENS = 12
"""The embeddings of one of these pictures."""
IMAGE_URL = {"type": "image_url", "image_url": {"url": data_url(RED)}}
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(RED)}
IMAGE_BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": in_base64(RED)},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def seen(engine: ScriptedEngine) -> Submit:
    """Return the last request, whose images have to be right."""
    submit = engine.got(Submit)[-1]
    frames = engine.frames[submit.request_id, submit.attempt]
    check_images(submit.images, len(submit.token_ids), frames)
    in_images = [
        token for one in submit.images for token in submit.token_ids[one.start :][: one.length]
    ]
    assert in_images.count(IMAGE_TOKEN) == submit.token_ids.count(IMAGE_TOKEN)
    return submit


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CHAT_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE_URL, IMAGE_URL]},
    {"role": "assistant", "content": "red", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": [IMAGE_URL]},
]
ITEMS = [
    {"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]},
]
PARTS = {"type": "content", "content": [{"type": "text", "text": "b"}, IMAGE_BLOCK]}
DOCUMENT = {"type": "document", "title": "t", "source": PARTS}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE_BLOCK]}
BLOCK_TURNS = [
    {"role": "user", "content": [IMAGE_BLOCK, {"type": "text", "text": "a"}, DOCUMENT]},
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT]},
]
OLLAMA_TURN = {"role": "user", "content": "a", "images": [in_base64(RED)]}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE_URL]}]}, 1),
    (CHAT, {"messages": CHAT_TURNS}, 3),
    (RESPONSES, {"input": ITEMS}, 2),
    (MESSAGES, {"max_tokens": 4, "messages": BLOCK_TURNS}, 3),
    ("/api/chat", {"model": "tiny", "messages": [OLLAMA_TURN]}, 1),
    ("/api/generate", {"model": "tiny", "prompt": "a", "images": [in_base64(RED)]}, 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "images"), BODIES)
def test_images_reach_the_engine(
    server: Server,
    seeing: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    images: int,
    stream: bool,
) -> None:
    ok(server.client.post(path, json={**body, "stream": stream}))
    submit = seen(seeing)
    assert len(submit.images) == images
    assert submit.token_ids.count(IMAGE_TOKEN) == images * TOKENS
    # The arrays of one picture go once, however often it is there.
    assert [bool(one.arrays) for one in submit.images] == [True] + [False] * (images - 1)


def test_the_tokens_of_images_count(server: Server, seeing: ScriptedEngine, ask: Ask) -> None:
    answer = ok(ask(data_url(RED), data_url(BLUE, "image/jpeg")))
    length = len(seen(seeing).token_ids)
    assert answer.json()["usage"]["prompt_tokens"] == length
    content = [IMAGE_BLOCK, {"type": "text", "text": "x"}]
    message = {"messages": [{"role": "user", "content": content}]}
    counted = server.client.post("/v1/messages/count_tokens", json=message).json()
    assert counted["input_tokens"] > TOKENS
    content[0] = IMAGE_URL
    tokenized = server.client.post("/tokenize", json=message).json()
    assert tokenized["tokens"].count(IMAGE_TOKEN) == TOKENS
    assert tokenized["count"] == counted["input_tokens"]


def test_a_prompt_that_images_make_too_long_is_refused(ask: Ask) -> None:
    urls = [data_url(encoded(picture((number, 0, 0), (32, 32)))) for number in range(32)]
    answer = ask(*urls, text="a" * 1400)
    assert error_of(answer)["code"] == "context_length_exceeded"


def test_text_that_spells_out_a_placeholder_is_no_image(seeing: ScriptedEngine, ask: Ask) -> None:
    ok(ask(data_url(RED), text="<image> and \ufdd1<image>"))
    assert len(seen(seeing).images) == 1


def test_images_are_in_the_order_of_the_messages(seeing: ScriptedEngine, ask: Ask) -> None:
    assert ask(data_url(RED)).status_code == 200
    red = seen(seeing).images[0].digest
    assert ask(data_url(BLUE, "image/jpeg"), data_url(RED)).status_code == 200
    digests = [one.digest for one in seen(seeing).images]
    assert digests[1] == red != digests[0]


def test_a_new_attempt_sends_all_again(seeing: ScriptedEngine, ask: Ask) -> None:
    calls: list[Submit] = []

    def script(submit: Submit) -> list[int]:
        calls.append(submit)
        if len(calls) == 1:
            seeing.say(b"")  # nothing: the engine forgets it
        return [ord("h"), ord("i"), 2]

    before = seeing.behaviour.script
    seeing.behaviour.script, seeing.behaviour.skip_token = script, True
    try:
        answer = ask(data_url(RED), data_url(BLUE, "image/jpeg"))
        seeing.behaviour.skip_token = False
    finally:
        seeing.behaviour.script, seeing.behaviour.skip_token = before, False
    submits = [each for each in seeing.got(Submit) if each.request_id == calls[0].request_id]
    assert len(submits) >= 2, answer.text
    frames = [seeing.frames[each.request_id, each.attempt] for each in submits]
    assert all(each == frames[0] for each in frames) and len(frames[0]) >= 2


def test_a_later_turn_has_the_images_of_earlier_responses(
    server: Server, seeing: ScriptedEngine
) -> None:
    first = server.client.post(
        "/v1/responses", json={"input": [{"role": "user", "content": [INPUT_IMAGE]}]}
    ).json()
    body = {"input": "And now?", "previous_response_id": first["id"]}
    assert server.client.post("/v1/responses", json=body).status_code == 200
    assert len(seen(seeing).images) == 1
    ok(server.client.post("/v1/responses", json={**body, "truncation": "auto"}))
    items = server.client.get(f"/v1/responses/{first['id']}/input_items").json()
    assert items["data"][0]["content"][0]["image_url"] == data_url(RED)


def test_a_prepared_image_is_kept_for_the_next_request(server: Server, ask: Ask) -> None:
    name = "prepared_image_hits_total"
    url = data_url(encoded(picture((1, 2, 3))))
    before = server.metric(name)
    for _ in range(3):
        assert ask(url).status_code == 200
    assert server.metric(name) - before == 2


def test_a_body_with_images_may_be_larger_than_one_of_text(server: Server, ask: Ask) -> None:
    large = encoded(picture(size=(600, 400)), "BMP")
    assert ask(data_url(large)).status_code == 400  # no BMP, but not too large
    text = ask(text="a" * 200_000)
    assert text.status_code == 413
    assert "images" in text.json()["error"]["message"]
    values = json.dumps({"messages": [[]] * 60_000, "x": "y" * 100_000})
    answer = server.client.post(
        "/v1/chat/completions", content=values, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert server.client.post("/v1/completions", json={"prompt": "a" * 200_000}).status_code == 413


def test_lines_of_batches_give_memory_of_images_back(server: Server, ask: Ask) -> None:
    url = data_url(RED)
    assert ask(url).status_code == 200
    kept = server.metric("image_memory_bytes ")
    body = {"model": "tiny", "messages": [{"role": "user", "content": [IMAGE_URL]}]}
    path = "/v1/chat/completions"
    batch = BatchClient(server.url).run(
        [line(str(number), path, **body, max_tokens=4) for number in range(3)], endpoint=path
    )
    assert batch.request_counts.completed == 3
    eventually(lambda: server.metric("image_memory_bytes ") == kept)


def test_memory_of_images_is_given_back(server: Server, ask: Ask) -> None:
    url = data_url(encoded(picture((3, 2, 1), (200, 200)), compress_level=0))
    assert ask(url).status_code == 200
    kept = server.metric("image_memory_bytes ")
    assert ask(url, "data:image/png;base64,AAAA").status_code == 400
    eventually(lambda: server.metric("image_memory_bytes ") == kept)


def test_the_model_is_said_to_see(server: Server) -> None:
    assert "vision" in server.client.get("/v1/models").json()["data"][0]["capabilities"]
    shown = server.client.post("/api/show", json={"model": "tiny"}).json()
    assert "vision" in shown["capabilities"]


def test_a_context_of_ollama_without_its_images_is_an_error(server: Server) -> None:
    body = {"model": "tiny", "stream": False, "prompt": "a"}
    first = ok(
        server.client.post("/api/generate", json={**body, "images": [in_base64(RED)]})
    ).json()
    assert IMAGE_TOKEN in first["context"]
    answer = server.client.post("/api/generate", json={**body, "context": first["context"]})
    assert answer.status_code == 400 and "'context' contains no images" in answer.json()["error"]
    plain = ok(server.client.post("/api/generate", json=body)).json()
    ok(server.client.post("/api/generate", json={**body, "context": plain["context"]}))
