"""What the model says to each agent: it reads a file, edits it, runs a command, and answers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

TASK = "Change old to new in notes.txt and count the lines that have it."
BEFORE, AFTER = "an old line\nanother\n", "an new line\nanother\n"
FINAL = "The file notes.txt is changed."
PLAIN = "Changing notes"
"""Said where an agent offers no tools, such as for a title."""


def _calls(*calls: tuple[str, dict[str, Any]]) -> str:
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


class Agent(NamedTuple):
    """A real agent, how it is started, and what the model says to it."""

    name: str
    package: str
    arguments: list[str]
    """Behind ``mlx-lm-server agent NAME``."""
    environment: dict[str, str]
    replies: list[str]


def agents(project: str) -> list[Agent]:
    """Return all agents, for a task in the directory ``project``."""
    path = f"{project}/notes.txt"
    return [
        Agent(
            "codex",
            "@openai/codex",
            ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
            {},
            [
                _calls(("exec_command", {"cmd": "cat notes.txt"}), ("exec_command", {"cmd": "ls"})),
                _calls(("exec_command", {"cmd": "cat not-there.txt"})),
                _calls(("exec_command", {"cmd": "sed -i s/old/new/ notes.txt"})),
                _calls(("exec_command", {"cmd": "grep -c new notes.txt"})),
                FINAL,
            ],
        ),
        Agent(
            "claude",
            "@anthropic-ai/claude-code",
            ["-p", TASK, "--allowedTools", "Read,Edit,Bash"],
            {"DISABLE_AUTOUPDATER": "1"},
            [
                _calls(("Read", {"file_path": path}), ("Bash", {"command": "ls"})),
                _calls(("Read", {"file_path": f"{project}/not-there.txt"})),
                _calls(
                    ("Edit", {"file_path": path, "old_string": "an old", "new_string": "an new"})
                ),
                _calls(("Bash", {"command": "grep -c new notes.txt", "description": "Count"})),
                FINAL,
            ],
        ),
        Agent(
            "opencode",
            "opencode-ai",
            ["run", TASK],
            {},
            [
                _calls(
                    ("read", {"filePath": path}),
                    ("bash", {"command": "ls", "description": "List files"}),
                ),
                _calls(("read", {"filePath": f"{project}/not-there.txt"})),
                _calls(("edit", {"filePath": path, "oldString": "an old", "newString": "an new"})),
                _calls(("bash", {"command": "grep -c new notes.txt", "description": "Count"})),
                FINAL,
            ],
        ),
    ]
