"""What the chat templates in `templates` do, found by rendering: the table of docs/templates.md."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlx_lm import tokenizer_utils

from router.schemas.conversation import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCall,
)
from router.tokens.templates import ChatTemplate
from tests.router.chat_tokenizer import write_chat_tokenizer

DIRECTORY = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.jinja"))
HEAD = (
    *("template", "tools", "first system messages", "later ones", "results", "two calls"),
    *("text beside a call", "text after a result", "reasoning before a call", "earlier reasoning"),
)
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = Tool(function=FunctionDefinition(name="list", description="Lists.", parameters=_SCHEMA))
USER, AGAIN = ChatMessage("user", "USER-1"), ChatMessage("user", "USER-2")
SYSTEM, DEVELOPER = ChatMessage("system", "SYSTEM-1"), ChatMessage("developer", "SYSTEM-2")
REPLY = ChatMessage("assistant", "REPLY", reasoning_content="EARLIER")
CALL, SECOND_CALL = (
    ToolCall(FunctionCall("list", f'{{"path": "{path}"}}'), id=id)
    for path, id in (("PATH-1", "aaaaaaaa1"), ("PATH-2", "aaaaaaaa2"))
)
RESULT = ChatMessage("tool", "RESULT-1", tool_call_id="aaaaaaaa1")
PARTS = [ContentPart("text", "RESULT-"), ContentPart("text", "2")]
SECOND_RESULT = ChatMessage("tool", PARTS, tool_call_id="aaaaaaaa2")


def template_of(name: str, directory: Path) -> ChatTemplate:
    """Return a template with the tokenizer in ``directory``."""
    tokenizer = tokenizer_utils.load(directory)
    tokenizer.chat_template = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.has_chat_template = True
    return ChatTemplate(tokenizer, {}, has_reasoning=True)


def called(*calls: ToolCall, text: str = "", thought: str | None = None) -> ChatMessage:
    return ChatMessage("assistant", text, tool_calls=list(calls), reasoning_content=thought)


def row(name: str, directory: Path) -> list[str]:
    template = template_of(name, directory)
    limits = template.limits

    def shows(text: str, *messages: ChatMessage) -> bool:
        return text in template.render(messages, [TOOL], {})

    first = "joined" if limits.several_systems else "separate"
    beside = "kept" if shows("TEXT", USER, called(CALL, text="TEXT"), RESULT) else "left out"
    thought = shows("THOUGHT", USER, called(CALL, thought="THOUGHT"), RESULT)
    return [
        f"`{name}`",
        "described" if template.tools_place == "text" else "kept",
        "in the first user message" if limits.system else first,
        "a user message" if limits.later_system else "kept",
        "text" if limits.tool_messages else "kept",
        "one after the other" if limits.several_calls else "together",
        "before it" if limits.text_with_call else beside,
        "in the result" if limits.user_after_tool else "kept",
        "kept" if thought else "left out",
        "kept" if shows("EARLIER", USER, REPLY, AGAIN) else "left out",
    ]


def table() -> tuple[Sequence[str], list[list[str]]]:
    with tempfile.TemporaryDirectory() as directory:
        write_chat_tokenizer(Path(directory))
        return HEAD, [row(name, Path(directory)) for name in NAMES]
