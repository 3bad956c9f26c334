"""`mlx-lm-server bench` as users run it, on a tiny model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.commands import cli
from services.commands.bench.report import LoadReport, read_report
from tests.e2e.server import Server, llama_server

KEY = "secret"


# With drafts, 1,200 tokens of a tiny model take as few as a hundred steps: streams would end early.
server = llama_server("--max-batch-size=4", f"--api-key={KEY}", "--spec-decode=none")


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLX_LM_SERVER_API_KEY", KEY)
    return server.url


def bench(tmp_path: Path, url: str, *argv: str, code: int = 0) -> LoadReport:
    """Run `bench serve` and return its report."""
    saved = tmp_path / "report.json"
    flags = ["--url", url, "--save", str(saved), "--ignore-eos", "--output-tokens", "6", *argv]
    ended = cli.main(["bench", "serve", *flags])
    report = read_report(saved)
    assert ended == code, [(level.errors, level.details) for level in report.levels]
    return report


def test_clients_level_by_level(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(
        *(tmp_path, url, "--concurrency", "1,3", "--requests", "6", "--input-tokens", "8:40"),
        *("--goodput", "e2el:1e9", "--endpoint", "completions"),
    )
    assert [level.concurrency for level in report.levels] == [1, 3]
    for level in report.levels:
        assert (level.completed, level.failed, level.output_tokens) == (6, 0, 36)
        assert level.goodput == level.request_throughput > 0
        assert level.has_usage and level.input_tokens > 6 * 8
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"fixed: {report.model} at {url}")
    assert shown[2].split()[:3] == ["1", "6", "0"]


def test_requests_arrive_whatever_has_ended(url: str, tmp_path: Path) -> None:
    report = bench(tmp_path, url, "--request-rate", "200", "--requests", "7", "--json")
    (level,) = report.levels
    assert (level.request_rate, level.completed, level.failed) == (200, 7, 0)


def test_prefixes_and_conversations_are_found_in_the_cache(url: str, tmp_path: Path) -> None:
    flags = ("--concurrency", "2", "--requests", "6", "--input-tokens", "20")
    report = bench(
        *(tmp_path, url, "--workload", "shared-prefix", "--prefix-tokens", "200", *flags)
    )
    groups = report.levels[0].groups
    assert groups["first of its prefix"].ttft_ms.count == 1
    assert groups["later"].cached_tokens > groups["later"].input_tokens / 2
    report = bench(tmp_path, url, "--workload", "multi-turn", "--turns", "3", *flags)
    groups = report.levels[0].groups
    assert (groups["first turn"].ttft_ms.count, groups["later turns"].ttft_ms.count) == (2, 4)
    assert groups["later turns"].cached_tokens > 0 == groups["first turn"].cached_tokens


def test_conversations_end_when_the_time_is_over(url: str, tmp_path: Path) -> None:
    sizes = ("--input-tokens", "8", "--output-tokens", "4", "--turns", "300")
    flags = ("--concurrency", "2", "--duration-s", "0.3")
    (level,) = bench(tmp_path, url, "--workload", "multi-turn", *sizes, *flags).levels
    assert 2 <= level.completed < 300 and not level.errors


def test_a_long_prompt_joins_streams(url: str, tmp_path: Path) -> None:
    report = bench(
        *(tmp_path, url, "--workload", "long-join", "--concurrency", "2", "--requests", "2"),
        *("--join-tokens", "200", "--output-tokens", "1200", "--input-tokens", "20"),
        *("--endpoint", "completions"),  # no process for templates, which may have to start
    )
    join = report.levels[0].join
    assert join is not None and join.ttft_ms is not None and join.ttft_alone_ms is not None
    assert (join.ttft_ms.count, join.ttft_alone_ms.count) == (2, 2)
    assert join.longest_gap_ms is not None and join.longest_gap_ms.count == 4
    assert not report.levels[0].errors


def test_refusals_are_counted_by_name(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(
        tmp_path, url, "--concurrency", "1", "--requests", "2", "--input-tokens", "9000", code=1
    )
    ((name, count),) = report.levels[0].errors.items()
    assert name.startswith("HTTP 400 ") and count == 2
    assert f"2 failed with {name}: " in capsys.readouterr().out


def test_no_server_and_a_wrong_key_are_one_line(
    url: str, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--url", f"http://127.0.0.1:{free_port}"]) == 3
    assert cli.main(["bench", "serve", "--url", url, "--api-key", "wrong"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "401" in lines[1]


def test_an_interrupt_leaves_what_was_measured(server: Server, url: str, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    flags = ["--concurrency", "2", "--duration-s", "600", "--output-tokens", "200", "--ignore-eos"]
    # Those of earlier tests were cancelled. Engines count their tokens later than that.
    server.wait_until(lambda: server.sequences_in_flight() == 0, what="not idle")
    before = _num_answers(server)
    flags += ["--input-tokens", "8", "--save", str(saved), "--warm-up", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm_server", "bench", "serve", "--url", url, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        # With the third answer, one of two clients has had its first.
        server.wait_until(lambda: _num_answers(server) >= before + 3, 120, "nothing is asked")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    (level,) = read_report(saved).levels
    assert level.completed >= 1 and 1 <= level.cancelled <= 2 and level.output_tokens >= 200
    assert "cut when the measurement ended" in output


def _num_answers(server: Server) -> float:
    """Return how many requests of chats the router has answered."""
    line = r'^mlx_lm_server_requests_total\{path="/v1/chat/completions",status="200"\} (\S+)$'
    found = re.search(line, server.client.get("/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def test_levels_are_drawn(url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "levels.svg"
    bench(tmp_path, url, "--concurrency", "1,2", "--requests", "2", "--plot", str(picture))
    assert "generated tokens per second" in _texts(picture)
    both = tmp_path / "both.png"
    report = str(tmp_path / "report.json")
    assert cli.main(["bench", "plot", report, report, "--plot", str(both)]) == 0
    assert both.read_bytes().startswith(b"\x89PNG")


def _texts(picture: Path) -> str:
    """The comments of an SVG of matplotlib's, which hold its texts as they are drawn."""
    return " ".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--plot", "levels.gif"]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "serve", "--plot", "levels.svg"]) == 2
    format, missing = capsys.readouterr().err.splitlines()
    assert ".svg, .png, .pdf" in format and "install the extra 'bench'" in missing


@pytest.mark.slow
def test_prefixes_are_computed_then_in_ram_then_on_ssd(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokens", "40,80", "--runs", "2", "--json", "--model", str(tiny_model("llama"))]
    assert cli.main(["bench", "kv", *flags, "--disk-reserve-gb", "0"]) == 0
    rows = json.loads(capsys.readouterr().out)["prefixes"]
    assert [row["words"] for row in rows] == [40, 80]
    for row in rows:
        assert row["prompt_tokens"] - 128 < row["ssd_tokens"] <= row["ram_tokens"]
        assert row["bytes"] > 0 and row["computed_s"] > 0


def test_names_are_listed_and_wrong_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in ((["bench", "--help"], 0), (["bench", "nothing"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        assert ended.value.code == code
    assert (
        "kv     time to first token with a prefix computed, in RAM, or on SSD"
        in capsys.readouterr().out
    )
