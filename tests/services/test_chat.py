"""The chat's reading of streams, and what its commands do."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from services.commands.admin_client import NoServer, ServerRefused
from services.commands.chat.client import ChatClient, Reply
from services.commands.chat.conversation import CommandError, Commands, Dialogue
from services.commands.event_stream import ServerEvent, events
from services.commands.printing import printable
from tests.stand_ins.http_server import answering


def chunk(**delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def server_that_sends(*lines: object) -> AbstractContextManager[str]:
    """Run another server of OpenAI's API, with ``lines`` as its stream."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    body = "".join(f"data: {text}\n\n" for text in texts).encode()
    return answering(lambda path, headers: (200, body))


def answer_of(url: str) -> tuple[list[tuple[str, str]], Reply]:
    client, reply = ChatClient(url, "", "KEY"), Reply()
    return list(client.answer("m", [{"role": "user", "content": "hi"}], {}, reply)), reply


def test_reasoning_text_and_usage_are_told_apart() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    stream = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hm"),
        chunk(reasoning="m"),
        chunk(content="Yes"),
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
        "[DONE]",
    ]
    with server_that_sends(*stream) as url:
        pieces, reply = answer_of(url)
    assert pieces == [("", "hm"), ("", "m"), ("Yes", "")]
    assert (reply.text, reply.reasoning) == ("Yes", "hmm")
    assert reply.summary().startswith("3 tokens, ")
    assert reply.summary().endswith("prompt 9, 8 cached, stopped at max_tokens")


@pytest.mark.parametrize(
    ("after", "error", "words"),
    [
        ([{"error": {"message": "out of\nmemory"}}], ServerRefused, "out of memory"),
        ([], NoServer, "the answer is incomplete"),
        (["<html>"], NoServer, "not a chunk of OpenAI"),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(
    after: list[object], error: type[Exception], words: str
) -> None:
    with server_that_sends(chunk(content="a"), *after) as url, pytest.raises(error, match=words):
        answer_of(url)


def test_events_may_have_names_comments_and_several_lines() -> None:
    lines = b": hello\nevent: status\ndata: 1\ndata:2\n\n\ndata: x\r\n\r\nevent: lost\n".splitlines(
        True
    )
    assert list(events(lines)) == [ServerEvent("status", "1\n2"), ServerEvent("message", "x")]


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9b1mc\r\td\n\x07") == "a[2Jb1mc\td\n"


@pytest.fixture
def talk() -> Dialogue:
    turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    said = [{"role": role, "content": text} for role, text in turns]
    return Dialogue(model="m", turns=said)


@pytest.fixture
def run(talk: Dialogue) -> Callable[[str], str]:
    return Commands(talk, ChatClient("http://127.0.0.1:1", "", "KEY")).run


def test_questions_are_taken_back_with_their_answers(
    talk: Dialogue, run: Callable[[str], str]
) -> None:
    assert run("/undo") == "removed: q2"
    assert [turn["content"] for turn in talk.messages()] == ["q1", "a1"]
    run("/clear")
    assert talk.messages() == []
    with pytest.raises(CommandError, match="there is no question"):
        run("/retry")


def test_parameters_are_json_or_text(talk: Dialogue, run: Callable[[str], str]) -> None:
    run("/set temperature 0.5")
    run('/set stop ["a"]')
    assert run("/set reasoning_effort low").splitlines()[-1] == 'reasoning_effort "low"'
    assert talk.parameters == {"temperature": 0.5, "stop": ["a"], "reasoning_effort": "low"}
    run("/set stop")
    assert "stop" not in talk.parameters


def test_a_conversation_is_saved_and_loaded(
    talk: Dialogue, run: Callable[[str], str], tmp_path: Path
) -> None:
    run("/system Be brief.")
    run(f"/save {tmp_path / 'talk'}")
    other = Dialogue(model="m")
    again = Commands(other, ChatClient("http://127.0.0.1:1", "", "KEY"))
    assert again.run(f"/load {tmp_path / 'talk'}") == "4 messages"
    assert other.messages() == talk.messages()
    (tmp_path / "bad").write_text('{"a": 1}')
    for name in ("bad", "missing"):
        with pytest.raises(CommandError, match=name):
            again.run(f"/load {tmp_path / name}")
    with pytest.raises(CommandError, match="file name is missing"):
        again.run("/save")


def test_an_address_may_have_its_version_or_not() -> None:
    for given, base in (
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/openai/v2", "https://h/openai/v2"),
        ("http://h/under", "http://h/under/v1"),
    ):
        assert ChatClient(given, "", "KEY").base == base


def test_images_go_with_the_next_question_and_come_back_with_it(
    talk: Dialogue, run: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    assert "next question" in run(f"/image {tmp_path}/a.png")
    talk.ask("what is it?")
    image, text = talk.turns[-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,cGljdHVyZQ=="
    assert text == {"type": "text", "text": "what is it?"} and not talk.images
    run(f"/save {tmp_path}/talk.json")
    other = Dialogue(model="m")
    Commands(other, ChatClient("http://127.0.0.1:1", "", "KEY")).run(f"/load {tmp_path}/talk.json")
    assert other.turns == talk.turns
    assert talk.take_back() == "what is it?" and len(talk.images) == 1
    assert run("/image") == "images removed" and not talk.images
    with pytest.raises(CommandError, match="cannot read"):
        run(f"/image {tmp_path}/b.png")
