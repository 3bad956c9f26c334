"""Pictures through whole servers: the answers stay the same, whatever is killed or restarted."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, at_once, cached_tokens, content_of, events_of, serving
from tests.vision_models import FAMILIES, make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()

CHECKED = {"_MLX_LM_SERVER_CHECK_INTEGRITY": "1"}
GREEDY = {"temperature": 0, "ignore_eos": True}
PATIENCE_S = 90.0
ENCODED = "mlx_lm_server_encoded_images_total"
SHOWN = "mlx_lm_server_images_total"


def shown(seed: int, scale: int = 1) -> dict[str, Any]:
    data, image = io.BytesIO(), picture(seed)
    image.resize((image.width * scale, image.height * scale)).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*parts: int | str, scale: int = 1) -> list[dict[str, Any]]:
    """Return a conversation with a message of texts and of pictures by their numbers."""
    content = [
        shown(part, scale) if isinstance(part, int) else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def answer(server: Server, messages: list[dict[str, Any]], tokens: int = 12) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": tokens, "logprobs": True, **GREEDY}
    return server.answer("/v1/chat/completions", **body)


def scores(found: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in found["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    return make_vision_model(request.param, path)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--no-ssd", "--block-size", "4", **CHECKED) as running:
        yield running


@pytest.mark.parametrize("model", ["idefics3", "qwen3_vl"], indirect=True)
def test_a_picture_is_encoded_once_and_found_again(server: Server) -> None:
    first = answer(server, asked("what is ", 1, " here?"))
    server.wait_metric(ENCODED)
    again = answer(server, asked("what is ", 1, " here?"))
    assert (content_of(again), scores(again)) == (content_of(first), scores(first))
    assert cached_tokens(again) >= first["usage"]["prompt_tokens"] - 4
    other = answer(server, asked("what is ", 2, " here?"))
    assert cached_tokens(other) < first["usage"]["prompt_tokens"] // 2
    server.wait_until(lambda: server.metric(ENCODED) == 2, PATIENCE_S, "2 encoded")
    turn = [
        *asked("what is ", 1, " here?"),
        {"role": "assistant", "content": content_of(first)},
        {"role": "user", "content": "and now?"},
    ]
    assert cached_tokens(answer(server, turn)) >= first["usage"]["prompt_tokens"] - 4
    server.wait_until(lambda: server.metric(SHOWN) == 4, PATIENCE_S, "4 shown")
    assert server.metric(ENCODED) == 2


@pytest.mark.parametrize("model", ["idefics3", "qwen3_vl"], indirect=True)
def test_requests_at_once_about_a_new_picture_encode_it_once(server: Server) -> None:
    before, asks = server.metric(ENCODED), asked("what is ", 77, " here?")
    shown = server.metric(SHOWN)
    answers = at_once(lambda _: answer(server, asks), range(8))
    assert len({content_of(each) for each in answers}) == 1
    server.wait_until(lambda: server.metric(SHOWN) == shown + 8, PATIENCE_S, "8 shown")
    assert server.metric(ENCODED) == before + 1


@pytest.mark.parametrize("model", ["idefics3", "qwen3_vl"], indirect=True)
def test_questions_about_a_picture_encode_it_once(server: Server) -> None:
    url = shown(88)["image_url"]["url"]
    before = server.metric(ENCODED)
    questions = {f"q{n}": {"type": "noul", "instructions": f"is it {n}?"} for n in range(6)}
    body: dict[str, Any] = {"state": " state", "questions": questions}
    found = server.answer("/v1/systemone", images=[url], **body)["answers"]
    server.wait_until(lambda: server.metric(ENCODED) == before + 1, PATIENCE_S, "1 encoded")
    content = {"base64": url.partition(",")[2], "content_type": "image/png"}
    assert server.answer("/v1/systemone", images=[content], **body)["answers"] == found
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": " state"}]
    listed = server.answer(
        "/v1/decisions",
        input=[{"role": "user", "content": parts}],
        questions=[{"type": "predicate", "instructions": "is it 0?"}],
    )
    assert listed["answers"][0]["probability"] > 0
    other = server.answer("/v1/systemone", **body)["answers"]
    assert [each["noul"] for each in other.values()] != [each["noul"] for each in found.values()]
    assert server.metric(ENCODED) == before + 1


@pytest.mark.parametrize("model", ["qwen3_vl", "gemma4"], indirect=True)
def test_a_stream_with_a_picture_outlives_its_engine(model: Path, server: Server) -> None:
    messages = asked("what are ", 3, " and ", 4, scale=FAMILIES[model.name].scale)
    expected = content_of(answer(server, messages, 200))
    body = {"messages": messages, "max_tokens": 200, "stream": True, **GREEDY}
    text = ""
    with server.client.stream("POST", "/v1/chat/completions", json=body) as streamed:
        for number, event in enumerate(events_of(streamed)):
            choices = event.get("choices", ())
            text += "".join(one["delta"].get("content") or "" for one in choices)
            if number == 3:
                server.kill("engine")
    assert text == expected
    server.wait_until(server.is_ready, PATIENCE_S, "ready")


def test_after_a_restart_pictures_come_from_the_ssd(tmp_path: Path) -> None:
    model, cache = make_vision_model("pixtral", tmp_path / "model"), tmp_path / "cache"
    flags = ("--ssd-cache-dir", str(cache), "--ssd-policy", "write_through", "--block-size", "4")
    # Pictures in a whole page: others are not stored.
    messages = asked("what are ", 5, " and ", 6, " " + "and what is this? " * 12)
    with serving(model, *flags, **CHECKED) as server:
        before = answer(server, messages)
    with serving(model, *flags, **CHECKED) as server:
        after = answer(server, messages)
        assert cached_tokens(after) > after["usage"]["prompt_tokens"] - 64
        assert (content_of(after), scores(after)) == (content_of(before), scores(before))
        assert server.metric(ENCODED) == 0
