"""Errors of the Responses API."""

from __future__ import annotations

from tests.router.conftest import Server, error_of
from tests.router.responses.test_responses import ask
from tests.router.scripted_engine import ScriptedEngine


def test_errors_name_the_field_of_the_body(server: Server, engine: ScriptedEngine) -> None:
    refused = error_of(ask(server, max_tokens=5))
    assert refused["param"] == "max_tokens"
    assert refused["message"] == "'max_tokens' is not supported. Use 'max_output_tokens'."
    assert error_of(ask(server, max_output_tokens=10**6))["param"] == "max_output_tokens"
