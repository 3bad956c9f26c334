"""What the model says to each agent: it reads a file, edits it, runs a command, and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.agents.formats import Call, Step
from tests.agents.model import Script
from tests.agents.tool_search import TOOL_SEARCHES

TASK = "Change old to new in notes.txt and count the lines that have it."
ENDLESS = "Tell me of notes.txt for ever."
BEFORE, AFTER = "an old line\nanother\n", "an new line\nanother\n"
FINAL = "The file notes.txt is changed."
PLAIN = "Changing notes"
"""Said where an agent offers no tools, such as for a title."""
COUNT = "grep -c new notes.txt"


class Tools(NamedTuple):
    """An agent's own tools, called to do what every agent can do."""

    read: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    run: Callable[[str], Call]
    delegate: Callable[[str], Sequence[Call]]
    """Give a prompt to a sub-agent and wait for it, by one call after the other."""


def _codex(project: str) -> Tools:
    def run(command: str) -> Call:
        return Call("exec_command", {"cmd": command})

    def delegate(prompt: str) -> list[Call]:
        return [Call("multi_agent_v1__spawn_agent", {"message": prompt}), run("sleep 4")]

    return Tools(
        lambda name: run(f"cat {name}"),
        lambda name, old, new: run(f"sed -i 's/{old}/{new}/' {name}"),
        run,
        delegate,
    )


def _claude(project: str) -> Tools:
    helper = {"subagent_type": "general-purpose", "run_in_background": False}
    return Tools(
        lambda name: Call("Read", {"file_path": f"{project}/{name}"}),
        lambda name, old, new: Call(
            "Edit", {"file_path": f"{project}/{name}", "old_string": old, "new_string": new}
        ),
        lambda command: Call("Bash", {"command": command, "description": "Run it"}),
        lambda prompt: [Call("Agent", {"description": "Look around", "prompt": prompt, **helper})],
    )


def _opencode(project: str) -> Tools:
    helper = {"subagent_type": "general"}
    return Tools(
        lambda name: Call("read", {"filePath": f"{project}/{name}"}),
        lambda name, old, new: Call(
            "edit", {"filePath": f"{project}/{name}", "oldString": old, "newString": new}
        ),
        lambda command: Call("bash", {"command": command, "description": "Run it"}),
        lambda prompt: [Call("task", {"description": "Look around", "prompt": prompt, **helper})],
    )


def _short(tools: Tools) -> list[Step]:
    """Two calls at once, a call that fails, an edit, a command, an answer."""
    return [
        Step((tools.read("notes.txt"), tools.run("ls")), reasoning="I read it first."),
        Step((tools.read("not-there.txt"),), reasoning="Is there another?"),
        Step((tools.edit("notes.txt", "an old", "an new"),), "I change it."),
        Step((tools.run(COUNT),), reasoning="Now I count."),
        Step(text=FINAL),
    ]


def aider_edit(old: str, new: str) -> str:
    """An edit as aider's models write it."""
    return f"notes.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


_AIDER_MESSAGES = 3
"""The assistant's messages that aider adds for each reply: two it writes itself."""
_AIDER_REPLIES = (
    Step(text="I change it.\n\n" + aider_edit("a line that is not there", "an new line")),
    Step(text="Again.\n\n" + aider_edit("an old line", "a nwe line")),
    Step(text="And again.\n\n" + aider_edit("a nwe line", "an new line") + "\n" + FINAL),
)
"""An edit that aider cannot apply, one after which its command fails, and a good one: aider calls
no tools, but reports errors to the model, and runs a command after each edit."""
_AIDER = [step for step in _AIDER_REPLIES for _ in range(_AIDER_MESSAGES)]


class Agent(NamedTuple):
    """A real agent and how it is started."""

    name: str
    package: str
    arguments: Callable[[str], list[str]]
    """By what it is to do, without a terminal."""
    go_on: Callable[[str], list[str]] | None
    """To ask another question in the same session. None: it reads questions, one a line."""
    environment: dict[str, str]
    tools: Callable[[str], Tools] | None
    """By the directory of the project. None: it has none, and its replies are its own."""

    @property
    def from_pypi(self) -> bool:
        return self.tools is None

    def scripts(self, project: str) -> list[Script]:
        endless = Step(text="There is more to tell. ", endless=True)
        if self.tools is None:
            return [Script(TASK, _AIDER, False), Script(ENDLESS, [endless], False)]
        search = TOOL_SEARCHES[self.name]
        return [
            Script(TASK, _short(self.tools(project))),
            Script(ENDLESS, [endless]),
            search.script,
        ]


def _codex_arguments(*words: str) -> list[str]:
    return ["exec", *words, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]


def _claude_arguments(*words: str) -> list[str]:
    return ["-p", *words, "--allowedTools", "Read,Edit,Bash,Agent"]


def _aider_arguments(*words: str) -> list[str]:
    return [
        *("--yes-always", "--edit-format", "diff", "--no-auto-commits", "--no-check-update"),
        *("--analytics-disable", "--no-show-model-warnings", "--no-gitignore"),
        *("--no-show-release-notes", "--no-fancy-input", "--no-pretty", *words, "notes.txt"),
    ]


AGENTS = (
    Agent(
        "codex",
        "@openai/codex@0.171.0",
        lambda task: [*_codex_arguments(), task],
        lambda task: [*_codex_arguments("resume", "--last"), task],
        {},
        _codex,
    ),
    Agent(
        "claude",
        "@anthropic-ai/claude-code@2.1.332",
        _claude_arguments,
        lambda task: _claude_arguments(task, "--continue"),
        {"DISABLE_AUTOUPDATER": "1"},
        _claude,
    ),
    Agent(
        "opencode",
        "opencode-ai@1.18.33",
        lambda task: ["run", task],
        lambda task: ["run", "--continue", task],
        {},
        _opencode,
    ),
    Agent(
        "aider",
        "aider-chat==0.86.2",
        lambda task: _aider_arguments("--message", task, "--auto-test", "--test-cmd", COUNT),
        None,
        {},
        None,
    ),
)
