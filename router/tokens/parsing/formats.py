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


class ReplyState(enum.Enum):
    """What a stretch of a reply is. The names are those of mlx-lm's response formats."""

    NORMAL = "normal"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"
    """Says what comes next, and is not shown."""


class Marker(NamedTuple):
    """Where ``text`` comes, ``next_state`` begins; None: what the header before it says."""

    text: str
    next_state: ReplyState | None


class ReasoningMarkers(NamedTuple):
    """The markers around reasoning."""

    start: str
    end: str


REASONING = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "longcat": ReasoningMarkers("<longcat_think>", "</longcat_think>"),
    "gemma4": ReasoningMarkers("<|channel>thought", "<channel|>"),
    "kimi_k3": ReasoningMarkers("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}
"""By the name of `--reasoning-parser`."""

_ALSO_DETECTED = ("mistral", "seed_oss")
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HARMONY_CALL = re.compile(r"to=(?:functions\.)?([^\s<]+).*?<\|message\|>(.*)", re.DOTALL)


@dataclass(frozen=True)
class ReplyFormat:
    """``think`` and ``tools`` are None where nothing of the kind is taken out of a reply.
    ``transitions`` are those of replies in several messages, whose first state is
    ``initial_state``.
    """

    think: ReasoningMarkers | None = None
    tools: ToolSyntax | None = None
    transitions: Mapping[ReplyState, tuple[Marker, ...]] | None = None
    initial_state: ReplyState = ReplyState.NORMAL

    @property
    def is_plain(self) -> bool:
        """Whether a reply is all text as long as no tools may be called."""
        return self.think is None and not self.transitions

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is told apart from text."""
        markers = self.markers(calls=False).values()
        return any(
            marker.next_state in (ReplyState.REASONING, None) for each in markers for marker in each
        )

    def markers(self, *, calls: bool) -> dict[ReplyState, tuple[Marker, ...]]:
        """The markers that count in each state; ``calls`` says whether those of calls do."""
        found: dict[ReplyState, list[Marker]] = {state: [] for state in ReplyState}
        for state, markers in (self.transitions or {}).items():
            found[state] += markers
        if self.think is not None:
            found[ReplyState.NORMAL].append(Marker(self.think.start, ReplyState.REASONING))
            found[ReplyState.REASONING].append(Marker(self.think.end, ReplyState.NORMAL))
        if self.tools is not None and calls and self.tools.start:
            into = Marker(self.tools.start, ReplyState.TOOL)
            routed = any(
                marker.next_state is ReplyState.TOOL for each in found.values() for marker in each
            )
            if not routed:
                found[ReplyState.NORMAL].append(into)
            if self.think is not None:
                found[ReplyState.REASONING].append(into)
        if self.tools is not None and self.tools.end:
            found[ReplyState.TOOL].append(Marker(self.tools.end, ReplyState.NORMAL))
        return {state: tuple(markers) for state, markers in found.items()}

    def initial_state_after(self, tail: str) -> ReplyState:
        """The state in which a reply begins to a prompt that ends with ``tail``."""
        if self.think is not None and self.initial_state is ReplyState.NORMAL:
            opened, closed = tail.rfind(self.think.start), tail.rfind(self.think.end)
            return ReplyState.REASONING if opened > closed else ReplyState.NORMAL
        return self.initial_state


def detect_format(tokenizer: Any, *, reasoning: str, tools: str) -> ReplyFormat:
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
        return ReplyFormat(None, syntax, _HARMONY, ReplyState.HEADER)
    transitions: dict[ReplyState, tuple[Marker, ...]] = {}
    begins = ReplyState.NORMAL
    if tokenizer.structural_markers:
        transitions[ReplyState.NORMAL] = tuple(
            Marker(text, ReplyState.NORMAL) for text in tokenizer.structural_markers
        )
    if reasoning == "auto" and tokenizer.response_initial_state is not None:
        begins = ReplyState(tokenizer.response_initial_state)
        for state, edges in tokenizer.response_transitions.items():
            before = transitions.get(ReplyState(state), ())
            transitions[ReplyState(state)] = before + tuple(
                Marker(text, ReplyState(to)) for text, to in edges
            )
    return ReplyFormat(chosen, syntax, transitions, begins)


def _reasoning(tokenizer: Any, vocabulary: Mapping[str, int], name: str) -> ReasoningMarkers | None:
    if name in REASONING:
        return REASONING[name]
    if name != "auto":
        return None
    if tokenizer.has_thinking:
        return ReasoningMarkers(tokenizer.think_start, tokenizer.think_end)
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


def harmony_state(header: str) -> ReplyState:
    if "to=" in header:
        return ReplyState.TOOL
    return ReplyState.REASONING if "analysis" in header else ReplyState.NORMAL


def _harmony_call(text: str, tools: Any) -> dict[str, Any]:
    found = _HARMONY_CALL.search(text)
    if found is None:
        raise ValueError("no recipient")
    return {"name": found[1], "arguments": found[2]}


HARMONY_CALLS = ToolSyntax("harmony", "", "<|call|>", _harmony_call)
_BETWEEN_MESSAGES = tuple(
    Marker(text, ReplyState.HEADER) for text in ("<|end|>", "<|return|>", "<|start|>")
)
_HARMONY = {
    ReplyState.HEADER: (Marker("<|message|>", None),),
    ReplyState.NORMAL: _BETWEEN_MESSAGES,
    ReplyState.REASONING: _BETWEEN_MESSAGES,
    ReplyState.TOOL: (*_BETWEEN_MESSAGES, Marker("<|call|>", ReplyState.HEADER)),
}
