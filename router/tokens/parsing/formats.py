"""How a model marks reasoning and tool calls: detected from its tokenizer, or set by flags."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from router.tokens.parsing.calls import JSON, CallFormat, CallTemplate
from router.tokens.parsing.syntaxes import (
    FORMATS,
    detected_syntax,
    syntax_named,
    template_source,
)


class ReplyState(enum.Enum):
    """The kind of a part of an answer. The names are those of mlx-lm's response formats."""

    NORMAL = "normal"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"  # announces what follows, and is not shown


class Marker(NamedTuple):
    """A text that ends one state of an answer and begins another."""

    text: str
    next_state: ReplyState | None  # None: the header before the marker decides
    at_line_start: bool = False  # whether it counts only at the start of a line


class ReasoningMarkers(NamedTuple):
    """The markers around reasoning."""

    start: str
    end: str


REASONING = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "longcat": ReasoningMarkers("<longcat_think>", "</longcat_think>"),
    "gemma4": ReasoningMarkers("<|channel>thought", "<channel|>"),
    "kimi_k3": ReasoningMarkers("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ReasoningMarkers("<mm:think>", "</mm:think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}
"""By the value of `--reasoning-parser`."""

_ALSO_DETECTED = ("minimax_m3", "mistral", "seed_oss")
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


class MessageFormat(NamedTuple):
    """The messages of an answer that may be restricted to calls of tools."""

    tools: str
    """The format of the calls."""
    reasoning: ReasoningMarkers
    """The header of a message of reasoning, and the text up to the next one's header."""
    headers: tuple[str, ...]
    """The headers of messages without calls."""
    final: str
    """The header of the message that is the answer."""
    first_call: str
    """Another text before the arguments of the first call than that of the format: its template's
    ``before`` and ``begin``."""


@dataclass(frozen=True)
class ReplyFormat:
    """How to parse the answers of a model."""

    think: ReasoningMarkers | None = None  # None: reasoning is not marked
    tools: CallFormat | None = None  # None: no tool calls
    # For answers with several messages: the markers in each state, and the first state.
    transitions: Mapping[ReplyState, tuple[Marker, ...]] | None = None
    initial_state: ReplyState = ReplyState.NORMAL
    messages: MessageFormat | None = None  # None: it has one message, or their headers are unknown

    @property
    def is_plain(self) -> bool:
        """Whether an answer is all text if no tools may be called."""
        return self.think is None and not self.transitions

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be distinguished from text."""
        markers = self.markers(calls=False).values()
        return any(
            marker.next_state in (ReplyState.REASONING, None) for each in markers for marker in each
        )

    def markers(self, *, calls: bool) -> dict[ReplyState, tuple[Marker, ...]]:
        """Return the markers that apply in each state; markers of calls only if ``calls``."""
        markers = {state: list((self.transitions or {}).get(state, ())) for state in ReplyState}
        has_calls = any(m.next_state is ReplyState.TOOL for each in markers.values() for m in each)
        if self.think is not None:
            end = Marker(self.think.end, ReplyState.NORMAL)
            markers[ReplyState.NORMAL] += [Marker(self.think.start, ReplyState.REASONING), end]
            markers[ReplyState.REASONING].append(end)
        if self.tools is not None and calls:
            start, opener = self.tools.start, self.tools.opener
            openers = [Marker(start, ReplyState.TOOL)] if start else []
            if opener:
                at_line_start = self.tools.opener_at_line_start
                openers.append(Marker(opener, ReplyState.TOOL, at_line_start))
            if not has_calls:
                markers[ReplyState.NORMAL] += openers
            if self.think is not None:
                markers[ReplyState.REASONING] += openers
        if self.tools is not None and self.tools.end:
            markers[ReplyState.TOOL].append(Marker(self.tools.end, ReplyState.NORMAL))
        return {state: tuple(each) for state, each in markers.items()}

    def initial_state_after(self, tail: str) -> ReplyState:
        """Return the initial state of the answer to a prompt that ends with ``tail``."""
        if self.think is not None and self.initial_state is ReplyState.NORMAL:
            opened, closed = tail.rfind(self.think.start), tail.rfind(self.think.end)
            return ReplyState.REASONING if opened > closed else ReplyState.NORMAL
        return self.initial_state


def detect_format(tokenizer: Any, *, reasoning: str, tools: str) -> ReplyFormat:
    """Return the format for ``tokenizer``, mlx-lm's wrapper. ``reasoning`` and ``tools`` are the
    values of the parser flags. Raises `ImportError` if mlx-lm has no such tool parser."""
    vocabulary = tokenizer.get_vocab()
    harmony = all(token in vocabulary for token in _HARMONY_TOKENS)
    think = _reasoning(tokenizer, vocabulary, reasoning)
    syntax = _tools(tokenizer, tools)
    if reasoning == "harmony" or (reasoning == "auto" and harmony and think is None):
        if tools == "auto" and tokenizer.tool_parser is None:
            syntax = HARMONY_CALLS
        return replace(HARMONY, tools=syntax)
    transitions: dict[ReplyState, tuple[Marker, ...]] = {}
    initial_state = ReplyState.NORMAL
    if think == (
        minimax := REASONING["minimax_m3"]
    ):  # a reply without reasoning begins with its end
        transitions[ReplyState.NORMAL] = (Marker(minimax.end, ReplyState.NORMAL),)
    if tokenizer.structural_markers:
        transitions[ReplyState.NORMAL] = tuple(
            Marker(text, ReplyState.NORMAL) for text in tokenizer.structural_markers
        )
    if reasoning == "auto" and tokenizer.response_initial_state is not None:
        initial_state = ReplyState(tokenizer.response_initial_state)
        for state, edges in tokenizer.response_transitions.items():
            before = transitions.get(ReplyState(state), ())
            transitions[ReplyState(state)] = before + tuple(
                Marker(text, ReplyState(to)) for text, to in edges
            )
    is_muse = initial_state is ReplyState.HEADER and syntax is FORMATS["muse_spark"]
    return ReplyFormat(think, syntax, transitions, initial_state, MUSE if is_muse else None)


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
    if REASONING["think"].end in template_source(tokenizer):  # spelled out in several tokens
        return REASONING["think"]
    return None


def _tools(tokenizer: Any, name: str) -> CallFormat | None:
    if name == "none":
        return None
    if name == "harmony":
        return HARMONY_CALLS
    if name == "auto":
        name = detected_syntax(tokenizer) or "json"
    return JSON if name == "json" else syntax_named(name)


# -- gpt-oss -------------------------------------------------------------------
# A reply consists of messages, each with a header: https://developers.openai.com/cookbook/articles/openai-harmony


def harmony_state(header: str) -> ReplyState:
    """Return the state that follows ``header``."""
    if "to=" in header:
        return ReplyState.TOOL
    return ReplyState.REASONING if "analysis" in header else ReplyState.NORMAL


HARMONY_CALLS = CallFormat(
    "harmony",
    "",
    "<|call|>",
    CallTemplate("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
    heads=(
        r"(?s:.{0,200}?)(?:\A|\s)to=(?:functions\.)?NAME(?=[\s<])(?s:.{0,200}?)<\|message\|>"
        r"\s*+(?=\{)",
    ),
)
_BETWEEN_MESSAGES = tuple(
    Marker(text, ReplyState.HEADER) for text in ("<|end|>", "<|return|>", "<|start|>")
)
_TRANSITIONS = {
    ReplyState.HEADER: (Marker("<|message|>", None),),
    ReplyState.NORMAL: _BETWEEN_MESSAGES,
    ReplyState.REASONING: _BETWEEN_MESSAGES,
    ReplyState.TOOL: (*_BETWEEN_MESSAGES, Marker("<|call|>", ReplyState.HEADER)),
}
HARMONY = ReplyFormat(
    None,
    HARMONY_CALLS,
    _TRANSITIONS,
    ReplyState.HEADER,
    MessageFormat(
        "harmony",
        ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        tuple(f"<|channel|>{each}<|message|>" for each in ("analysis", "commentary", "final")),
        "<|channel|>final<|message|>",
        # The model names a function after its channel; the template writes it before.
        " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
    ),
)
MUSE = MessageFormat(
    "muse_spark",
    ReasoningMarkers(" to=self<|message|>", "<|eom|><|start|>assistant"),
    tuple(f" to={each}<|message|>" for each in ("self", "user", "commentary")),
    " to=user<|message|>",
    ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
)
"""Those of Muse Spark: `mlx_lm.chat_templates.muse_spark`."""

CALL_FORMATS = {**FORMATS, JSON.name: JSON, HARMONY_CALLS.name: HARMONY_CALLS}
"""All formats of calls, by the value of `--tool-parser`."""
