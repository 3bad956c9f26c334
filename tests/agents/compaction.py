"""Codex, whose conversation is longer than it keeps, goes on after a compaction."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from engine.model.demo import demo_model_path
from tests.agents.formats import Call, Format, Step
from tests.agents.model import MODEL, Script, make_actor
from tests.agents.recorder import recording
from tests.agents.scripts import PLAIN
from tests.e2e.server import serving_alone

_READ = Call("exec_command", {"cmd": "cat notes.txt", "max_output_tokens": 6000})
_SUMMARY = "Goal: read notes.txt. MARK-OF-SUMMARY"
_SCRIPTS = (
    Script("QUESTION-ONE", [Step((_READ,)), Step(text="It is read.")]),
    Script("Stop working on the task.", [Step(text=_SUMMARY)]),
    Script("MARK-OF-SUMMARY", [Step(text="It is read, says the summary.")]),
    Script("QUESTION-TWO", [Step(text="The second answer.")]),
    Script("QUESTION-THREE", [Step(text="The third answer.")]),
)


def compact(found: Path, private: Path, format: Format, *server_flags: str) -> str:
    """Ask Codex, whose command is in the directory ``found``, three questions. The server has
    ``server_flags`` besides its model. Return what went wrong, if anything did."""
    project, home = private / "long-project", private / "long-home"
    for folder in (project, home):
        folder.mkdir()
    (project / "notes.txt").write_text("an old line with many words in it\n" * 1200)
    path = private / "long-model" / MODEL
    model = make_actor(path, demo_model_path(), _SCRIPTS, PLAIN, format)
    with serving_alone(model, *server_flags) as server, recording(server.port) as recorder:
        # Codex lets servers compact that it takes for OpenAI.
        provider = {"name": "OpenAI", "base_url": f"{recorder.url}/v1", "env_key": "ANY_KEY"}
        settings: dict[str, Any] = {
            "model": MODEL,
            "model_provider": "here",
            "model_context_window": 60_000,
            "model_auto_compact_token_limit": 11_000,  # the prompt of a first call has 9,000
            **{f"model_providers.here.{name}": value for name, value in provider.items()},
            "model_providers.here.wire_api": "responses",
        }
        flags = [f"-c{name}={json.dumps(value)}" for name, value in settings.items()]
        flags += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        environment = {**os.environ, "HOME": str(home), "CODEX_HOME": str(home), "ANY_KEY": "k"}
        said = ""
        for number, question in enumerate(("QUESTION-ONE", "QUESTION-TWO", "QUESTION-THREE")):
            words = ["exec", *(["resume", "--last"] if number else []), *flags, question]
            done = subprocess.run(
                [str(found / "codex"), *words],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=100,
            )
            if done.returncode:
                return done.stderr[-2000:]
            said += done.stdout
        kinds = [[item.get("type") for item in each.body["input"]] for each in recorder.requests]
    if not ("The second answer." in said and "The third answer." in said):
        return f"no answers: {said}"
    if not any(each[-1] == "compaction_trigger" for each in kinds):
        return "nothing was compacted"
    kept = kinds[-1]
    if kept.count("compaction") != 1 or "function_call" in kept:
        return f"the last conversation has {kept}"
    return ""
