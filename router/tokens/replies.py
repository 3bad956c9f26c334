"""What one model's replies look like: how they are taken apart, and how they are held to calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from router.schemas.conversation import Tool
from router.schemas.structured import lark
from router.tokens.parsing.calls import JSON
from router.tokens.parsing.formats import Block, ReplyFormat, State
from router.tokens.parsing.grammars import (
    TEMPLATES,
    CallTemplate,
    Tokens,
    calls_grammar,
    json_rule,
    template_of,
)
from router.tokens.parsing.live import LiveCalls
from router.tokens.parsing.marked import MarkedReply, call_id, short_call_id
from router.tokens.reply import PlainReply, ReplyParser
from router.tokens.templates import describe
from router.tokens.vocabulary import Vocabulary
from shared.wire import Grammar

_TAIL_TOKENS = 64
_NOT_JSON = r"/([^\s{\[`<](?s:.*))?/"
_HARMONY_ANALYSIS = Block("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


class AskedCalls(NamedTuple):
    """What a request says of calls: which ``tools`` may be called, whether one ``must`` be, and
    ``several`` may."""

    tools: Sequence[Tool]
    must: bool = False
    several: bool = True


class Replies:
    def __init__(
        self, format: ReplyFormat, tokenizer: Any, vocabulary: Vocabulary, *, short_ids: bool
    ) -> None:
        self.format = format
        self._vocabulary = vocabulary
        self._new_id = short_call_id if short_ids else call_id
        added = {token: each for token, each in tokenizer.added_tokens_decoder.items() if str(each)}
        self._added = {token: str(each) for token, each in added.items()}
        self._special = {token: str(each) for token, each in added.items() if each.special}
        # llguidance takes what is in angle brackets for a control token, special or not.
        self._tokens = Tokens(
            {
                text: token
                for token, text in self._added.items()
                if token in self._special or (text[0] == "<" and text[-1] == ">")
            }
        )
        self._think_end: list[int] = []
        if format.think is not None:
            self._think_end = list(tokenizer.encode(format.think.end, add_special_tokens=False))

    def parser(self, prompt: Sequence[int], asked: AskedCalls) -> ReplyParser:
        """What takes a reply to ``prompt`` apart."""
        format = self._format_for(asked)
        tools = asked.tools if format.tools is not None else ()
        if format.is_plain and not tools:
            return PlainReply()
        template = self._template(asked)
        live = None
        if asked.must and tools and template is not None and not template.argument:
            live = LiveCalls(template, [tool.function.name for tool in tools])
        return MarkedReply(
            format,
            format.begins_after(self._tail(prompt)),
            [describe(tool) for tool in tools],
            one_call=not asked.several,
            new_id=self._new_id,
            live=live,
        )

    def grammar(
        self, prompt: Sequence[int], asked: AskedCalls, bound: Grammar | None
    ) -> Grammar | None:
        """What holds a reply to calls that must be made or have strict arguments, and else to
        ``bound``; behind the reasoning that ``prompt`` opens. Raises `InvalidRequest`."""
        tail = self._tail(prompt)
        grammar = self._calls(asked, bound, tail) or bound
        if grammar is None or self.format.begins_after(tail) is not State.REASONING:
            return grammar
        return msgspec.structs.replace(grammar, after=self._think_end)

    def _calls(self, asked: AskedCalls, bound: Grammar | None, tail: str) -> Grammar | None:
        functions = [tool.function for tool in asked.tools]
        format = self._format_for(asked)
        template = self._template(asked)
        if not functions or format.tools is None or template is None:
            return None
        instead = unlike = None
        if not asked.must:
            if bound is not None:
                schema = msgspec.json.decode(bound.source) if bound.kind == "json_schema" else None
                if not isinstance(schema, dict):
                    return None
                instead = json_rule(schema)
            elif not any(function.strict for function in functions) or format.transitions:
                return None
            elif format.tools.start:
                unlike = format.tools.start
            else:
                instead = _NOT_JSON
        text = calls_grammar(
            template,
            functions,
            self._tokens,
            several=asked.several,
            think=self._may_think(format, tail),
            unlike=unlike,
            instead=instead,
        )
        return lark(text, "tools" if bound is None or asked.must else bound.param or "tools")

    def _may_think(self, format: ReplyFormat, tail: str) -> Block | None:
        """The reasoning that a reply may begin with by itself."""
        think = format.think
        if format.begins is State.HEADER:
            return _HARMONY_ANALYSIS
        if think is None or think.start in tail or think.end in tail:
            return None
        return think if all(marker in self._tokens.control for marker in think) else None

    def _template(self, asked: AskedCalls) -> CallTemplate | None:
        if self.format.tools is None:
            return TEMPLATES[JSON.name] if asked.must else None
        functions = [tool.function for tool in asked.tools]
        own = template_of(self.format.tools.name, functions, self._tokens)
        return own or (TEMPLATES[JSON.name] if asked.must else None)

    def _format_for(self, asked: AskedCalls) -> ReplyFormat:
        """Calls that must be made are plain JSON where the model's own way is not known."""
        template = self._template(asked)
        if asked.must and template is TEMPLATES[JSON.name]:
            return replace(self.format, tools=JSON, transitions=None, begins=State.NORMAL)
        return self.format

    def _tail(self, prompt: Sequence[int]) -> str:
        """The end of ``prompt``, back to a control token that has nothing to do with reasoning."""
        markers = "" if self.format.think is None else "".join(self.format.think)
        start = len(prompt)
        while start > max(0, len(prompt) - _TAIL_TOKENS):
            special = self._special.get(prompt[start - 1])
            if special is not None and special not in markers:
                break
            start -= 1
        tail = prompt[start:]
        return "".join(self._added.get(t) or self._vocabulary.text(t) for t in tail)
