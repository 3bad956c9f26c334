"""The answers of one model: their parsers, and the grammars that restrict them to tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from router.errors import InvalidRequest
from router.schemas.conversation import TextFunction, Tool
from router.schemas.structured import check_grammar_size, lark_grammar
from router.tokens.conversations.tools import tool_schema
from router.tokens.parsing.calls import JSON, CallFormat
from router.tokens.parsing.formats import ReasoningMarkers, ReplyFormat, ReplyState
from router.tokens.parsing.grammars import call_format, calls_grammar, messages_grammar
from router.tokens.parsing.lark_parts import ControlTokens, json_rule
from router.tokens.parsing.marked import MarkedReplyParser, call_id, short_call_id
from router.tokens.reply_parser import PlainReplyParser, ReplyParser
from router.tokens.vocabulary import Vocabulary
from shared.wire import Grammar, ThinkingBudget

_TAIL_TOKENS = 64
_NOT_JSON = r"/([^\s{\[`<](?s:.*))?/"


class ToolCallPolicy(NamedTuple):
    """The tool calls that a request allows."""

    tools: Sequence[Tool]  # the tools that may be called
    required: bool = False  # whether a call is required
    parallel: bool = True  # whether several calls are allowed


class ModelReplies:
    """Creates the parser and the grammar of an answer, for the format of one model."""

    def __init__(
        self, format: ReplyFormat, tokenizer: Any, vocabulary: Vocabulary, *, short_ids: bool
    ) -> None:
        self.format = format
        self._vocabulary = vocabulary
        self._new_id = short_call_id if short_ids else call_id
        added = {token: each for token, each in tokenizer.added_tokens_decoder.items() if str(each)}
        self.added_tokens = {token: str(each) for token, each in added.items()}
        self._special = {token: str(each) for token, each in added.items() if each.special}
        # llguidance treats every added token in angle brackets as a control token, special or not.
        self._control_tokens = ControlTokens(
            {
                text: token
                for token, text in self.added_tokens.items()
                if token in self._special or (text[0] == "<" and text[-1] == ">")
            }
        )
        markers = format.messages.reasoning if format.messages else format.think or ("", "")
        self._reasoning_start_ids, self._reasoning_end_ids = (
            list(tokenizer.encode(marker, add_special_tokens=False)) if marker else []
            for marker in markers
        )

    def parser(self, prompt: Sequence[int], policy: ToolCallPolicy) -> ReplyParser:
        """Return the parser of an answer to ``prompt``."""
        format = self._format_for(policy)
        tools = policy.tools if format.tools is not None else ()
        if format.is_plain and not tools:
            return PlainReplyParser()
        return MarkedReplyParser(
            format,
            format.initial_state_after(self._tail(prompt)),
            [tool_schema(tool) for tool in tools],
            single_call=not policy.parallel,
            only_calls=policy.required,
            new_id=self._new_id,
        )

    def grammar(
        self, prompt: Sequence[int], policy: ToolCallPolicy, bound: Grammar | None
    ) -> Grammar | None:
        """Return the grammar of an answer to ``prompt``: tool calls if they are required or have
        strict arguments, otherwise ``bound``, the request's own grammar. It applies after reasoning
        that ``prompt`` begins. Raises `InvalidRequest`."""
        tail = self._tail(prompt)
        grammar = self._calls_grammar(policy, bound, tail) or bound
        if grammar is None or self.format.initial_state_after(tail) is not ReplyState.REASONING:
            return grammar
        return msgspec.structs.replace(grammar, after=self._reasoning_end_ids)

    def thinking(self, prompt: Sequence[int], tokens: int) -> ThinkingBudget | None:
        """Return the budget of ``tokens`` for reasoning in an answer to ``prompt``; None if the
        model's reasoning markers are unknown."""
        if not self._reasoning_end_ids:
            return None
        is_open = self.format.initial_state_after(self._tail(prompt)) is ReplyState.REASONING
        return ThinkingBudget(
            tokens=tokens,
            start_ids=self._reasoning_start_ids,
            end_ids=self._reasoning_end_ids,
            is_open=is_open,
        )

    def opening(self, ending: str) -> str:
        """Return the text that leads from the ``ending`` of a prompt, without reasoning, to where
        the text of an answer begins. The template has been told not to let the model reason, which
        not every template can."""
        think, messages = self.format.think, self.format.messages
        if messages is not None:
            return messages.final
        if think is None:
            return ""
        opened, closed = ending.rfind(think.start), ending.rfind(think.end)
        if opened > closed:
            blank = ending[opened + len(think.start) :]
            return f"\n{think.end}\n\n" if "\n" in blank else think.end
        if closed >= 0 or not all(self._control_tokens.occur_in(marker) for marker in think):
            return ""
        if think.start.startswith("<|channel>"):  # Gemma 4 ends the name of a channel with a line
            return f"{think.start}\n{think.end}"
        return f"{think.start}\n\n{think.end}\n\n" if think.start[0] == "<" else "".join(think)

    def _calls_grammar(
        self, policy: ToolCallPolicy, bound: Grammar | None, tail: str
    ) -> Grammar | None:
        functions = [tool.function for tool in policy.tools]
        calls = self._calls_for(policy)
        if not functions or calls is None:
            return None
        alternative = None
        optional = False  # whether text may replace or surround calls
        messages = self.format.messages
        if messages is None or messages.tools != calls.name:
            messages = None
        in_messages = False  # whether the grammar is that of messages, the last perhaps a call
        if not policy.required:
            if bound is not None:
                alternative = _json_rule_of(bound)
                if alternative is None:
                    return None
            elif not any(function.strict for function in functions):
                return None
            elif messages is not None and self._control_tokens.occur_in(messages.reasoning.end):
                in_messages = True
            elif self.format.initial_state is not ReplyState.NORMAL:
                return None
            elif calls.start:
                optional = True
            else:
                alternative = _NOT_JSON
        # Checked before writing the grammar, which contains every schema.
        parts = [f.input_grammar for f in functions if isinstance(f, TextFunction)]
        size = sum(len(msgspec.json.encode(f.parameters)) for f in functions)
        check_grammar_size(size + sum(len(part.source) for part in parts), "tools")
        if in_messages and messages is not None:
            text = messages_grammar(
                messages, calls, functions, self._control_tokens, parallel=policy.parallel
            )
        else:
            between = (self.format.transitions or {}).get(ReplyState.NORMAL, ())
            text = calls_grammar(
                calls,
                functions,
                self._control_tokens,
                parallel=policy.parallel,
                think=self._optional_reasoning(self._format_for(policy), tail),
                optional=optional,
                structure=[marker.text for marker in between],
                alternative=alternative,
                first_call=messages.first_call if messages is not None else "",
            )
        param = None if bound is None or policy.required else bound.param
        grammar = lark_grammar(text, param or "tools")
        return msgspec.structs.replace(grammar, parts=parts)

    def _optional_reasoning(self, format: ReplyFormat, tail: str) -> ReasoningMarkers | None:
        """Return the markers of reasoning that an answer may begin by itself."""
        think = format.think
        if format.messages is not None:
            return format.messages.reasoning
        if think is None or think.start in tail or think.end in tail:
            return None
        return think if all(marker in self._control_tokens.control for marker in think) else None

    def _calls_for(self, policy: ToolCallPolicy) -> CallFormat | None:
        """Return the format of tool calls: the model's own, or plain JSON if that is unknown and a
        call is required."""
        if self.format.tools is None:
            return JSON if policy.required else None
        return call_format(self.format.tools.name, self._control_tokens)

    def _format_for(self, policy: ToolCallPolicy) -> ReplyFormat:
        """Return the format of answers: not the model's own if required calls are plain JSON."""
        if policy.required and self._calls_for(policy) is JSON:
            normal = ReplyState.NORMAL
            return replace(
                self.format, tools=JSON, transitions=None, initial_state=normal, messages=None
            )
        return self.format

    def _tail(self, prompt: Sequence[int]) -> str:
        """Return the end of ``prompt``, back to the last control token other than a reasoning
        marker."""
        markers = "" if self.format.think is None else "".join(self.format.think)
        start = len(prompt)
        while start > max(0, len(prompt) - _TAIL_TOKENS):
            special = self._special.get(prompt[start - 1])
            if special is not None and special not in markers:
                break
            start -= 1
        tail = prompt[start:]
        return "".join(self.added_tokens.get(t) or self._vocabulary.token_text(t) for t in tail)


def _json_rule_of(grammar: Grammar) -> str | None:
    """Return the rule of the JSON that ``grammar`` allows; None if it is not a schema with fields.
    Raises `InvalidRequest`."""
    if grammar.kind != "json_schema":
        return None
    try:
        schema = msgspec.json.decode(grammar.source)
        return json_rule(schema) if isinstance(schema, dict) else None
    except RecursionError:  # this is a few calls deeper than the check of the request was
        param = grammar.param
        raise InvalidRequest(f"'{param}' is nested too deeply.", param=param) from None
