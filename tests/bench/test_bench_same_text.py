"""The comparison of answers to the same question, on answers that are made up."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.serving import same_text
from bench.serving.kept_answers import FirstAnswer, KeptAnswers, Saved, compared
from bench.serving.questions import KINDS, questions
from bench.serving.same_text import (
    Clock,
    OutOfTime,
    WayOutcome,
    all_at_once,
    compare,
    killed,
    one_by_one,
)
from services.measuring.answers import EventReader, StreamedAnswer
from tests.e2e.server import serving
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


def _answers() -> KeptAnswers:
    """Return five answers: one has another text, one other scores, and one failed."""
    kept = KeptAnswers(None)
    found = [StreamedAnswer(text="a", logprobs=[-0.5], prompt_tokens=4) for _ in range(4)]
    found[1].text, found[3].logprobs = "b", [-0.25]
    found[2].cached_tokens = 2
    for number, answer in enumerate([*found, StreamedAnswer(error="engine_lost")]):
        kept.add(compared("m", "w", FirstAnswer(number, [], "a", [-0.5]), answer, 1.0))
    return kept


def test_texts_and_bits_are_counted_apart() -> None:
    kinds = dict(enumerate(["chat", "story", "chat", "list", "talk"]))
    row = WayOutcome("w", kinds, _answers().compared["m", "w"])
    shown = str(row).split()
    assert shown[:4] == ["w", "3/5", "2/5", "10%"], shown
    assert shown[-4:] == ["list,", "story,", "talk,", "engine_lost"]
    assert not row.is_same


def test_a_row_is_not_the_same_before_everything_was_asked() -> None:
    found = _answers().compared["m", "w"]
    assert WayOutcome("w", {0: "chat", 2: "chat"}, found).is_same
    assert not WayOutcome("w", {0: "chat", 9: "chat"}, found).is_same


def test_answers_that_differ_are_kept() -> None:
    assert [one.text for one in _answers().compared["m", "w"].values()] == ["", "b", "", "a", ""]


def test_a_file_has_what_earlier_calls_were_answered(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    first = FirstAnswer(3, [{"role": "user", "content": "?"}], "a", [-0.1, -1e-9])
    KeptAnswers(path).add(first, Saved("m", 3, "blocks"))
    line = compared("m", "w", first, StreamedAnswer(text="b"), 1.0)
    KeptAnswers(path).add(line)
    found = KeptAnswers(path)
    assert found.first == {3: first} and found.compared["m", "w"] == {3: line}
    assert found.missing("m", "w", [3, 4]) == [4] and found.missing("other", "w", [3]) == [3]
    assert found.saved("m", [2, 3]) == {"blocks": [3]} and found.saved("other", [3]) == {}


def test_nothing_is_asked_that_would_take_longer_than_there_is_time() -> None:
    clock = Clock(60.0)
    clock.before(all_at_once, 40)  # nothing is known yet
    clock.took(all_at_once, 40, 90.0)
    clock.before(one_by_one, 1)
    with pytest.raises(OutOfTime):
        clock.before(killed, 40)  # as long as another crowd
    with pytest.raises(OutOfTime):
        clock.before(all_at_once, 40)


@contextmanager
def forked(command: list[str], probe: str) -> Iterator[tuple[int, int]]:
    """Run the server of ``command``, as `bench.servers.running` does, without its imports."""
    with serving(None, *command[3:], "--kv-bits", "8") as server:
        yield server.port, server.process.pid


def test_a_server_is_asked_in_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second question of a conversation comes after the first answer. All bits are the same by
    default. Nothing is asked again in a second call, which starts no server."""
    model, path = tmp_path / "model", tmp_path / "answers"
    make_tiny("llama", model)
    ways = ["again, one by one", "from SSD, after a restart", "engine killed"]
    monkeypatch.setattr(same_text, "running", forked)
    for _ in range(2):
        assert compare(str(model), 4, ["chat", "talk"], ways, 40, path=path)
        rows = capsys.readouterr().out.splitlines()[-len(ways) :]
        for way, row in zip(ways, rows, strict=True):
            assert re.match(rf"{way} +4/4 +4/4 ", row), row
        found = [int(row.split("%")[0].split()[-1]) for row in rows]
        assert found[0] > 50 > found[2]  # few of the prompts fill a page, which files hold
        monkeypatch.delattr(same_text, "running", raising=False)
