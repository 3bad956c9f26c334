"""The clients, and the tables of what works with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SCENARIOS = ("chat", "stream", "tools", "structured", "errors", "cancel")
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"


@dataclass(frozen=True)
class Client:
    """A client at a pinned version, with one of its APIs."""

    name: str
    installed: str
    """The packages of pip or npm, the client first."""
    script: str
    api: str = CHAT
    prefix: str = ""
    """Begins the names of the scenarios of ``api``."""

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(self.installed.split())

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2] if self.packages else "-"


_OPENAI, _LITELLM = "openai==3.57.0", "litellm==1.106.2 mcp"
_LANGCHAIN, _LANGCHAIN_ANTHROPIC = "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"
_OPEN_WEBUI = "open-webui==0.12.4 playwright==1.65.2 torch==2.13.0"
"""It needs some PyTorch. Other releases may bring several GB for GPUs."""
_LLAMA_INDEX = "llama-index-llms-ollama==0.11.0"
_LLAMA_INDEX_EMBEDDINGS = "llama-index-embeddings-openai-like==0.4.0"
_AI_SDKS = {
    "5": "ai@5.0.277 @ai-sdk/openai-compatible@1.0.61 @ai-sdk/openai@2.0.131"
    " @ai-sdk/anthropic@2.0.112 zod@4.6.7",
    "6": "ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 @ai-sdk/openai@3.0.141"
    " @ai-sdk/anthropic@3.0.140 zod@4.6.7",
    "7": "ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/openai@4.0.118"
    " @ai-sdk/anthropic@4.0.105 zod@4.6.7",
}
"""By major version: each is in use, and reads answers in its own way."""
_LLAMA_INDEX_TS = "llamaindex@0.12.1 @llamaindex/openai@0.4.22 zod@4.6.7"
CLIENTS = (
    Client("openai (Python)", _OPENAI, "openai_python.py"),
    Client("openai (Python)", _OPENAI, "openai_python.py", RESPONSES, "responses_"),
    Client("anthropic (Python)", "anthropic==2.14.0", "anthropic_python.py", MESSAGES),
    Client("langchain-openai", _LANGCHAIN, "with_langchain.py"),
    Client("langchain-anthropic", _LANGCHAIN_ANTHROPIC, "with_langchain.py", MESSAGES),
    Client("litellm", _LITELLM, "with_litellm.py"),
    Client("litellm", _LITELLM, "with_litellm.py", MESSAGES, "messages_"),
    Client("litellm", _LITELLM, "with_litellm.py", OLLAMA, "ollama_"),
    Client("ollama (Python)", "ollama==0.6.3", "ollama_python.py", OLLAMA),
    Client("langchain-ollama", "langchain-ollama==1.1.0", "with_langchain_ollama.py", OLLAMA),
    Client("llama-index-llms-ollama", _LLAMA_INDEX, "with_llama_index_ollama.py", OLLAMA),
    Client("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0", "with_pydantic_ai.py"),
    Client("instructor", "instructor==1.17.0", "with_instructor.py"),
    Client("Haystack", "haystack-ai==3.4.1", "with_haystack.py"),
    Client("AutoGen", "autogen-ext[openai]==0.7.5", "with_autogen.py"),
    Client(
        *("Claude Agent SDK", "claude-agent-sdk==0.2.189"),
        *("with_claude_agent_sdk.py", MESSAGES),
    ),
    Client("llm", "llm==0.36", "with_llm.py"),
    Client("lm-eval", "lm-eval[api]==0.4.13 transformers", "with_lm_eval.py", "/v1/completions"),
    Client("Open WebUI", _OPEN_WEBUI, "webui/in_chromium.py", OLLAMA),
    Client("Open WebUI", _OPEN_WEBUI, "webui/in_chromium.py", CHAT, "openai_"),
    Client("openai (Node)", "openai@7.57.0", "openai_node.mjs"),
    Client("openai (Node)", "openai@7.57.0", "openai_node.mjs", RESPONSES, "responses_"),
    Client("@anthropic-ai/sdk (Node)", "@anthropic-ai/sdk@1.12.0", "anthropic_node.mjs", MESSAGES),
    Client("ollama (Node)", "ollama@0.6.4", "ollama_node.mjs", OLLAMA),
    *(
        Client(f"Vercel's AI SDK {number}", packages, "ai_sdk.mjs", api, prefix)
        for number, packages in _AI_SDKS.items()
        for api, prefix in ((CHAT, ""), (RESPONSES, "responses_"), (MESSAGES, "messages_"))
    ),
    Client("LlamaIndex.TS", _LLAMA_INDEX_TS, "llama_index.mjs"),
)

EMBEDDING_SCENARIOS = ("embed", "rerank", "errors")
_BOTH, _WEBUI_APIS = "/v1/embeddings, /v1/rerank", "/v1/embeddings, /api/embed, /v1/rerank"
EMBEDDING_CLIENTS = (
    Client("openai (Python)", _OPENAI, "vectors/openai_embeddings.py", EMBEDDINGS),
    Client("langchain-openai", _LANGCHAIN, "vectors/langchain_embeddings.py", EMBEDDINGS),
    Client("litellm", _LITELLM, "vectors/litellm_embeddings.py", _BOTH),
    Client(
        *("llama-index-embeddings-openai-like", _LLAMA_INDEX_EMBEDDINGS),
        *("vectors/llama_index_embeddings.py", EMBEDDINGS),
    ),
    Client("chromadb", f"chromadb==1.5.9 {_OPENAI}", "vectors/chroma_embeddings.py", EMBEDDINGS),
    Client("Open WebUI", _OPEN_WEBUI, "webui/documents.py", _WEBUI_APIS),
    Client("cohere", "cohere==7.3.1", "vectors/cohere_rerank.py", "/v2/rerank"),
)
"""Those that ask for vectors and rankings, which other models make."""

DECISION_SCENARIOS = ("decide", "models", "errors")
DECISION_CLIENTS = (
    Client("openai (Python)", _OPENAI, "decisions/openai_decisions.py", "/v1/decisions"),
    Client(
        *("typesafe-sdk (Python)", "typesafe-sdk==0.7.5"),
        *("decisions/typesafe_decisions.py", "/v1/systemone"),
    ),
    Client(
        *("@typesafe-ai/sdk (Node)", "@typesafe-ai/sdk@0.6.0"),
        *("typesafe_decisions.mjs", "/v1/systemone"),
    ),
    Client("Vercel's AI SDK 7", _AI_SDKS["7"], "ai_sdk_decisions.mjs", "/v1/decisions"),
)
"""Those that ask typed questions."""

INSERT_SCENARIOS = ("insert", "stream", "errors", "cancel")
_SUFFIX, _FIM, _INFILL = "/v1/completions", "/v1/fim/completions", "/infill"
INSERT_CLIENTS = (
    Client("openai (Python)", _OPENAI, "inserts/openai_suffix.py", _SUFFIX),
    Client("mistralai", "mistralai==2.10.1", "inserts/mistral_fim.py", _FIM),
    Client("ollama (Python)", "ollama==0.6.3", "inserts/ollama_suffix.py", "/api/generate"),
    Client(
        *("Continue's adapters", "@continuedev/openai-adapters@1.37.0"),
        *("continue_fim.mjs", _FIM),
    ),
    Client("llama.vscode, llama.vim (recorded)", "", "inserts/recorded_infill.py", _INFILL),
)
"""Those that ask for the text in a gap."""

STANDARD_TESTS = Client(
    "langchain-tests",
    f"langchain-tests==1.1.9 {_LANGCHAIN} pytest==9.2.0",
    "with_langchain_tests.py",
)
"""LangChain's tests for chat models. Each test is a scenario."""


@dataclass(frozen=True)
class Cell:
    result: str
    reason: str = ""


@dataclass(frozen=True)
class Row:
    client: Client
    cells: dict[str, Cell]
    """By scenario, without the prefix."""
    version: str = ""
    """The one that was tried. Empty: the client's."""


def joined(
    old: str, rows: Sequence[Row], clients: Sequence[Client], scenarios: Sequence[str]
) -> list[Row]:
    """Return ``rows`` and those of the table ``old`` for other ``clients``, in their order."""
    notes = dict(re.findall(r"^(\d+)\. .*?: (.*)$", old, re.MULTILINE))
    found = {(row.client.name, row.client.api): row for row in rows}
    by_name = {(client.name, f"`{client.api}`"): client for client in clients}
    for line in old.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        client = by_name.get((cells[0], cells[2])) if len(cells) == len(scenarios) + 3 else None
        if client is not None:
            results = [_read(cell, notes) for cell in cells[3:]]
            row = Row(client, dict(zip(scenarios, results, strict=True)), cells[1])
            found.setdefault((client.name, client.api), row)
    return [found[key] for each in clients if (key := (each.name, each.api)) in found]


def _read(cell: str, notes: Mapping[str, str]) -> Cell:
    """Read ``n/a (2)``, with the note of that number."""
    result, _, number = cell.rstrip(")").partition(" (")
    return Cell(result, notes.get(number, "").replace("\\|", "|"))


def table(rows: Sequence[Row], scenarios: Sequence[str] = SCENARIOS) -> str:
    """Return Markdown: a row for each client and API, and notes for all cells but a pass."""
    head = ["client", "version", "API", *scenarios]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    notes: list[str] = []
    for row in rows:
        client = row.client
        cells = [client.name, row.version or client.version, f"`{client.api}`"]
        for scenario in scenarios:
            cell = row.cells.get(scenario, Cell("n/a", "not tried"))
            if cell.result == "pass":
                cells.append("pass")
                continue
            note = f"{client.name}, {scenario}: {_line(cell.reason)}"
            if note not in notes:
                notes.append(note)
            cells.append(f"{cell.result} ({notes.index(note) + 1})")
        lines.append("| " + " | ".join(cells) + " |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *numbered]).rstrip() + "\n"


def tests_table(cells: Mapping[str, Cell]) -> str:
    """Return Markdown: the names of tests that pass, and a row with the reason for each other."""
    by_name: dict[str, list[Cell]] = {}
    for test, cell in cells.items():
        by_name.setdefault(test.partition("[")[0], []).append(cell)
    passed, lines = [], ["| test | result | reason |", "|---|---|---|"]
    for name, each in by_name.items():
        others = [cell for cell in each if cell.result != "pass"]
        if not others:
            passed.append(f"`{name}`")
            continue
        worst = min(others, key=lambda cell: cell.result != "fail")
        lines.append(f"| `{name}` | {worst.result} | {_line(worst.reason)} |")
    versions = ", ".join(package.replace("==", " ") for package in STANDARD_TESTS.packages)
    count = sum(cell.result == "pass" for cell in cells.values())
    head = f"{versions}: {count} of {len(cells)} pass."
    return "\n\n".join([head, f"Pass: {', '.join(passed)}.", "\n".join(lines)]) + "\n"


def _line(reason: str) -> str:
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    first = first.replace("|", "\\|")
    return first if len(first) <= 200 else first[:197] + "..."
