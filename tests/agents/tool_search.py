"""An agent with an MCP server of 60 tools finds the one that it needs, and calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.agents import many_tools
from tests.agents.formats import Call, Step
from tests.agents.model import MODEL, Script
from tests.agents.recorder import Request

QUESTION = "How many herons has the lake? One of the tools of the server knows it."
ANSWER = "I asked for the herons of the lake."
_COMMAND = [sys.executable, "-I", many_tools.__file__]


class ToolSearch(NamedTuple):
    """How an agent is given the server, and how it comes to the tool."""

    arguments: Callable[[str, Path], list[str]]
    """By the question and the directory of the project, where its configuration may be."""
    calls: Sequence[Call]
    """The last one is of the tool."""

    @property
    def script(self) -> Script:
        return Script(QUESTION, [*(Step((call,)) for call in self.calls), Step(text=ANSWER)])

    def trouble(self, requests: Sequence[Request], printed: str) -> str:
        """Return what is wrong with the ``requests`` of a run that has ``printed`` something."""
        first, *_, last = (each.body for each in requests if each.body.get("tools"))
        if many_tools.SECRET not in json.dumps(last) or ANSWER not in printed:
            return f"the tool was not called:\n{printed[-2000:]}"
        deferred = many_tools.PARAMETER not in json.dumps(first["tools"])
        return "" if deferred == (len(self.calls) > 1) else "its tools were not deferred"


def _for_codex(question: str, project: Path) -> list[str]:
    # Codex defers tools only where its catalog says that the model can search them.
    catalog = project / "catalog.json"
    catalog.write_text(json.dumps({"models": [_CATALOG]}))
    command, *arguments = _COMMAND
    settings = {
        "model_catalog_json": str(catalog),
        "mcp_servers.many.command": command,
        "mcp_servers.many.args": arguments,
    }
    words = [word for name in settings for word in ("-c", f"{name}={json.dumps(settings[name])}")]
    return [
        *("exec", *words, "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", question),
    ]


_CATALOG: dict[str, Any] = {
    "slug": MODEL,
    "display_name": MODEL,
    "description": "",
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "Help with the code.",
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "context_window": 131_072,
    "experimental_supported_tools": [],
    "supports_parallel_tool_calls": True,
    "supports_search_tool": True,
}


def _for_claude(question: str, project: Path) -> list[str]:
    command, *arguments = _COMMAND
    servers = {"mcpServers": {"many": {"command": command, "args": arguments}}}
    return [
        *("-p", question, "--mcp-config", json.dumps(servers)),
        *("--allowedTools", f"ToolSearch,mcp__many__{many_tools.NEEDED}"),
    ]


def _for_opencode(question: str, project: Path) -> list[str]:
    server = {"type": "local", "command": _COMMAND, "enabled": True}
    (project / "opencode.json").write_text(json.dumps({"mcp": {"many": server}}))
    return ["run", question]


_LAKE = {many_tools.PARAMETER: "the long one"}
_OF_MCP = Call(f"mcp__many__{many_tools.NEEDED}", _LAKE)
TOOL_SEARCHES = {
    "codex": ToolSearch(_for_codex, [Call("tool_search", {"query": "herons lake"}), _OF_MCP]),
    "claude": ToolSearch(
        _for_claude, [Call("ToolSearch", {"query": f"select:{_OF_MCP.name}"}), _OF_MCP]
    ),
    "opencode": ToolSearch(_for_opencode, [Call(f"many_{many_tools.NEEDED}", _LAKE)]),
}
"""By agent. opencode gives all tools to the model."""
