"""An engine of two ranks: its texts, and what becomes of them when a rank is lost.

``make test-ranks`` runs all of this, and most other end-to-end tests with engines of two ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.plan import FEWEST_PAGE_TOKENS
from shared.exits import EXIT_CONFIG, EXIT_USAGE
from tests.commands import run_command
from tests.e2e.operation.test_faults import PATIENCE_S
from tests.e2e.server import (
    CHECKED,
    RANKS_VARIABLE,
    RESUMED,
    Server,
    at_once,
    cached_tokens,
    content_of,
    cpu_s,
    is_running,
    llama_server,
    serving,
    text_of,
)
from tests.oracle import Oracle

RANKS = ("--distributed-mode", "ring", "--num-local-ranks", "2")
DRAFTS = ("--spec-decode", "draft", "--draft-model-path", "demo")
LONG = "the of and to in is that it was for on are as with they be at one have this"
at_length = pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="make test-ranks")

server = llama_server(*RANKS, **CHECKED)


def pids(server: Server) -> dict[str, int]:
    """Return the process of each rank."""
    (leader,), (other,) = (
        server.pids(f"services.processes.{name}") for name in ("engine", "rank ")
    )
    return {"rank 0": leader, "rank 1": other}


def test_texts_of_two_ranks_are_mlx_lms(server: Server, tiny_model: Callable[..., Path]) -> None:
    """In one batch, and again with a prefix that is in RAM."""
    prompts = ["abc", "hello there", LONG, f"{LONG} {LONG}"]
    oracle = Oracle(tiny_model("llama"))
    for _ in range(2):
        answers = at_once(lambda prompt: server.complete(prompt, 40), prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(oracle.tokenizer.encode(prompt), 40, answer["choices"][0]["text"])
    assert cached_tokens(answers[-1]) >= 32


def test_rank_0_chooses_tokens_for_all(server: Server) -> None:
    """Draws, penalties, grammars and log-probabilities are its own; KV of the others follows."""
    drawn = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "ignore_eos": True}
    first, second = (server.text("abc", 60, **drawn) for _ in range(2))
    assert first == second != server.text("abc", 60, **drawn | {"seed": 4})
    assert re.fullmatch("(ab|cd){3}x", server.text("abc", 40, guided_regex="(ab|cd){3}x"))
    scored = server.complete("abc", 5, logprobs=2, ignore_eos=True)["choices"][0]["logprobs"]
    for chosen, top in zip(scored["token_logprobs"], scored["top_logprobs"], strict=True):
        assert chosen == pytest.approx(max(top.values()), abs=1e-4)


def test_the_group_says_what_it_is(server: Server) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert "tensor-parallel" in model["capabilities"]
    assert server.metric("dist_fatal") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_group_uses_no_cpu(server: Server) -> None:
    """A rank that waits in a collective would keep a core busy."""
    server.complete("abc", 4)
    idle_s = 60.0 if RANKS_VARIABLE in os.environ else 2.0
    found = []

    def rests() -> bool:
        before = cpu_s(*pids(server).values())
        time.sleep(idle_s)
        found.append((cpu_s(*pids(server).values()) - before) / idle_s)
        return found[-1] < (0.02 if idle_s > 2 else 0.05)

    server.wait_until(rests, PATIENCE_S + idle_s, "idle")
    print(f"idle for {idle_s:.0f} s: {100 * found[-1]:.2f} % of a core")  # noqa: T201


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        ("rank 1", signal.SIGKILL),
        pytest.param("rank 0", signal.SIGKILL, marks=at_length),
        pytest.param("rank 1", signal.SIGSTOP, marks=at_length),
        pytest.param("rank 0", signal.SIGSTOP, marks=at_length),
    ],
    ids=["kill-1", "kill-0", "stop-1", "stop-0"],
)
def test_a_stream_goes_on_after_a_rank_is_lost(server: Server, rank: str, number: int) -> None:
    fields = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
    expected = server.text("abc", 250, **fields)
    before, resumed = pids(server), server.metric(RESUMED)
    running = server.stream("abc", 250, **fields)
    begun = [next(running) for _ in range(3)]
    os.kill(before[rank], number)
    server.wait_until(lambda: not any(map(is_running, before.values())), PATIENCE_S, "the end")
    assert text_of([*begun, *running]) == expected
    assert server.metric(RESUMED) == resumed + 1
    assert not set(before.values()) & set(pids(server).values())
    assert server.metric("dist_fatal") == 0
    if (rank, number) == ("rank 1", signal.SIGKILL):
        assert any("rank 1 has exited (SIGKILL): all ranks exit" in line for line in server.log)


@at_length
def test_drafts_are_verified_on_all_ranks(tiny_model: Callable[..., Path]) -> None:
    """Also those after which a grammar has no mask: the ranks would part there."""
    bound = "(abab|cdcd){30}"
    with serving(tiny_model("llama"), *RANKS) as plain:
        expected = plain.text(LONG, 120, ignore_eos=True)
        forced = plain.text("abab", 100, guided_regex=bound)
    for source in ("ngram", "auto"):
        with serving(tiny_model("llama"), *RANKS, "--spec-decode", source) as server:
            answer = server.complete(LONG, 120, ignore_eos=True)
            assert answer["choices"][0]["text"] == expected
            assert server.text("abab", 100, guided_regex=bound) == forced
            server.wait_metric("mlx_lm_server_accepted_draft_tokens_total")
            assert server.metric(RESUMED) == 0


@at_length
def test_the_demo_model_runs_on_three_ranks(demo_model: Path) -> None:
    with serving("demo-fp32", *RANKS[:-1], "3") as server:
        assert "Paris" in content_of(server.chat("What is the capital of France?"))
        assert len(server.pids("services.processes.rank ")) == 2


@at_length
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "deepseek_v2"])
def test_other_architectures_run_on_two_ranks(kind: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(kind)
    oracle = Oracle(path)
    with serving(path, *RANKS) as server:
        for prompt in ("abc", LONG):
            text = server.text(prompt, 30)
            oracle.check(oracle.tokenizer.encode(prompt), 30, text)


@pytest.mark.parametrize(
    ("kind", "flags", "line", "code"),
    [
        ("llama", (RANKS[2], "3"), "4 attention heads are not divisible by 3", EXIT_CONFIG),
        ("llama", (*RANKS[2:], *DRAFTS), "--draft-model-path: ", EXIT_USAGE),
        pytest.param(
            "gemma3", RANKS[2:], "does not support it for gemma3_text", EXIT_CONFIG, marks=at_length
        ),
    ],
)
def test_what_cannot_be_divided_ends_the_start_with_one_clear_line(
    tiny_model: Callable[..., Path], kind: str, flags: tuple[str, ...], line: str, code: int
) -> None:
    """A rank that was left over would keep the output open."""
    path = str(tiny_model(kind))
    run = run_command("--model", path, "--port", "0", "--no-ssd", *RANKS[:2], *flags)
    assert run.returncode == code, run.stderr
    assert line in run.stderr
    assert "Traceback" not in run.stderr


def restarted(model: Path, directory: Path, prompt: str) -> tuple[str, int]:
    """Return the answer of a new server with the files in ``directory``, and how many tokens of
    the prompt it found."""
    flags = ("--ssd-cache-dir", str(directory), "--ssd-policy", "write_through")
    with serving(model, *RANKS, *flags, **CHECKED) as server:
        answer = server.complete(prompt, 20)
    return content_of(answer), cached_tokens(answer)


@at_length
def test_prefixes_come_back_from_the_files_that_every_rank_has(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """After a restart; and a block whose file is bad on one rank is computed again on both."""
    model, prompt = tiny_model("llama"), " ".join([LONG] * 6)
    text, cached = restarted(model, tmp_path, prompt)
    assert cached == 0
    found = {rank: sorted(tmp_path.glob(f"*/rank_{rank}/*/*.safetensors")) for rank in (0, 1)}
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    again, cached = restarted(model, tmp_path, prompt)
    assert again == text and cached >= FEWEST_PAGE_TOKENS * (len(found[0]) - 2) > 0
    for path in found[1]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert restarted(model, tmp_path, prompt) == (text, 0)
