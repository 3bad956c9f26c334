"""Coding agents as they are installed, in short; `make agents` tries all of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agents.__main__ import try_agent
from tests.agents.scripts import agents


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_codex_does_a_task(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    (codex,) = [each for each in agents(f"{tmp_path}/project") if each.name == "codex"]
    try:
        outcome = try_agent(codex, tmp_path / "installed", tmp_path)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"codex cannot be installed here: {error}")
    assert not outcome.trouble
    # Each turn after the first finds the turns before it.
    assert outcome.cached_tokens > 0.7 * outcome.prompt_tokens
