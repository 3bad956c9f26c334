"""Coding agents as they are installed, in short; `make agents` tries all of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.model.demo import demo_model_path
from tests.agents.__main__ import acting
from tests.agents.formats import FORMATS, Call, Step
from tests.agents.installing import binaries, install
from tests.agents.model import Script, make_actor
from tests.agents.recorder import recording
from tests.agents.scripts import AGENTS, PLAIN
from tests.agents.trial import Trial
from tests.e2e.installing import NotInstalled
from tests.e2e.server import serving

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


READ = Call("exec_command", {"cmd": "cat notes.txt", "max_output_tokens": 6000})
SUMMARY = "Goal: read notes.txt. MARK-OF-SUMMARY"
SCRIPTS = (
    Script("QUESTION-ONE", [Step((READ,)), Step(text="It is read.")]),
    Script("Stop working on the task.", [Step(text=SUMMARY)]),
    Script("MARK-OF-SUMMARY", [Step(text="It is read, says the summary.")]),
    Script("QUESTION-TWO", [Step(text="The second answer.")]),
    Script("QUESTION-THREE", [Step(text="The third answer.")]),
)


@pytest.mark.timeout(400)
def test_codex_goes_on_after_a_compaction(root: Path, tmp_path: Path) -> None:
    codex, project, home = installed(root) / "codex", tmp_path / "project", tmp_path / "home"
    for folder in (project, home):
        folder.mkdir()
    (project / "notes.txt").write_text("an old line with many words in it\n" * 1200)
    model = make_actor(tmp_path / "model", demo_model_path(), SCRIPTS, PLAIN, FORMATS[0])
    names = ("--served-model-name", "actor", "--no-ssd")
    with serving(model, *names) as server, recording(server.port) as recorder:
        provider = {"name": "OpenAI", "base_url": f"{recorder.url}/v1", "env_key": "ANY_KEY"}
        settings: dict[str, Any] = {
            "model": "actor",
            "model_provider": "here",
            "model_context_window": 60_000,
            "model_auto_compact_token_limit": 11_000,  # the prompt of a first call has 9,000
            **{f"model_providers.here.{name}": value for name, value in provider.items()},
            "model_providers.here.wire_api": "responses",
        }
        flags = [f"-c{name}={json.dumps(value)}" for name, value in settings.items()]
        flags += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        environment = {**os.environ, "HOME": str(home), "CODEX_HOME": str(home)}
        environment["ANY_KEY"] = "k"
        said = ""
        for number, question in enumerate(("QUESTION-ONE", "QUESTION-TWO", "QUESTION-THREE")):
            words = ["exec", *(["resume", "--last"] if number else []), *flags, question]
            done = subprocess.run(
                [str(codex), *words],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            said += done.stdout
        kinds = [[item.get("type") for item in each.body["input"]] for each in recorder.requests]
    assert "The second answer." in said and "The third answer." in said
    assert any(each[-1] == "compaction_trigger" for each in kinds)
    assert kinds[-1].count("compaction") == 1 and "function_call" not in kinds[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_codex_that_was_killed_does_a_task(root: Path, tmp_path: Path) -> None:
    try:
        check(install(CODEX, root), tmp_path, kills=True)
    except NotInstalled as error:
        pytest.skip(f"codex {error}")


def check(found: Path, private: Path, *, kills: bool) -> None:
    with acting(CODEX, FORMATS[0], private) as server:
        outcome = Trial(CODEX, found, private, server).run(kills=kills)
    assert not outcome.trouble
    # Each turn after the first finds the turns before it.
    assert outcome.cached_tokens > 0.7 * outcome.prompt_tokens
