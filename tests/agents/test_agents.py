"""Coding agents as they are installed, in short; `make agents` tries all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.agents.__main__ import acting
from tests.agents.formats import FORMATS
from tests.agents.installing import NotInstalled, install
from tests.agents.scripts import AGENTS
from tests.agents.trial import Trial


@pytest.fixture(scope="module")
def codex(pytestconfig: pytest.Config) -> Path:
    """The directory of the command, which is installed once."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    try:
        return install(AGENTS[0], pytestconfig.cache.mkdir("agents"))
    except NotInstalled as error:
        pytest.skip(f"codex {error}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_codex_does_a_task(codex: Path, tmp_path: Path) -> None:
    with acting(AGENTS[0], FORMATS[0], tmp_path) as server:
        outcome = Trial(AGENTS[0], codex, tmp_path, server).run()
    assert not outcome.trouble
    # Each turn after the first finds the turns before it.
    assert outcome.cached_tokens > 0.7 * outcome.prompt_tokens
