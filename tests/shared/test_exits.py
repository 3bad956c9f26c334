"""The line with which a process refuses to start."""

from __future__ import annotations

import pytest

from shared.exits import EXIT_CONFIG, EXIT_USAGE, fail


def test_a_failure_is_one_line_on_stderr_and_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("prog", "--port: in use") == EXIT_CONFIG
    assert fail("prog", ValueError("--port: odd"), EXIT_USAGE) == EXIT_USAGE
    assert capsys.readouterr() == ("", "prog: --port: in use\nprog: --port: odd\n")
