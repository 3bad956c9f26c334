"""Images through the real router to an engine, in all APIs, good and bad."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.wire import Submit, check_images
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import Server, StartServer, error_of, eventually, ok
from tests.router.images.conftest import Ask
from tests.router.images.pictures import (
    IMAGE_TOKEN,
    VISION,
    bad_pictures,
    data_url,
    encoded,
    forbidden_urls,
    in_base64,
    picture,
)
from tests.router.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.usefixtures("seeing")
RED = encoded(picture("red"))
RED_URL = data_url(RED)
BLUE_URL = data_url(encoded(picture("blue"), "JPEG"), "image/jpeg")
LARGE_URL = data_url(encoded(picture((3, 2, 1), (200, 200)), compress_level=0))
TOKENS = 12
"""The embeddings of one of these pictures."""
IMAGE_URL = {"type": "image_url", "image_url": {"url": RED_URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": RED_URL}
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
ONE = [{"role": "user", "content": [IMAGE_URL]}]
BODIES: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": ONE}, 1),
    (CHAT, {"messages": CHAT_TURNS}, 3),
    (RESPONSES, {"input": ITEMS}, 2),
    (MESSAGES, {"max_tokens": 4, "messages": BLOCK_TURNS}, 3),
    ("/api/chat", {"model": "tiny", "messages": [OLLAMA_TURN]}, 1),
    ("/api/generate", {"model": "tiny", "prompt": "a", "images": [in_base64(RED)]}, 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "images"), BODIES)
def test_images_reach_the_engine(
    server: Server, seeing: ScriptedEngine, path: str, body: Any, images: int, stream: bool
) -> None:
    ok(server.client.post(path, json={**body, "stream": stream}))
    submit = seen(seeing)
    assert len(submit.images) == images
    assert submit.token_ids.count(IMAGE_TOKEN) == images * TOKENS
    # The arrays of one picture go once, however often it is there.
    assert [bool(one.arrays) for one in submit.images] == [True] + [False] * (images - 1)


def test_the_tokens_of_images_count(server: Server, seeing: ScriptedEngine, ask: Ask) -> None:
    answer = ok(ask(RED_URL, BLUE_URL))
    assert answer.json()["usage"]["prompt_tokens"] == len(seen(seeing).token_ids)

    def count(path: str, image: dict[str, Any]) -> Any:
        content = [image, {"type": "text", "text": "x"}]
        return server.post(path, messages=[{"role": "user", "content": content}]).json()

    counted = count("/v1/messages/count_tokens", IMAGE_BLOCK)
    tokenized = count("/tokenize", IMAGE_URL)
    assert tokenized["tokens"].count(IMAGE_TOKEN) == TOKENS
    assert tokenized["count"] == counted["input_tokens"] > TOKENS


def test_a_prompt_that_images_make_too_long_is_refused(ask: Ask) -> None:
    urls = [data_url(encoded(picture((number, 0, 0), (32, 32)))) for number in range(32)]
    answer = ask(*urls, text="a" * 1400)
    assert error_of(answer)["code"] == "context_length_exceeded"


def test_text_that_spells_out_a_placeholder_is_no_image(seeing: ScriptedEngine, ask: Ask) -> None:
    ok(ask(RED_URL, text="<image> and \ufdd1<image>"))
    assert len(seen(seeing).images) == 1


def test_images_are_in_the_order_of_the_messages(seeing: ScriptedEngine, ask: Ask) -> None:
    ok(ask(RED_URL))
    red = seen(seeing).images[0].digest
    ok(ask(BLUE_URL, RED_URL))
    blue, last = (one.digest for one in seen(seeing).images)
    assert last == red != blue


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
        answer = ask(RED_URL, BLUE_URL)
    finally:
        seeing.behaviour.script, seeing.behaviour.skip_token = before, False
    submits = [each for each in seeing.got(Submit) if each.request_id == calls[0].request_id]
    assert len(submits) >= 2, answer.text
    frames = [seeing.frames[each.request_id, each.attempt] for each in submits]
    assert all(each == frames[0] for each in frames) and len(frames[0]) >= 2


def test_a_later_turn_has_images_of_earlier_ones(server: Server, seeing: ScriptedEngine) -> None:
    first = server.post(RESPONSES, input=[{"role": "user", "content": [INPUT_IMAGE]}]).json()
    body = {"input": "And now?", "previous_response_id": first["id"]}
    ok(server.client.post(RESPONSES, json=body))
    assert len(seen(seeing).images) == 1
    ok(server.client.post(RESPONSES, json={**body, "truncation": "auto"}))
    items = server.client.get(f"{RESPONSES}/{first['id']}/input_items").json()
    assert items["data"][0]["content"][0]["image_url"] == RED_URL


def test_a_prepared_image_is_kept_for_the_next_request(server: Server, ask: Ask) -> None:
    before = server.metric("prepared_image_hits_total")
    for _ in range(3):
        ok(ask(data_url(encoded(picture((1, 2, 3))))))
    assert server.metric("prepared_image_hits_total") - before == 2


def test_a_body_with_images_may_be_larger_than_one_of_text(server: Server, ask: Ask) -> None:
    large = encoded(picture(size=(600, 400)), "BMP")
    assert ask(data_url(large)).status_code == 400  # no BMP, but not too large
    assert "images" in error_of(ask(text="a" * 200_000), 413)["message"]
    values = server.post(CHAT, messages=[[]] * 60_000, x="y" * 100_000)
    for answer in (values, server.complete("a" * 200_000)):
        assert answer.status_code == 413


@pytest.fixture
def kept(server: Server, seeing: ScriptedEngine, ask: Ask) -> Iterator[None]:
    """Check that a test gives memory of images back."""
    ok(ask(RED_URL))
    ok(ask(LARGE_URL))
    kept = server.metric("image_memory_bytes ")
    yield
    eventually(lambda: server.metric("image_memory_bytes ") == kept)


@pytest.mark.usefixtures("kept")
def test_lines_of_batches_give_memory_of_images_back(server: Server) -> None:
    lines = [line(str(n), CHAT, model="tiny", messages=ONE, max_tokens=4) for n in range(3)]
    batch = BatchClient(server.url).run(lines, endpoint=CHAT)
    assert batch.request_counts.completed == 3


@pytest.mark.usefixtures("kept")
def test_memory_of_images_is_given_back(ask: Ask) -> None:
    assert ask(LARGE_URL, "data:image/png;base64,AAAA").status_code == 400


def test_the_model_is_said_to_see(server: Server) -> None:
    assert "vision" in server.client.get("/v1/models").json()["data"][0]["capabilities"]
    shown = server.client.post("/api/show", json={"model": "tiny"}).json()
    assert "vision" in shown["capabilities"]


def test_a_context_of_ollama_without_its_images_is_an_error(server: Server) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return server.post("/api/generate", model="tiny", stream=False, prompt="a", **fields)

    context = ok(ask(images=[in_base64(RED)])).json()["context"]
    assert IMAGE_TOKEN in context
    answer = ask(context=context)
    assert answer.status_code == 400 and "'context' contains no images" in answer.json()["error"]
    ok(ask(context=ok(ask()).json()["context"]))


# -- what is no image, or far too much ------------------------------------------


def test_each_bad_image_is_refused_with_a_reason(server: Server, ask: Ask) -> None:
    assert ask(RED_URL).status_code == 200  # the process has started
    bad = list(bad_pictures())
    assert len(bad) >= 90
    for url, word in bad:
        answer = ask(url)
        error = answer.json().get("error", {})
        assert answer.status_code == 400, (url[:120], answer.text[:500])
        assert error["param"] == "messages[0].content[0]"
        assert word in error["message"], (url[:120], error)
    assert ask(RED_URL).status_code == 200
    # The loop itself, whatever else this machine does: a slow answer may be the client's.
    assert server.metric("event_loop_lag_max_seconds ") < 1


def test_too_many_images_are_refused(ask: Ask) -> None:
    error = ask(*[RED_URL] * 100).json()["error"]
    assert error["code"] == "too_many_images" and "more than 32 images" in error["message"]


def test_images_of_too_many_bytes_are_refused(start_server: StartServer, vision_dir: Path) -> None:
    server = start_server(f"--max-image-bytes={2 * len(RED_URL)}")
    engine = ScriptedEngine(
        server.address, vision_dir, vision=VISION, vocab_size=512, context_length=2048
    )
    server.wait_ready()
    try:
        for count, status in ((2, 200), (3, 400)):
            turn = {"role": "user", "content": [IMAGE_URL] * count}
            answer = server.post(CHAT, messages=[turn], max_tokens=1)
            assert answer.status_code == status, answer.text
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[2]")
    finally:
        engine.leave()


def test_nothing_is_fetched(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        for url in forbidden_urls(listener.getsockname()[1]):
            error = ask(url).json()["error"]
            assert error["code"] == "invalid_image_url", (url, error)
        with pytest.raises(TimeoutError):
            listener.accept()


PDF = data_url(b"%PDF-1.7\n", "application/pdf")


def test_a_file_is_refused_with_advice(server: Server) -> None:
    for path, field, part in (
        (CHAT, "messages", {"type": "file", "file": {"file_data": PDF}}),
        (RESPONSES, "input", {"type": "input_file", "file_data": PDF}),
    ):
        error = error_of(server.post(path, **{field: [{"role": "user", "content": [part]}]}))
        assert error["code"] == "unsupported_content"
        assert error["message"].endswith("send a PDF's text, or its pages as images.")


def test_images_are_refused_without_vision(start_server: StartServer) -> None:
    server = start_server()
    server.join()
    for path, field, part in ((CHAT, "messages", IMAGE_URL), (RESPONSES, "input", INPUT_IMAGE)):
        error = error_of(server.post(path, **{field: [{"role": "user", "content": [part]}]}))
        assert error["code"] == "unsupported_content"
        assert error["param"] == f"{field}[0].content[0].type"
