"""Coding agents as they are installed, in short; `make agents` tries all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.agents.__main__ import FREE_PORT, acting
from tests.agents.compaction import compact
from tests.agents.formats import FORMATS
from tests.agents.installing import binaries, install
from tests.agents.scripts import AGENTS
from tests.agents.trial import Trial
from tests.e2e.installing import NotInstalled

CODEX = AGENTS[0]


@pytest.fixture(scope="module")
def root(pytestconfig: pytest.Config) -> Path:
    """The directory below which agents are installed, and stay."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    if not hasattr(pytestconfig, "cache"):  # -p no:cacheprovider
        pytest.skip("there is no place where agents are installed")
    return pytestconfig.cache.mkdir("agents")


@pytest.mark.timeout(300)
def test_codex_does_a_task_where_it_is_installed(root: Path, tmp_path: Path) -> None:
    check(installed(root), tmp_path, kills=False)


def installed(root: Path) -> Path:
    """Return the directory of Codex's command."""
    found = binaries(CODEX, root)
    on_path = shutil.which(CODEX.name)
    if not (found / CODEX.name).exists():
        if on_path is None:
            pytest.skip("codex is not installed: `make test-slow` does it, once")
        found = Path(on_path).parent
    return found


@pytest.mark.timeout(400)
def test_codex_goes_on_after_a_compaction(root: Path, tmp_path: Path) -> None:
    assert not compact(installed(root), tmp_path, FORMATS[0], *FREE_PORT)


@pytest.mark.timeout(300)
def test_codex_finds_one_of_60_tools(root: Path, tmp_path: Path) -> None:
    with acting(CODEX, FORMATS[0], tmp_path, *FREE_PORT) as server:
        assert not Trial(CODEX, installed(root), tmp_path, server).find_tool()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_codex_that_was_killed_does_a_task(root: Path, tmp_path: Path) -> None:
    try:
        check(install(CODEX, root), tmp_path, kills=True)
    except NotInstalled as error:
        pytest.skip(f"codex {error}")


def check(found: Path, private: Path, *, kills: bool) -> None:
    with acting(CODEX, FORMATS[0], private, *FREE_PORT) as server:
        outcome = Trial(CODEX, found, private, server).run(kills=kills)
    assert not outcome.trouble
    # Each turn after the first finds the turns before it.
    assert outcome.cached_tokens > 0.7 * outcome.prompt_tokens
