"""The short form of `make fuzz`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.fuzz import FLAGS, fuzz, internal_errors, requests_answered
from tests.e2e.server import serving


@pytest.mark.slow
def test_answers_to_generated_requests_match_the_openapi_document(
    tiny_model: Callable[..., Path],
) -> None:
    with serving(tiny_model("llama"), *FLAGS) as server:
        run = fuzz(server, "--seed=7", "--phases=examples,fuzzing", "--max-examples=20")
        assert run.returncode == 0, run.stdout + run.stderr
        assert requests_answered(server) > 200
        assert internal_errors(server) == []
