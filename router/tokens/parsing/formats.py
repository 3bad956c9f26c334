"""How a model marks its reasoning and its calls: found from its tokenizer, or set by flags."""

from __future__ import annotations

import enum
import importlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from router.tokens.parsing.calls import JSON, ToolSyntax

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """What a stretch of a reply is. The names are those of mlx-lm's response formats."""

    NORMAL = "normal"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"
    """Says what comes next, and is not shown."""


class Marker(NamedTuple):
    """Where ``text`` comes, ``to`` begins; None: what the header before it says."""

    text: str
    to: State | None


class Block(NamedTuple):
    """The markers around reasoning."""

    start: str
    end: str


REASONING = {
    "think": Block("<think>", "</think>"),
    "longcat": Block("<longcat_think>", "</longcat_think>"),
    "gemma4": Block("<|channel>thought", "<channel|>"),
    "kimi_k3": Block("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mistral": Block("[THINK]", "[/THINK]"),
    "seed_oss": Block("<seed:think>", "</seed:think>"),
}
"""By the name of `--reasoning-parser`."""

_ALSO_DETECTED = ("mistral", "seed_oss")
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HARMONY_CALL = re.compile(r"to=(?:functions\.)?([^\s<]+).*?<\|message\|>(.*)", re.DOTALL)


@dataclass(frozen=True)
class ReplyFormat:
    """``think`` and ``tools`` are None where nothing of the kind is taken out of a reply.
    ``transitions`` are those of replies in several messages, whose first state is ``begins``.
    """

    think: Block | None = None
    tools: ToolSyntax | None = None
    transitions: Mapping[State, tuple[Marker, ...]] | None = None
    begins: State = State.NORMAL

    @property
    def is_plain(self) -> bool:
        """Whether a reply is all text as long as no tools may be called."""
        return self.think is None and not self.transitions

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is told apart from text."""
        markers = self.markers(calls=False).values()
        return any(marker.to in (State.REASONING, None) for each in markers for marker in each)

    def markers(self, *, calls: bool) -> dict[State, tuple[Marker, ...]]:
        """The markers that count in each state; ``calls`` says whether those of calls do."""
        found: dict[State, list[Marker]] = {state: [] for state in State}
        for state, markers in (self.transitions or {}).items():
            found[state] += markers
        if self.think is not None:
            found[State.NORMAL].append(Marker(self.think.start, State.REASONING))
            found[State.REASONING].append(Marker(self.think.end, State.NORMAL))
        if self.tools is not None and calls and self.tools.start:
            into = Marker(self.tools.start, State.TOOL)
            routed = any(marker.to is State.TOOL for each in found.values() for marker in each)
            if not routed:
                found[State.NORMAL].append(into)
            if self.think is not None:
                found[State.REASONING].append(into)
        if self.tools is not None and self.tools.end:
            found[State.TOOL].append(Marker(self.tools.end, State.NORMAL))
        return {state: tuple(markers) for state, markers in found.items()}

    def begins_after(self, tail: str) -> State:
        """The state in which a reply begins to a prompt that ends with ``tail``."""
        if self.think is not None and self.begins is State.NORMAL:
            opened, closed = tail.rfind(self.think.start), tail.rfind(self.think.end)
            return State.REASONING if opened > closed else State.NORMAL
        return self.begins


def detect(tokenizer: Any, *, reasoning: str, tools: str) -> ReplyFormat:
    """The format of ``tokenizer``, mlx-lm's wrapper; ``reasoning`` and ``tools`` are what
    the flags of the parsers say. Raises ImportError where mlx-lm has no such tool parser."""
    vocabulary = tokenizer.get_vocab()
    harmony = all(token in vocabulary for token in _HARMONY_TOKENS)
    chosen = _reasoning(tokenizer, vocabulary, reasoning)
    in_messages = reasoning == "harmony" or (reasoning == "auto" and harmony and chosen is None)
    syntax = _tools(tokenizer, tools)
    if in_messages:
        if tools == "auto" and tokenizer.tool_parser is None:
            syntax = HARMONY_CALLS
        return ReplyFormat(None, syntax, _HARMONY, State.HEADER)
    transitions: dict[State, tuple[Marker, ...]] = {}
    begins = State.NORMAL
    if tokenizer.structural_markers:
        transitions[State.NORMAL] = tuple(
            Marker(text, State.NORMAL) for text in tokenizer.structural_markers
        )
    if reasoning == "auto" and tokenizer.response_initial_state is not None:
        begins = State(tokenizer.response_initial_state)
        for state, edges in tokenizer.response_transitions.items():
            before = transitions.get(State(state), ())
            transitions[State(state)] = before + tuple(
                Marker(text, State(to)) for text, to in edges
            )
    return ReplyFormat(chosen, syntax, transitions, begins)


def _reasoning(tokenizer: Any, vocabulary: Mapping[str, int], name: str) -> Block | None:
    if name in REASONING:
        return REASONING[name]
    if name != "auto":
        return None
    if tokenizer.has_thinking:
        return Block(tokenizer.think_start, tokenizer.think_end)
    for other in _ALSO_DETECTED:
        if all(marker in vocabulary for marker in REASONING[other]):
            return REASONING[other]
    return None


def _tools(tokenizer: Any, name: str) -> ToolSyntax | None:
    if name == "none":
        return None
    if name == "harmony":
        return HARMONY_CALLS
    if name == "auto":
        if tokenizer.tool_parser is None:
            return JSON
        name = tokenizer.init_kwargs.get("tool_parser_type", "")
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        return ToolSyntax(name, start, end, tokenizer.tool_parser)
    return JSON if name == "json" else mlx_lm_syntax(name)


def mlx_lm_syntax(name: str) -> ToolSyntax:
    """The syntax of mlx-lm's tool parser ``name``. Raises ImportError."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolSyntax(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


# -- gpt-oss -------------------------------------------------------------------
# A reply is messages, each with a header: https://developers.openai.com/cookbook/articles/openai-harmony


def harmony_state(header: str) -> State:
    if "to=" in header:
        return State.TOOL
    return State.REASONING if "analysis" in header else State.NORMAL


def _harmony_call(text: str, tools: Any) -> dict[str, Any]:
    found = _HARMONY_CALL.search(text)
    if found is None:
        raise ValueError("no recipient")
    return {"name": found[1], "arguments": found[2]}


HARMONY_CALLS = ToolSyntax("harmony", "", "<|call|>", _harmony_call)
_BETWEEN_MESSAGES = tuple(
    Marker(text, State.HEADER) for text in ("<|end|>", "<|return|>", "<|start|>")
)
_HARMONY = {
    State.HEADER: (Marker("<|message|>", None),),
    State.NORMAL: _BETWEEN_MESSAGES,
    State.REASONING: _BETWEEN_MESSAGES,
    State.TOOL: (*_BETWEEN_MESSAGES, Marker("<|call|>", State.HEADER)),
}
