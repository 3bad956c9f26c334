"""Tools of the Responses API that are not plain functions, as coding agents send them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.responses.sealing import ReasoningSeal
from shared.wire import Submit
from tests.router.conftest import Server, error_of, ok
from tests.router.responses.test_responses import events
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
FLAGS = ("--max-generation-tokens=4000", "--max-prompt-tokens=100000", "--reasoning-key=k")
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
TEAM = {"type": "namespace", "name": "team", "description": "Other agents.", "tools": [SPAWN]}
Calls = Callable[..., ScriptedEngine]
PATCH = {"type": "custom", "name": "patch", "description": "Takes a patch."}


@pytest.fixture
def calls(server: Server) -> Calls:
    """Return a function that starts an engine, which answers with one call."""

    def start(name: str = "f", arguments: Any = None) -> ScriptedEngine:
        call = json.dumps({"name": name, "arguments": arguments or {}})
        return server.join(f"<tool_call>\n{call}\n</tool_call>", context_length=100_000)

    return start


def ask(server: Server, *tools: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", **{"input": "hi", "tools": tools, **fields})


def prompt_of_result(server: Server, item: dict[str, Any], output: Any, *tools: Any) -> str:
    """Send a call back, with its result. Return the prompt."""
    result = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output}
    ok(ask(server, *tools, input=[{"role": "user", "content": "hi"}, item, result]))
    return server.engine.last_prompt


def only_item(answer: httpx.Response) -> dict[str, Any]:
    item: dict[str, Any]
    (item,) = ok(answer).json()["output"]
    return item


def test_a_call_in_a_namespace_has_it_and_comes_back_with_it(server: Server, calls: Calls) -> None:
    calls("team__spawn")
    item = only_item(ask(server, TEAM))
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "team", "spawn")
    prompt = prompt_of_result(server, item, "done", TEAM)
    assert '{"name": "team__spawn", "arguments": {}}' in prompt
    assert "[team__spawn] done" in prompt


def test_a_custom_tool_takes_text(server: Server, calls: Calls) -> None:
    calls("patch", {"input": 'say "hi"\n'})
    item = only_item(ask(server, PATCH))
    assert item["id"].startswith("ctc_")
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert item["input"] == 'say "hi"\n'
    prompt = prompt_of_result(server, item, "applied", PATCH)
    assert '{"input": "say \\"hi\\"\\n"}' in prompt
    assert "[patch] applied" in prompt


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "a|[b]+"), ("lark", "start: /b/")])
def test_a_custom_tool_is_bound_by_its_grammar_and_shows_it(
    server: Server, calls: Calls, syntax: str, definition: str
) -> None:
    engine = calls("patch", {"input": "ab"})
    bound = {"type": "grammar", "syntax": syntax, "definition": definition}
    ok(ask(server, {**PATCH, "format": bound}))
    grammar = engine.got(Submit)[-1].grammar
    assert grammar is not None and "%lark" in grammar.source
    (part,) = grammar.parts
    assert (part.kind, part.source) == (syntax, definition)
    assert part.param == "tools[0].format.definition"
    assert definition in engine.last_prompt
    large = {**bound, "definition": definition + " " * 40_000}
    assert error_of(ask(server, {**PATCH, "format": large}))["param"] == part.param


def test_the_input_of_a_custom_tool_is_streamed(server: Server, calls: Calls) -> None:
    written = 'a\n"é🌍' + " word" * 40
    engine = calls("patch", {"input": written})
    # A stream gets what has come meanwhile: the rest is held back until the first part is read.
    arguments = engine.tokenizer.encode(json.dumps({"input": written})).ids
    engine.behaviour.hold_tokens_after = len(arguments) * 2 // 3

    def release() -> None:
        engine.behaviour.hold_tokens_after = None

    shown, body = "custom_tool_call_input.delta", {"input": "hi", "tools": [PATCH]}
    stream = events(server.stream_until(shown, release, "/v1/responses", **body))
    added, *deltas, done, item_done, completed = stream[2:]
    assert (added["type"], added["item"]["input"]) == ("response.output_item.added", "")
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert "".join(event["delta"] for event in deltas) == done["input"] == written
    assert len(deltas) > 1
    assert item_done["item"] == completed["response"]["output"][0]


def test_half_a_surrogate_pair_in_the_input_is_replaced(server: Server, calls: Calls) -> None:
    calls("patch", {"input": "a\udc00b\ud800"})
    item = only_item(ask(server, PATCH))
    last = events(ask(server, PATCH, stream=True).text)[-1]
    assert last["type"] == "response.completed"
    assert item["input"] == last["response"]["output"][0]["input"] == "a\ufffdb\ufffd"


SHELL = {"commands": ["ls"]}
SHELL_ACTION = {"timeout_ms": None, "max_output_length": None, **SHELL}
EXITED = {"stdout": "did it", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}}
LOCAL = {"command": ["ls", "-l"], "timeout_ms": 5}
LOCAL_ACTION = {"type": "exec", "env": {}, "user": None, "working_directory": None, **LOCAL}
FILE = {"type": "create_file", "path": "a.txt", "diff": "+hi\n"}


@pytest.mark.parametrize(
    ("tool", "arguments", "shown", "output", "told"),
    [
        ("local_shell", LOCAL, {"action": LOCAL_ACTION}, "did it", "did it"),
        ("shell", SHELL, {"action": SHELL_ACTION}, [EXITED], "did it\n(exit code 2)"),
        ("apply_patch", FILE, {"operation": FILE}, "did it", "did it"),
    ],
)
def test_a_shell_and_patches_are_calls_of_their_own_type(
    server: Server, calls: Calls, tool: str, arguments: Any, shown: Any, output: Any, told: str
) -> None:
    engine = calls(tool, arguments)
    item = only_item(ask(server, {"type": tool}))
    assert item["type"] == f"{tool}_call" and shown.items() <= item.items()
    assert engine.got(Submit)[-1].grammar is not None  # which enforces the schema
    prompt = prompt_of_result(server, item, output, {"type": tool})
    assert json.dumps({"name": tool, "arguments": arguments}) in prompt
    assert f"[{tool}] {told}<|im_end|>" in prompt


def test_tools_that_openai_runs_are_left_out_unless_forced(server: Server, calls: Calls) -> None:
    engine = calls()
    answer = ok(ask(server, {"type": "web_search", "external_web_access": False}, SPAWN))
    assert answer.headers["x-left-out-tools"] == "web_search"
    assert "web_search" not in engine.last_prompt
    assert [tool["type"] for tool in answer.json()["tools"]] == ["web_search", "function"]
    forced = ask(server, {"type": "web_search"}, tool_choice={"type": "web_search"})
    assert error_of(forced)["param"] == "tool_choice"


ALLOWED = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "patch"},
        {"type": "local_shell"},
        {"type": "function", "name": "spawn", "namespace": "team"},
        {"type": "allowed_tools", "mode": "required", "tools": ALLOWED},
    ],
)
def test_any_own_tool_can_be_chosen(server: Server, calls: Calls, choice: dict[str, Any]) -> None:
    engine = calls("patch", {"input": "x"})
    tools = (PATCH, TEAM, {"type": "local_shell"}, {"type": "web_search"})
    ok(ask(server, *tools, tool_choice=choice))
    assert engine.got(Submit)[-1].grammar is not None


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search\r\nx-evil: 1"}, "tools[0].type"),
        ({"type": "namespace", "name": "x"}, "tools[0].tools"),
        ({"type": "namespace", "name": "x", "tools": [TEAM]}, "tools[0].tools[0].type"),
        ({"type": "namespace", "tools": [SPAWN]}, "tools[0].name"),
        ({"type": "custom"}, "tools[0].name"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "lark"}}, "tools[0].format"),
        ({**TEAM, "tools": [{**SPAWN, "name": "x" * 128}]}, "tools[0].tools[0].name"),
        ({**TEAM, "tools": [SPAWN, SPAWN]}, "tools[1].function.name"),
    ],
)
def test_an_error_names_the_wrong_tool(server: Server, calls: Calls, tool: Any, param: str) -> None:
    calls()
    assert error_of(ask(server, tool))["param"] == param


def test_a_client_carries_reasoning_that_it_cannot_read(server: Server) -> None:
    engine = server.join("<think>\nthe secret</think>\n\nDone.", context_length=100_000)
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    reasoning, message = ask(server, **fields).json()["output"]
    sealed = reasoning["encrypted_content"]
    assert "secret" not in sealed
    assert ask(server).json()["output"][0]["encrypted_content"] is None
    stream = events(ask(server, stream=True, **fields).text)
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == stream[-1]["response"]["output"] and done[0]["encrypted_content"]
    for carried, expected in ((sealed, True), (sealed[:-8] + "AAAAAAA=", False), ("xyz", False)):
        item: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": carried}
        items = [{"role": "user", "content": "hi"}, item, message]
        ok(ask(server, input=items, chat_template_kwargs={"keep_reasoning": True}, **fields))
        assert ("the secret" in engine.last_prompt) == expected


def is_lasting(seal: ReasoningSeal) -> bool:
    return seal.unseal(seal.seal("ä")) == "ä"


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a text that is sealed with a key in a directory of state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return ReasoningSeal(None).seal("text")


def test_a_sealing_key_outlives_a_process(
    sealed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ReasoningSeal(None).unseal(sealed) == "text"
    assert (tmp_path / "mlx-lm-server/reasoning.key").stat().st_mode & 0o777 == 0o600
    assert ReasoningSeal("shared").unseal(sealed) is None
    assert is_lasting(ReasoningSeal("shared"))
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert is_lasting(ReasoningSeal(None))


def test_a_sealing_key_is_used_though_nothing_can_be_written(
    sealed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = tmp_path.iterdir()
    open_file = os.open

    def full_disk(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and folder in Path(path).parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", full_disk)
    assert ReasoningSeal(None).unseal(sealed) == "text"
    (folder / "reasoning.key").unlink()
    assert is_lasting(ReasoningSeal(None))
    assert not list(folder.iterdir())
