"""The comparison of answers to the same question, on answers that are made up."""

import re
from pathlib import Path

import pytest

from bench.serving.questions import KINDS, questions
from bench.serving.same_text import ComparedWay, compare
from services.measuring.answers import EventReader, StreamedAnswer
from tests.tiny_models import make_tiny


def test_kinds_take_turns_and_no_question_comes_twice_at_once() -> None:
    found = questions(tuple(KINDS), 0, 60)
    assert [kind for kind, _ in found[: len(KINDS)]] == list(KINDS)
    assert len({question for _, question in found}) == 60
    assert questions(tuple(KINDS), 7, 3) == found[7:10]


def test_an_answer_keeps_the_scores_of_its_tokens() -> None:
    answer = StreamedAnswer()
    body = b'data: {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": ['
    body += b'{"token": "a", "logprob": -0.25}]}}]}\n\ndata: [DONE]\n\n'
    EventReader(answer).take(200, 0.0, body)
    assert (answer.text, answer.logprobs) == ("a", [-0.25])


def test_texts_and_bits_are_counted_apart() -> None:
    """Of five answers one has another text, one other scores, and one failed."""
    outcome = ComparedWay(["chat", "story", "chat", "list"])
    for text, score in (("a", -0.5), ("b", -0.5), ("a", -0.5), ("a", -0.25)):
        outcome.add(
            StreamedAnswer(text=text, logprobs=[score]), StreamedAnswer(text="a", logprobs=[-0.5])
        )
    outcome.kinds.append("talk")
    outcome.add(StreamedAnswer(error="engine_lost"), StreamedAnswer())
    shown = str(outcome).split()
    assert shown[:2] == ["3/5", "2/5"] and shown[-4:] == ["list,", "story,", "talk,", "engine_lost"]


def test_a_server_is_asked_in_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second question of a conversation comes after the first answer. All bits are the same by
    default."""
    make_tiny("llama", tmp_path)
    ways = ["again, all at once", "from SSD, after a restart", "engine killed"]
    assert compare(str(tmp_path), 4, ["chat", "talk"], ways, 40)
    rows = capsys.readouterr().out.splitlines()[-len(ways) :]
    for way, row in zip(ways, rows, strict=True):
        assert re.match(rf"{way} +4/4 +4/4 ", row), row
