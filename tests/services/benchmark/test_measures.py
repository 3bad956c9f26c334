"""The figures of `bench serve`, from answers whose times are known."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from services.commands.bench.options import ServeOptions, read_options
from services.commands.bench.report import text_of
from services.measuring.answers import StreamedAnswer
from services.measuring.load import JoinRecord, LoadRecord, arrival_gaps, longest_gap
from services.measuring.measures import Distribution, is_good, tpot_s
from services.measuring.workloads import Asking, TokenRange, conversations
from tests.services.benchmark.reports import made_level, made_report


def answer(*times: float, tokens: int | None = None, **fields: object) -> StreamedAnswer:
    """An answer with text at so many seconds."""
    count = len(times) if tokens is None else tokens
    found = StreamedAnswer(times=list(times), completion_tokens=count, has_usage=True)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_percentiles_lie_between_values() -> None:
    found = Distribution.of([0.004, 0.001, 0.003, 0.002])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (4, 2.5, 2.5, 4.0)
    assert found.p90 == pytest.approx(3.7)
    assert found.p99 == pytest.approx(3.97)
    assert Distribution.of([]) is None


def test_the_time_per_token_is_without_the_first_and_by_tokens_not_by_events() -> None:
    assert tpot_s(answer(1.0, 1.5, 2.0)) == 0.5
    assert tpot_s(answer(1.0, 1.5, 2.0, tokens=5)) == 0.25
    assert tpot_s(answer(1.0)) is None


def test_a_good_request_is_within_every_limit() -> None:
    one = answer(0.5, 0.7, 0.9)
    assert is_good(one, {"ttft": 500, "tpot": 201, "e2el": 900})
    for name in ("ttft", "tpot", "e2el"):
        assert not is_good(one, {name: 199})
    assert is_good(answer(0.1), {"tpot": 1})


def test_a_level_counts_completed_requests_and_names_the_others() -> None:
    records = [
        LoadRecord("first", answer(0.5, 1.0, prompt_tokens=10, cached_tokens=4)),
        LoadRecord("later", answer(0.1, 0.3, 0.7, prompt_tokens=20, cached_tokens=16)),
        LoadRecord("later", answer(0.1, error="HTTP 429 queue_full", detail="try later")),
        LoadRecord("later", answer(error="HTTP 429 queue_full", detail="and again")),
    ]
    found = made_level(*records, limits={"ttft": 200.0})
    assert (found.completed, found.failed) == (2, 2)
    assert found.errors == {"HTTP 429 queue_full": 2}
    assert found.details == {"HTTP 429 queue_full": "try later"}
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (30, 20, 5)
    assert (found.request_throughput, found.output_throughput) == (1.0, 2.5)
    assert (found.total_token_throughput, found.goodput) == (17.5, 0.5)
    assert found.itl_ms is not None and found.itl_ms.count == 3
    assert found.itl_ms.max == pytest.approx(500)
    assert found.e2el_ms is not None and found.e2el_ms.max == 1000
    assert found.groups["first"].ttft_ms.p50 == 500
    assert found.groups["later"].cached_tokens == 16


def test_a_gap_counts_as_far_as_the_joiner_was_there() -> None:
    running = answer(1.0, 2.0, 2.5, 6.0, began=100.0)
    assert longest_gap(running, 102.2, 107.0) == 3.5
    assert longest_gap(running, 100.5, 101.5) == 1.0  # the one that began before it
    assert longest_gap(running, 106.5, 109.0) == 3.0  # and nothing since
    running.finish_reason = "stop"
    assert longest_gap(running, 106.5, 109.0) is None
    assert longest_gap(running, 102.2, 109.0) == 3.5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(burstiness: float) -> None:
    gaps = list(itertools.islice(arrival_gaps(20.0, burstiness, random.Random(1)), 20_000))
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.03)
    relative = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert relative == pytest.approx(burstiness**-0.5, rel=0.05)


def options(*argv: str) -> ServeOptions:
    return read_options([*argv, "--seed", "7"])


def test_conversations_are_the_same_for_a_seed_and_as_long_as_asked() -> None:
    shape = options("--workload", "mixed", "--input-tokens", "3:90").shape
    once, again = (list(itertools.islice(conversations(shape, 5), 200)) for _ in range(2))
    assert once == again != list(itertools.islice(conversations(shape, 6), 200))
    lengths = [len(each.questions[0].text.split()) for each in once]
    assert min(lengths) >= 3 and max(lengths) <= 90
    assert 10 < statistics.median(lengths) < 27  # evenly on a log scale: 16 in the middle
    with pytest.raises(ValueError):
        TokenRange.parse("9:3")


def test_prefixes_are_shared_and_turns_carry_what_was_said() -> None:
    shape = options("--workload", "shared-prefix", "--prefixes", "2", "--prefix-tokens", "50").shape
    texts = [each.questions[0] for each in itertools.islice(conversations(shape, 1), 4)]
    heads = [" ".join(each.text.split()[:50]) for each in texts]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert [each.group for each in texts] == [*["first of its prefix"] * 2, *["later"] * 2]
    assert len({each.text for each in texts}) == 4
    asking = Asking("chat", "m", {"temperature": 0.0})
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = asking.body(texts[0], before)
    assert body["messages"][:2] == before
    assert body["messages"][2]["content"].startswith(texts[0].text)
    assert asking._replace(endpoint="completions").body(texts[0], [])["prompt"] == texts[0].text


def test_a_level_has_as_many_requests_as_flags_say() -> None:
    assert [options().count(load) for load in (1, 4, 16)] == [8, 16, 64]
    assert options("--request-rate", "2,0.1").count(2) == 60
    assert options("--request-rate", "2,0.1").count(0.1) == 8
    assert options("--duration-s", "3").count(4) is None
    turns = options("--workload", "multi-turn", "--requests", "10")
    assert [turns.count(load) for load in (2, 4)] == [3, 4]  # each client has a conversation
    assert options("--workload", "long-join").count(16) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--goodput", "ttfb:3"], "'ttfb' is not one of ttft, tpot, e2el"),
        (["--input-tokens", "9:3"], "'9:3' is not N or N:M"),
        (["--concurrency", "0"], "'0' is not greater than 0"),
        (["--request-rate", "1", "--concurrency", "2"], "not allowed with"),
        (["--request-rate", "1", "--workload", "long-join"], "--concurrency streams"),
        (["--workload", "multi-turn", "--endpoint", "completions"], "requires --endpoint chat"),
        (["--extra-body", "[1]"], "is not a JSON object"),
    ],
)
def test_wrong_flags_are_named(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_table_shows_errors_joins_and_groups() -> None:
    joined = JoinRecord([0.2, 0.4], answer(1.0), answer(1.5))
    records = (LoadRecord("joiner", answer(1.5, 1.6)), LoadRecord("", answer(error="no token")))
    text = text_of(made_report(made_level(*records, joins=[joined]), workload="long-join"))
    assert "load 2: 1 failed with no token" in text
    assert "2        300              400  1500               1000" in text
    assert "joiner" in text
