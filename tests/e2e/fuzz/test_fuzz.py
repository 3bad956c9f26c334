"""The short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fuzz.__main__ import (
    FLAGS,
    KEY,
    fuzz,
    internal_errors,
    models_file,
    requests_answered,
)
from tests.e2e.fuzz.agents import fuzz_agents
from tests.e2e.fuzz.framing import fuzz_framing
from tests.e2e.server import Server, llama_server, serving

pytestmark = pytest.mark.slow


def test_answers_to_generated_requests_match_the_openapi_document(tmp_path: Path) -> None:
    with serving(None, "--config", str(models_file(tmp_path)), *FLAGS) as server:
        run = fuzz(server, "--seed=7", "--phases=examples,fuzzing", "--max-examples=4")
        assert run.returncode == 0, run.stdout + run.stderr
        assert requests_answered(server) > 60
        assert internal_errors(server) == []


server = llama_server(*FLAGS, "--skip-unsupported-content")


def test_requests_of_agents_are_answered_or_refused(server: Server) -> None:
    reached, failed = fuzz_agents(server.client, 400, seed=3)
    assert failed == []
    assert internal_errors(server) == []
    wanted = {"tools", "tool_choice", "include", "reasoning", "thinking", "output_config"}
    wanted |= {"options", "format", "context"}
    assert {name for name in wanted if reached[name] < 2} == set()


def test_bodies_are_framed_as_they_are_sent(server: Server) -> None:
    noted, wrong = fuzz_framing(server.port, KEY, 150, seed=4)
    assert wrong == []
    assert internal_errors(server) == []
    server.wait_until(lambda: server.sequences_in_flight() == 0, 30, "no request is left")
    assert {"half a request", "pipelined requests", "a body after its answer"} <= noted.keys()
    assert len(noted) > 18, "each end was reached"
